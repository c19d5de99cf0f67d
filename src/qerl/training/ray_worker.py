"""The part of a Ray worker: sample what the learner's process asks for, episodes too.

    one process         the engine, and for agents their endpoint on loopback
    its child           the environments or the agents, forked before the model is loaded

The samples, with their rewards by episode and their failures, go back to the learner's process, which scores
them.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from qerl.aqn.aqn import AQN
from qerl.config import RunConfig
from qerl.engine.local_engine import LocalEngine
from qerl.errors import UserError
from qerl.models.peft.adapter import load_adapter
from qerl.models.policy_model import PolicyModel
from qerl.training.engines.replayed_batch import HistoriesPG, Parent, ReplayingEngine, SingleTurns
from qerl.training.policy import load_sampler, load_tokenizer_and_limit
from qerl.types import GenerateRequest, Prompt, Sample


class Episodes(Protocol):
    """Maker of episodes of an engine's samples; its process is started before the model is loaded."""

    def engine(self, engine: LocalEngine) -> ReplayingEngine: ...


MakeEpisodes = Callable[[], Episodes]
"""Sent to each worker and called there."""


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """The policy that a request is sampled with."""

    version: int
    adapter: list[Any]
    """Ray's reference to the fp32 masters, in a list so that Ray does not fetch them for every request."""
    noise: Mapping[str, Any] | None
    """None: no noise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """A worker's answer."""

    groups_P: list[tuple[Prompt | None, list[Sample]]]
    """Samples of each prompt, and the prompt itself where an environment has extended it."""
    histories_P_G: HistoriesPG
    """Histories of the samples; empty if they are not branched."""
    noise_draws: int
    num_tokens: int
    metrics: dict[str, float]
    """The engine's loaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    model: PolicyModel
    inner: LocalEngine
    engine: ReplayingEngine
    noise: AQN


class Worker:
    """An engine with its own base model and adapter, in a Ray process."""

    def __init__(self, config: RunConfig, make_episodes: bytes):
        """make_episodes: the pickled MakeEpisodes; None in place of it: samples of a single turn."""
        self._config, self._make_episodes = config, make_episodes
        self._get: Callable[[Any], Any] = importlib.import_module("ray").get

    @functools.cached_property
    def _loaded(self) -> _Loaded:
        """Load on the first call, whose errors reach the learner's process as they are."""
        config = self._config
        try:
            make: MakeEpisodes | None = pickle.loads(self._make_episodes)
            episodes = None if make is None else make()
        except (ImportError, AttributeError, UserError) as error:
            place = f"a worker on {socket.gethostname()}"
            raise UserError(f"--ray: {place} cannot load the environment or agent: {error}") from None
        tokenizer, _ = load_tokenizer_and_limit(config)
        model, inner = load_sampler(config, tokenizer)
        engine = SingleTurns(inner) if episodes is None else episodes.engine(inner)
        return _Loaded(model, inner, engine, AQN(model.noise_table, config))

    def place(self) -> str:
        """Load; return where the worker runs."""
        assert self._loaded
        return f"process {os.getpid()} on {socket.gethostname()}"

    def sample(self, policy: PublishedPolicy, request: GenerateRequest) -> Sampled:
        with self._sampling_by(policy, request.step) as loaded:
            groups_P, histories_P_G = loaded.engine.sample(request)
        pairs = zip(groups_P, request.prompts_P, strict=True)
        sampled_P = [(None if g.prompt is prompt else g.prompt, g.samples_G) for g, prompt in pairs]
        is_branched = self._config.algo.branching != "none"
        return self._sampled(sampled_P, policy, histories_P_G if is_branched else [])

    def branch(
        self, policy: PublishedPolicy, parents: list[Parent], num_branches: int, request: GenerateRequest
    ) -> Sampled:
        """Branch samples of any worker."""
        with self._sampling_by(policy, request.step) as loaded:
            branches = loaded.engine.branch(parents, num_branches, request)
        return self._sampled([(None, samples_G) for samples_G in branches], policy)

    @contextlib.contextmanager
    def _sampling_by(self, policy: PublishedPolicy, step: int) -> Iterator[_Loaded]:
        """Sample with this version, fetching its adapter if it changed."""
        loaded = self._loaded
        if policy.version != loaded.inner.version or policy.version == 0:
            load_adapter(loaded.model, self._get(policy.adapter[0]))
            loaded.engine.publish(policy.version)
        with contextlib.ExitStack() as stack:
            if policy.noise is not None:
                loaded.noise.load(policy.noise)
                stack.enter_context(loaded.noise.sampling(step))
            yield loaded

    def _sampled(
        self,
        groups_P: list[tuple[Prompt | None, list[Sample]]],
        policy: PublishedPolicy,
        histories_P_G: HistoriesPG | None = None,
    ) -> Sampled:
        loaded = self._loaded
        return Sampled(
            groups_P=groups_P,
            histories_P_G=histories_P_G or [],
            noise_draws=0 if policy.noise is None else loaded.noise.num_drawn,
            num_tokens=loaded.engine.stats.num_tokens,
            metrics=loaded.engine.take_metrics(),
        )
