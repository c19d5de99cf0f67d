"""What others take over from a run: its adapter, the merged model, the merged model in 4 bits."""

from qerl.export.write import export

__all__ = ["export"]
