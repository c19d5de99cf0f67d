"""Episodes of an agent behind the engine's interface: one per sample, all at once.

    open a key per sample  ->  the worker runs the agent for all  ->  samples from what was recorded

An episode that raises, returns no number, calls no model or takes too long has a failure and no reward; the
others are learned from.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from qerl.algo.seeds import mix
from qerl.config import AgentConfig, RunConfig, TaskConfig
from qerl.engine.local_engine import LocalEngine
from qerl.engine.stats import Stats
from qerl.serve.agents.endpoint import MODEL_NAME, Endpoint
from qerl.serve.agents.function import find_agent, with_absolute_paths
from qerl.serve.agents.outcomes import Outcome, OutcomePipe
from qerl.serve.agents.parser import OpenEpisode
from qerl.serve.agents.record import EpisodeRecord
from qerl.serve.agents.replay import Replay, calls_before
from qerl.serve.agents.worker import AgentCall, AgentWorker
from qerl.serve.batcher import PromptTokens
from qerl.serve.loaded_model import LoadedModel
from qerl.tasks.memory_limit import stack_bytes
from qerl.tasks.scoring import Failure, name_of
from qerl.tasks.worker_pool import WorkerLost, WorkerPool
from qerl.training.engines.replayed_batch import HistoriesPG, Parent, ReplayingEngine
from qerl.training.ray_worker import MakeEpisodes
from qerl.types import Episode, GenerateRequest, Group, Prompt, Sample, Sampling

_AGENT = 5  # keeps these seeds apart from other draws
_SPARE_S = 60.0


class AgentPool:
    """The agents' process, and the endpoint once there is an engine. Made before a model is loaded."""

    def __init__(
        self,
        function: Callable[..., Any],
        config: AgentConfig,
        task: TaskConfig,
        make: MakeEpisodes | None = None,
    ):
        """make: makes the same in a Ray worker."""
        self.function, self.make, self._config = function, make, config
        self._pipe = OutcomePipe()
        worker = AgentWorker(function, config, self._pipe)
        memory_bytes = int(task.reward_memory_gb * 1e9) + stack_bytes(config.max_concurrent)
        self._pool = WorkerPool(worker.play, num_workers=1, memory_bytes=memory_bytes)
        self._pipe.start()
        self._endpoint: Endpoint | None = None
        self._prefilled = PromptTokens()
        self._num_rollouts = 0

    def __enter__(self) -> "AgentPool":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._endpoint is not None:
            self._endpoint.stop()
        self._pool.stop()
        self._pipe.close()

    def engine(self, engine: LocalEngine) -> "AgentEngine":
        """Return what samples episodes."""
        max_positions = min(self._config.context_tokens, engine.max_positions)
        self._endpoint = Endpoint(LoadedModel(engine, max_positions), self._config)
        self._endpoint.start()
        return AgentEngine(engine, self)

    def take_prefilled(self) -> PromptTokens:
        """Return the tokens of prompts that were reused and computed since this was last called."""
        assert self._endpoint is not None
        before, self._prefilled = self._prefilled, self._endpoint.prefilled
        return self._prefilled - before

    def play(
        self, records: list[tuple[EpisodeRecord, int]], rows: list[dict[str, Any]], sampling: Sampling
    ) -> tuple[list[Outcome], list[float]]:
        """Return each episode's outcome, and its seconds. records: with the episodes' seeds."""
        assert self._endpoint is not None
        pipe, self._num_rollouts = self._pipe, self._num_rollouts + 1
        with self._endpoint.opened(records, sampling) as episodes:
            endpoint = self._endpoint
            close = lambda index: endpoint.close_episode(episodes[index])  # noqa: E731
            pipe.listen(self._num_rollouts, len(episodes), close)
            limit_s = self._config.step_timeout_s
            ends_s = None if limit_s is None else time.monotonic() + limit_s
            calls = [self._call(i, *each, ends_s) for i, each in enumerate(zip(episodes, rows, strict=True))]
            while calls:
                lost = self._run(calls)
                pipe.drain(len(episodes) if lost is None else 0)
                known = {*pipe.began_s, *pipe.outcomes}
                ended = {call.index for call in calls} & known or {call.index for call in calls}
                for index in ended - pipe.outcomes.keys():  # all of them if the process cannot even begin
                    pipe.outcomes[index] = Outcome(failure=lost or _UNREPORTED)
                    endpoint.close_episode(episodes[index])
                calls = [call for call in calls if call.index not in ended]
        began_s, ended_s = pipe.began_s, pipe.ended_s
        seconds = [ended_s.get(i, 0.0) - began_s.get(i, 0.0) for i in range(len(records))]
        return [pipe.outcomes[i] for i in range(len(records))], seconds

    def _call(self, index: int, episode: OpenEpisode, row: dict[str, Any], ends_s: float | None) -> AgentCall:
        return AgentCall(
            call=self._num_rollouts,
            index=index,
            base_url=episode.base_url,
            api_key=episode.api_key,
            model=MODEL_NAME,
            row=row,
            seed=episode.seed,
            ends_s=ends_s,
        )

    def _run(self, calls: list[AgentCall]) -> Failure | None:
        """Run the episodes; return why their process was lost, if it was."""
        waves = -(-len(calls) // self._config.max_concurrent)
        deadline_s = (waves + 1) * self._config.episode_timeout_s + _SPARE_S
        (ended,) = self._pool.run([calls], deadline_s=deadline_s)
        if isinstance(ended, WorkerLost):
            return Failure(ended.cause, f"{name_of(self.function)}: {ended.message}")
        if ended:
            self._pool.stop()  # with the threads that go on; the next run starts a process
        return None


def make_agents(config: RunConfig, agent: Callable[..., Any] | None = None) -> AgentPool:
    """Return the pool of `agent`, or of the agent that config.agent.function names. See `find_agent`."""
    make = functools.partial(make_agents, with_absolute_paths(config), agent)
    return AgentPool(find_agent(config, agent), config.agent, config.task, make)


_UNREPORTED = Failure("no outcome", "the agents' process did not say how the episode ended")


class AgentEngine(ReplayingEngine):
    def __init__(self, engine: LocalEngine, pool: AgentPool):
        self._engine, self._pool = engine, pool
        self.stats = Stats()
        """num_tokens of the latest call; after branch_batches, of episodes and branches."""

    def publish(self, version: int) -> None:
        self._engine.publish(version)

    def take_metrics(self) -> dict[str, float]:
        """kept_tokens: of prompts, whose pages were kept. prefill_tokens: of prompts that were computed, and
        tokens that were computed again."""
        taken = self._pool.take_prefilled()
        return {"kept_tokens": taken.num_reused, "prefill_tokens": taken.num_computed}

    def sample(self, request: GenerateRequest) -> tuple[list[Group], HistoriesPG]:
        """Return the episodes of each row, and the calls of each."""
        prompts_P, size = request.prompts_P, request.num_samples
        places = [(prompt, g) for prompt in prompts_P for g in range(size)]
        records = [self._new_record(g) for _, g in places]
        samples, begins = self._play(places, records, request), range(0, len(places), size)
        groups = [
            Group(prompt=prompt, samples_G=samples[i : i + size])
            for prompt, i in zip(prompts_P, begins, strict=True)
        ]
        return groups, [[record.calls for record in records[i : i + size]] for i in begins]

    def branch(
        self, parents: list[Parent], num_branches: int, request: GenerateRequest
    ) -> list[list[Sample]]:
        """Return num_branches episodes for each parent, each of whose pivots is one of its
        Episode.turn_starts."""
        places, records = [], []
        for parent in parents:
            calls, g = calls_before(parent.history, parent.prefix_tokens), parent.sample.sample_index
            for branch in range(num_branches):
                places.append((parent.row, g))
                records.append(self._new_record(g, Replay(calls, branch)))
        samples = self._play(places, records, request)
        return [samples[i : i + num_branches] for i in range(0, len(samples), num_branches)]

    def _new_record(self, sample_index: int, replay: Replay | None = None) -> EpisodeRecord:
        return EpisodeRecord(self._engine.tokenizer, sample_index=sample_index, replay=replay)

    def _play(
        self, places: list[tuple[Prompt, int]], records: list[EpisodeRecord], request: GenerateRequest
    ) -> list[Sample]:
        """Return the sample of each episode. places: (row, index of the sample) whose seed the agent gets."""
        rows = [prompt.columns | {"prompt": prompt.messages or prompt.text} for prompt, _ in places]
        seeds = [mix(request.seed, _AGENT, request.step, prompt.index, g) for prompt, g in places]
        outcomes, seconds = self._pool.play(list(zip(records, seeds, strict=True)), rows, request.sampling)
        samples = [
            _sample(prompt, record, outcome, took_s, self._engine.version)
            for (prompt, _), record, outcome, took_s in zip(places, records, outcomes, seconds, strict=True)
        ]
        self.stats = Stats(num_tokens=sum(len(sample.logprobs_T) for sample in samples))
        return samples


def _sample(prompt: Prompt, record: EpisodeRecord, outcome: Outcome, took_s: float, version: int) -> Sample:
    """Return the episode as a sample: its parts, and their tokens one after the other."""
    parts, failure = record.parts(prompt), outcome.failure
    if record.replay is not None:
        failure = record.replay.failure or failure
    if not parts and failure is None:
        failure = Failure("no call", "the agent returned without an answer of the model")
    tokens_T, logprobs_T, spans, messages = [], [], [], []
    for number, part in enumerate(parts, 1):
        (sample,) = part.samples_G
        spans += [range(len(tokens_T) + s.start, len(tokens_T) + s.stop) for s in sample.environment_spans]
        tokens_T += sample.tokens_T
        logprobs_T += sample.logprobs_T
        if number > 1:
            messages.append({"role": "part", "content": f"{number} of {len(parts)}"})
        messages += sample.messages or []
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=logprobs_T,
        text="\n".join(f"{message['role']}: {message['content']}" for message in messages),
        finish="length" if any(part.samples_G[0].finish == "length" for part in parts) else "stop",
        version=version,
        sample_index=record.sample_index,
        environment_spans=tuple(spans),
        messages=messages,
        reward=None if failure else outcome.reward,
        failure=(failure.cause, failure.message) if failure else None,
        episode=Episode(
            parts=tuple(map(_without_messages, parts)),
            num_turns=record.num_answers,
            num_tool_calls=record.num_tool_calls,
            num_tool_failures=record.num_tool_failures,
            num_malformed_calls=record.num_malformed_calls,
            waiting_share=max(0.0, 1.0 - record.busy_s / took_s) if took_s > 0 else 0.0,
            metrics=outcome.metrics,
            turn_starts=record.turn_starts,
        ),
    )


def _without_messages(part: Group) -> Group:
    return dataclasses.replace(
        part, samples_G=[dataclasses.replace(sample, messages=None) for sample in part.samples_G]
    )
