"""Talk to a model: chat in the terminal, and an OpenAI-compatible server over the engine.

loaded_model.py   load a model or a run's newest adapter   stream.py     tokens -> pieces of text
chat.py           the terminal                             batcher.py    the thread that runs the engine
fields.py         bodies of requests, errors               request.py    bodies -> prompts and sampling
grammar.py        JSON schemas                             tools.py      tool calls in an answer
response.py       samples -> OpenAI's responses            responses.py  the same for /v1/responses
app.py            routes and access check                  gate.py       what all requests pass
server.py         address, API key, start and shutdown     connections.py  accepting, deadlines, the cap
metrics.py        Prometheus' text                         log_limit.py  one log line of a kind per period
agents/           record agents' episodes as samples
"""
