"""Multi-turn rollouts: samples that are conversations with an environment, behind the engine's interface.

    reset all  ->  first turns  ->  step all  ->  second turns  ->  ...        one call of the engine

All samples that wait for the policy are sampled together; all that wait for their environment step together.
The learner sees the sampled tokens themselves: they are never tokenized again from text. Between two turns
stands what the chat template puts there, with the environment's messages (`Sample.environment_spans`).

A sample ends when its environment is done, after max_turns, or when sample.max_tokens leaves no room for
another turn: it then counts as truncated (finish is "length") and keeps the rewards so far.

A branch (DEEP-GRPO) begins with one of its sample's turns: its environment is reset with the same seed and
gets the turns before again, whose replies must be the same.
"""

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.algo.seeds import mix
from qerl.config import EnvironmentConfig, RunConfig
from qerl.engine.generation import Stats
from qerl.engine.sampling_engine import SamplingEngine
from qerl.errors import UserError, require
from qerl.tasks import RewardPool
from qerl.tasks.environment import Call, Close, EnvironmentReply, Key, Messages, Reset, Score, Step
from qerl.tasks.prompt import (
    chat_reply_tokens,
    join_messages,
    plain_reply_tokens,
    render_chat,
    special_end,
)
from qerl.tasks.reward import Reward, resolve
from qerl.tasks.scoring import Failure
from qerl.types import Conversation, Group, OnBurst, Pivot, Prompt, RolloutEngine, Sample, Sampling, Turn

Between = Callable[[PreTrainedTokenizerBase, Messages, str], list[int]]
_logger = logging.getLogger(__name__)
_ENVIRONMENT, _BRANCH = 3, 7  # keep these seeds apart from the tokens'
_OTHER_REPLY = Failure(
    "not deterministic",
    "the environment gave other replies to the same answers when a branch played them again",
)


@dataclasses.dataclass(eq=False, slots=True)
class _Episode:
    """The state of one sample while it runs."""

    key: Key
    between: Between
    opening: Messages = dataclasses.field(default_factory=list)
    messages: Messages = dataclasses.field(default_factory=list)
    turns: list[tuple[str, EnvironmentReply]] = dataclasses.field(default_factory=list)
    """Those that another one follows."""
    num_turns: int = 0
    reward: float | None = None
    failure: Failure | None = None
    is_truncated: bool = False


EpisodesPG = list[list[_Episode]]


