"""Train with an agent that you already have: it talks to the model through an OpenAI-compatible endpoint.

record.py      one episode's answers as tokens, joined where a prompt extends an earlier one
parser.py      requests of an episode -> prompts and sampling of the run
endpoint.py    the server on loopback: a base URL and a key per episode
worker.py      the process in which the agents run       outcomes.py   what it reports of them
verifiers.py   an agent that plays an environment of verifiers; openenv.py one of OpenEnv
rollout.py     episodes behind the engine's interface    function.py   find the agent, train with it

agent (worker) --HTTP--> endpoint --> batcher --> engine         one process, another thread
      |                     +--> record: tokens and logprobs
      +--pipe--> reward                +--> samples --> learner
"""

from qerl.serve.agents.function import train_with_agent

__all__ = ["train_with_agent"]
