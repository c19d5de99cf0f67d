"""Export a run as a PEFT adapter, as a merged model, or as a merged model in NVFP4."""

from qerl.export.write import export

__all__ = ["export"]
