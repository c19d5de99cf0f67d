"""Runs in the browser while they go on and afterwards: the report's page, which asks for what is new.

follow.py   files that grow -> runs        gpu.py      what nvidia-smi says
live.py     what the page asks for         server.py   on this machine's own address
"""