class MultiTurnEngine:
    def __init__(
        self, engine: SamplingEngine, pool: RewardPool, config: EnvironmentConfig, max_prompt_tokens: int
    ):
        """max_prompt_tokens: limit of a prompt together with what reset adds to it."""
        self._engine, self._pool, self._tokenizer = engine, pool, engine.tokenizer
        self._config, self._max_prompt_tokens = config, max_prompt_tokens
        self._step: int | None = None
        self.stats = Stats()
        """Stats of the latest call of branch_batches."""
        self.waited_s = 0.0
        """Seconds spent in environments during the latest step, over its calls since take_metrics."""

    def publish(self, version: int) -> None:
        self._engine.publish(version)

    def take_metrics(self) -> dict[str, float]:
        taken, self.waited_s = self.waited_s, 0.0
        return {"environment_s": taken}

    def generate(
        self,
        prompts_P: list[Prompt],
        *,
        num_samples: int,
        sampling: Sampling,
        seed: int,
        step: int,
        on_burst: OnBurst | None = None,
    ) -> list[Group]:
        batch = ConversationBatch(self, prompts_P, num_samples, sampling, seed=seed, step=step)
        return batch.sample()

    def branch_batches(
        self, prompts_P: list[Prompt], *, num_samples: int, sampling: Sampling, seed: int, step: int
    ) -> "Iterator[ConversationBatch]":
        """Yield one batch of all prompts. See SamplingEngine.branch_batches."""
        batch = ConversationBatch(self, prompts_P, num_samples, sampling, seed=seed, step=step)
        yield batch
        self.stats = batch.stats

    @contextlib.contextmanager
    def begun(
        self, prompts_P: list[Prompt], episodes_P_G: EpisodesPG, *, seed: int, step: int
    ) -> Iterator[None]:
        """Reset the environments, and close them when the block ends."""
        if step != self._step:
            self._step, self.waited_s = step, 0.0
        all_episodes = [episode for episodes_G in episodes_P_G for episode in episodes_G]
        resets: list[Reset] = []
        for prompt, episodes_G in zip(prompts_P, episodes_P_G, strict=True):
            row = prompt.columns | {"prompt": prompt.messages or prompt.text}
            own_seed = mix(seed, _ENVIRONMENT, step, prompt.index)
            resets += [Reset(episode.key, row, own_seed) for episode in episodes_G]
        try:
            for episode, reply in zip(all_episodes, self._play(resets), strict=True):
                if isinstance(reply, Failure):
                    episode.failure = reply
                else:
                    episode.opening = reply.messages
            yield
        finally:
            closed = self._play([Close(episode.key) for episode in all_episodes])
            for failure, count in Counter(reply for reply in closed if isinstance(reply, Failure)).items():
                _logger.warning("%d environments: %s: %s", count, failure.cause, failure.message)

    def converse(self, opened_P: list[Prompt], episodes_P_G: EpisodesPG, **settings: Any) -> list[Group]:
        """Sample the conversations of environments that have begun to their ends, and score them. settings:
        of SamplingEngine.generate."""

        def answer(turns: list[Turn]) -> list[list[int] | None]:
            return self._answers([(episodes_P_G[turn.index][turn.sample_index], turn) for turn in turns])

        groups = self._engine.generate(
            opened_P,
            conversation=Conversation(turn_tokens=self._config.turn_tokens, answer=answer),
            **settings,
        )
        self._score([episode for episodes_G in episodes_P_G for episode in episodes_G])
        return [
            dataclasses.replace(group, samples_G=list(map(_finished_sample, group.samples_G, episodes_G)))
            for group, episodes_G in zip(groups, episodes_P_G, strict=True)
        ]

    @property
    def latest_stats(self) -> Stats:
        """Stats of the latest call of `converse`."""
        return self._engine.stats

    def new_episodes(self, prompts_P: list[Prompt], num_samples: int) -> EpisodesPG:
        return [
            [_Episode((p, g), self._between(prompt)) for g in range(num_samples)]
            for p, prompt in enumerate(prompts_P)
        ]

    def replay(self, pairs: list[tuple[_Episode, _Episode, int]]) -> None:
        """Play the first turns of each second episode, so many, with the environment of the first one."""
        for episode, before, _ in pairs:
            if episode.failure is None and episode.opening != before.opening:
                episode.failure = _OTHER_REPLY
        for turn in range(max((num_turns for *_, num_turns in pairs), default=0)):
            live = [(e, before) for e, before, num in pairs if turn < num and e.failure is None]
            replies = self._play([Step(e.key, before.turns[turn][0]) for e, before in live])
            for (episode, before), reply in zip(live, replies, strict=True):
                text, known = before.turns[turn]
                if reply != known:
                    episode.failure = reply if isinstance(reply, Failure) else _OTHER_REPLY
                episode.turns.append((text, known))
                episode.messages += [{"role": "assistant", "content": text}, *known.messages]
                episode.num_turns += 1
                if known.reward is not None:
                    episode.reward = (episode.reward or 0.0) + known.reward

    def _score(self, episodes: list[_Episode]) -> None:
        """Add what the environments give to whole episodes."""
        live = [episode for episode in episodes if episode.failure is None and self._pool.scores_episodes]
        scores = self._play([Score(episode.key, episode.messages) for episode in live])
        for episode, reply in zip(live, scores, strict=True):
            if isinstance(reply, Failure):
                episode.failure = reply
            elif reply.reward is not None:
                episode.reward = (episode.reward or 0.0) + reply.reward

    def _play(self, calls: Sequence[Call]) -> list[EnvironmentReply | Failure]:
        start_s = time.perf_counter()
        replies = self._pool.play(calls)
        self.waited_s += time.perf_counter() - start_s
        return replies

    def _between(self, prompt: Prompt) -> Between:
        has_template = prompt.messages is not None and self._tokenizer.chat_template
        return chat_reply_tokens if has_template else plain_reply_tokens

    def opened(self, prompt: Prompt, episodes_G: list[_Episode]) -> Prompt:
        """Return the prompt with the messages of reset, which must be equal for all of its samples."""
        live_G = [episode for episode in episodes_G if episode.failure is None]
        opening = live_G[0].opening if live_G else []
        for episode in live_G:
            if episode.opening != opening:
                message = "reset returned different messages for samples of the same prompt"
                episode.failure = Failure("different messages", message)
        if not opening:
            return prompt
        given = prompt.messages or [{"role": "user", "content": prompt.text}]
        if self._pool.extends_prompt:  # the first opening message continues the last one that was given
            text = given[-1]["content"] + opening[0]["content"]
            given, opening = given[:-1], [{**given[-1], "content": text}, *opening[1:]]
        messages = [*given, *opening]
        render = render_chat if self._between(prompt) is chat_reply_tokens else join_messages
        try:
            text, tokens_T = render(self._tokenizer, messages)
            if len(tokens_T) <= self._max_prompt_tokens:
                return dataclasses.replace(prompt, text=text, tokens_T=tokens_T, messages=messages)
            limit = self._max_prompt_tokens
            failure = Failure("too long", f"prompt has {len(tokens_T)} tokens, limit {limit}")
        except UserError as error:
            failure = Failure("not messages", str(error))
        for episode in live_G:
            episode.failure = failure
        return prompt

    def _answers(self, pairs: list[tuple[_Episode, Turn]]) -> list[list[int] | None]:
        """Step the environments of these turns together; return the tokens that follow each turn."""
        for episode, turn in pairs:
            episode.messages.append({"role": "assistant", "content": turn.text})
            episode.num_turns += 1
        live = [episode for episode, _ in pairs if episode.failure is None]
        steps = [Step(episode.key, episode.messages[-1]["content"]) for episode in live]
        replies = dict(zip((episode.key for episode in live), self._play(steps), strict=True))
        return [self._continued(episode, turn, replies.get(episode.key)) for episode, turn in pairs]

    def _continued(
        self, episode: _Episode, turn: Turn, reply: EnvironmentReply | Failure | None
    ) -> list[int] | None:
        """reply: None if the environment has failed before."""
        episode.is_truncated = turn.finish == "length" and turn.num_left == 0
        if reply is None or isinstance(reply, Failure):
            episode.failure = episode.failure or reply
            return None
        if reply.reward is not None:
            episode.reward = (episode.reward or 0.0) + reply.reward
        if reply.is_done or episode.num_turns == self._config.max_turns:
            episode.messages += reply.messages
            return None
        try:
            ended_by = special_end(self._tokenizer, turn.tokens_T)
            reply_T = episode.between(self._tokenizer, reply.messages, ended_by)
            has_reply = bool(reply.messages and reply_T)
            require(has_reply, "step returned no messages although the episode is not done")
        except UserError as error:
            episode.failure = Failure("not messages", str(error))
            return None
        if len(reply_T) >= turn.num_left:
            episode.is_truncated = True
            return None
        episode.messages += reply.messages
        episode.turns.append((turn.text, reply))
        return reply_T


