"""Train with an agent that you already have: it talks to the model through an OpenAI-compatible endpoint.

record.py      one episode's answers as tokens, joined where a prompt extends an earlier one
replay.py      play an episode again up to a call: the beginning of a branch
parser.py      requests of an episode -> prompts and sampling of the run
endpoint.py    the server on loopback: a base URL and a key per episode
worker.py      the process in which the agents run       outcomes.py   what it reports of them
verifiers.py   an agent that plays an environment of verifiers; openenv.py one of OpenEnv
rollout.py     episodes behind the engine's interface    function.py   find the agent, train with it

agent (worker) --HTTP--> endpoint --> batcher --> engine         one process, another thread
      |                     +--> record: tokens and logprobs
      +--pipe--> reward                +--> samples --> learner
"""

from collections.abc import Callable
from typing import Any

from qerl.config import RunConfig
from qerl.tasks.env_packages import ENDPOINT_PACKAGES, require_installed


def train_with_agent(config: RunConfig, agent: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Train with `agent`, or with the one that config.agent.function names. See `qerl.train`. Raise UserError
    if a package that the endpoint needs is missing."""
    require_installed("an agent", *ENDPOINT_PACKAGES)
    from qerl.serve.agents.rollout import make_agents  # this module imports those packages
    from qerl.training.session import train

    with make_agents(config, agent) as pool:
        return train(config, agents=pool)
