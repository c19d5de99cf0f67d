"""Talk to a model: chat in the terminal, and an OpenAI-compatible server over the engine.

loaded_model.py   load a model or a run's newest adapter   stream.py     tokens -> pieces of text
chat.py           the terminal                             batcher.py    queue; equal requests in one call
request.py        request bodies -> prompts                response.py   samples -> OpenAI's responses
app.py            routes and access check                  server.py     address, API key, start and shutdown
"""
