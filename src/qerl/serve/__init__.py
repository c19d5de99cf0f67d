"""Answers people: a chat in the terminal, and an OpenAI-compatible server over the engine.

loaded_model.py   a model or a run's newest adapter      stream.py   tokens -> text that is never taken back
chat.py     the terminal                           batcher.py     requests that wait; alike ones, one call
request.py  bodies checked and made into prompts   reply.py    samples in OpenAI's words
app.py      the routes                             server.py   address, key, start and end
"""