class ConversationBatch:
    """Samples of prompts, then branches of them, as BranchBatch; branches compute keys and values again."""

    def __init__(
        self,
        engine: MultiTurnEngine,
        prompts_P: list[Prompt],
        num_samples: int,
        sampling: Sampling,
        *,
        seed: int,
        step: int,
    ):
        self._engine, self._prompts_P, self._num_samples = engine, prompts_P, num_samples
        self._sampling, self._seed, self._step = sampling, seed, step
        self.stats = Stats()
        self._episodes_P_G: EpisodesPG = []
        self._groups_P: list[Group] = []

    def sample(self) -> list[Group]:
        engine, prompts_P, seed, step = self._engine, self._prompts_P, self._seed, self._step
        self._episodes_P_G = episodes_P_G = engine.new_episodes(prompts_P, self._num_samples)
        with engine.begun(prompts_P, episodes_P_G, seed=seed, step=step):
            opened_P = [engine.opened(*pair) for pair in zip(prompts_P, episodes_P_G, strict=True)]
            self._groups_P = engine.converse(
                opened_P,
                episodes_P_G,
                num_samples=self._num_samples,
                sampling=self._sampling,
                seed=seed,
                step=step,
            )
        self.stats = engine.latest_stats
        return self._groups_P

    def branch(self, pivots: list[Pivot], num_branches: int) -> list[Group]:
        """Return a group of num_branches samples for each pivot: the beginning of a turn but the first."""
        engine, most = self._engine, self._sampling.max_tokens
        prompts_P = [self._prompts_P[pivot.group_index] for pivot in pivots]
        episodes_P_G = engine.new_episodes(prompts_P, num_branches)
        parents_P = [self._groups_P[pivot.group_index].samples_G[pivot.sample_index] for pivot in pivots]
        with engine.begun(prompts_P, episodes_P_G, seed=self._seed, step=self._step):
            engine.replay(
                [
                    (episode, self._episodes_P_G[pivot.group_index][pivot.sample_index], num_turns)
                    for pivot, parent, episodes_G in zip(pivots, parents_P, episodes_P_G, strict=True)
                    for num_turns in [len(_spans_before(parent, pivot.prefix_tokens))]
                    for episode in episodes_G
                ]
            )
            groups_P = engine.converse(
                list(map(self._begun_prompt, pivots, parents_P)),
                episodes_P_G,
                num_samples=num_branches,
                max_tokens_P_G=[[most - pivot.prefix_tokens] * num_branches for pivot in pivots],
                sampling=self._sampling,
                seed=mix(self._seed, _BRANCH),
                step=self._step,
            )
        self.stats += engine.latest_stats
        return [
            Group(
                prompt=self._groups_P[pivot.group_index].prompt,
                samples_G=[_joined(parent, pivot.prefix_tokens, sample) for sample in group.samples_G],
                prefix_tokens=pivot.prefix_tokens,
            )
            for pivot, parent, group in zip(pivots, parents_P, groups_P, strict=True)
        ]

    def _begun_prompt(self, pivot: Pivot, parent: Sample) -> Prompt:
        """Return the sample's prompt with its tokens before the pivot, and an index of the sample's own."""
        prompt = self._groups_P[pivot.group_index].prompt
        index = prompt.index * self._num_samples + pivot.sample_index
        tokens_T = prompt.tokens_T + parent.tokens_T[: pivot.prefix_tokens]
        return dataclasses.replace(prompt, index=index, tokens_T=tokens_T)


