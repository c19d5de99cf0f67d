"""Serve Tinker's API: programs written for the client `tinker` train and sample adapters on this device.

server.py       start              app.py        routes
bodies.py       JSON bodies        wire.py       protobuf
service.py      sessions, clients  worker.py     turns of clients   checkpoints.py  on the disk
adapter.py      adapters, updates  passes.py     gradients          losses.py    Tinker's losses
sampling.py     samples
"""
