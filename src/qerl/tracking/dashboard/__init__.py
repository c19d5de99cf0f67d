"""Show runs in the browser while they train: the report's page, updated every second.

follow.py   growing files -> runs          gpu.py      GPU use, from nvidia-smi
live.py     answers to the page            server.py   HTTP server on 127.0.0.1
"""