def _spans_before(sample: Sample, num_tokens: int) -> list[range]:
    """Return the spans of the environment among the sample's first tokens."""
    return [span for span in sample.environment_spans if span.stop <= num_tokens]


def _joined(parent: Sample, n: int, sample: Sample) -> Sample:
    """Return the sample after the first n tokens of its parent."""
    spans = _spans_before(parent, n)
    num_sampled = n - sum(map(len, spans))
    return dataclasses.replace(
        sample,
        tokens_T=parent.tokens_T[:n] + sample.tokens_T,
        logprobs_T=parent.logprobs_T[:num_sampled] + sample.logprobs_T,
        environment_spans=(*spans, *(range(n + s.start, n + s.stop) for s in sample.environment_spans)),
        sample_index=parent.sample_index,
    )


def with_environment(
    engine: SamplingEngine, pool: RewardPool, config: EnvironmentConfig, max_prompt_tokens: int
) -> SamplingEngine | MultiTurnEngine:
    """Return the engine itself if none of the rewards is an environment."""
    return MultiTurnEngine(engine, pool, config, max_prompt_tokens) if pool.has_environment else engine


class EnvironmentEpisodes:
    """The environment's process in a worker that samples for another process, which scores."""

    def __init__(self, config: RunConfig, environment: Reward | str):
        """environment: see RewardPool."""
        made = resolve(environment, config.task) if isinstance(environment, str) else environment
        self._config = config
        self.pool = RewardPool(dataclasses.replace(config.task, reward_weights=()), [made])

    def engine(
        self, engine: SamplingEngine, *, max_positions: int, stop_tokens: frozenset[int]
    ) -> RolloutEngine:
        limit = max_positions - self._config.sample.max_tokens
        return with_environment(engine, self.pool, self._config.task.environment, limit)


def _finished_sample(sample: Sample, episode: _Episode) -> Sample:
    """Return the sample with its conversation, reward and failure."""
    failure = episode.failure
    return dataclasses.replace(
        sample,
        text="\n".join(f"{message['role']}: {message['content']}" for message in episode.messages),
        messages=episode.messages,
        finish="length" if episode.is_truncated else "stop",
        reward=None if failure else episode.reward,
        failure=(failure.cause, failure.message) if failure else None,
    )
