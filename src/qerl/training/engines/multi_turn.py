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
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from qerl.algo.seeds import mix
from qerl.config import EnvironmentConfig, SampleConfig, TaskConfig
from qerl.engine.local_engine import LocalEngine
from qerl.engine.stats import Stats
from qerl.errors import UserError, require
from qerl.tasks import RewardPool
from qerl.tasks.environment import Call, EnvironmentReply, Key, Messages
from qerl.tasks.reward import Reward, resolve
from qerl.tasks.rows.messages import VARIABLES, BadRow, read_variables
from qerl.tasks.rows.prompt import (
    chat_reply_tokens,
    join_messages,
    plain_reply_tokens,
    render_chat,
    special_end,
)
from qerl.tasks.scoring import Failure
from qerl.training.engines.replayed_batch import (
    HistoriesPG,
    Parent,
    ReplayingEngine,
    branch_request,
    joined_groups,
    spans_before,
)
from qerl.types import Conversation, GenerateRequest, Group, Prompt, Sample, Turn

Between = Callable[[PreTrainedTokenizerBase, Messages, str], list[int]]
Part = TypeVar("Part", Prompt, Parent)
_logger = logging.getLogger(__name__)
_ENVIRONMENT = 3  # keeps these seeds apart from the tokens'
_OTHER_REPLY = Failure(
    "not deterministic", "the environment's replies to the same answers differed when a branch replayed them"
)


@dataclasses.dataclass(slots=True)
class _History:
    """The messages and replies of a sample's environment."""

    opening: Messages = dataclasses.field(default_factory=list)
    turns: list[tuple[str, EnvironmentReply]] = dataclasses.field(default_factory=list)
    """Those that another one follows."""


@dataclasses.dataclass(eq=False, slots=True)
class _Episode:
    """The state of one sample while it runs."""

    key: Key
    between: Between
    history: _History = dataclasses.field(default_factory=_History)
    messages: Messages = dataclasses.field(default_factory=list)
    num_turns: int = 0
    reward: float | None = None
    failure: Failure | None = None
    is_truncated: bool = False

    def add_reward(self, reply: EnvironmentReply) -> None:
        if reply.reward is not None:
            self.reward = (self.reward or 0.0) + reply.reward


EpisodesPG = list[list[_Episode]]


class MultiTurnEngine(ReplayingEngine):
    def __init__(
        self, engine: LocalEngine, pool: RewardPool, config: EnvironmentConfig, max_prompt_tokens: int
    ):
        """max_prompt_tokens: limit of a prompt together with what reset adds to it."""
        self._engine, self._pool, self._tokenizer = engine, pool, engine.tokenizer
        self._config, self._max_prompt_tokens = config, max_prompt_tokens
        self._step: int | None = None
        self.stats = Stats()
        """Stats of the latest call; after branch_batches, of samples and branches."""
        self.waited_s = 0.0
        """Seconds spent in environments during the latest step, over its calls since take_metrics."""

    def publish(self, version: int) -> None:
        self._engine.publish(version)

    def take_metrics(self) -> dict[str, float]:
        taken, self.waited_s = self.waited_s, 0.0
        return {"environment_s": taken}

    def sample(self, request: GenerateRequest) -> tuple[list[Group], HistoriesPG]:
        groups_P, histories_P_G, stats = list[Group](), HistoriesPG(), Stats()
        for prompts_P in self._parts(request.prompts_P, request.num_samples):
            groups, histories = self._sample_part(request.with_prompts(prompts_P))
            groups_P, histories_P_G, stats = groups_P + groups, histories_P_G + histories, stats + self.stats
        self.stats = stats
        return groups_P, histories_P_G

    def _parts(self, each_P: list[Part], num_samples: int) -> list[list[Part]]:
        """Return the prompts or parents in parts that max_environments is enough for."""
        limit = self._config.max_environments
        size = len(each_P) or 1 if limit is None else max(1, limit // num_samples)
        return [each_P[start : start + size] for start in range(0, len(each_P) or 1, size)]

    def _sample_part(self, request: GenerateRequest) -> tuple[list[Group], HistoriesPG]:
        episodes_P_G = self._new_episodes(request)
        with self._running_environments(request, episodes_P_G):
            opened_P = [self._opened(*pair) for pair in zip(request.prompts_P, episodes_P_G, strict=True)]
            groups_P = self._converse(request.with_prompts(opened_P), episodes_P_G)
        return groups_P, [[e.history for e in episodes_G] for episodes_G in episodes_P_G]

    def branch(
        self, parents: list[Parent], num_branches: int, request: GenerateRequest
    ) -> list[list[Sample]]:
        """Return num_branches samples for each parent, each of whose pivots is the beginning of a turn."""
        branches, stats = list[list[Sample]](), Stats()
        for part in self._parts(parents, num_branches):
            branches += self._branch_part(part, num_branches, request)
            stats += self.stats
        self.stats = stats
        return branches

    def _branch_part(
        self, parents: list[Parent], num_branches: int, request: GenerateRequest
    ) -> list[list[Sample]]:
        rows = dataclasses.replace(
            request, prompts_P=[parent.row for parent in parents], num_samples=num_branches
        )
        episodes_P_G = self._new_episodes(rows)
        with self._running_environments(rows, episodes_P_G):
            self._replay(
                [
                    (episode, parent.history, len(spans_before(parent)))
                    for parent, episodes_G in zip(parents, episodes_P_G, strict=True)
                    for episode in episodes_G
                ]
            )
            groups_P = self._converse(branch_request(parents, num_branches, request), episodes_P_G)
        return joined_groups(parents, groups_P)

    @contextlib.contextmanager
    def _running_environments(self, request: GenerateRequest, episodes_P_G: EpisodesPG) -> Iterator[None]:
        """Reset the environments, and close them when the block ends."""
        if request.step != self._step:
            self._step, self.waited_s = request.step, 0.0
        all_episodes = [episode for episodes_G in episodes_P_G for episode in episodes_G]
        resets: list[Call] = []
        for prompt, episodes_G in zip(request.prompts_P, episodes_P_G, strict=True):
            row = prompt.columns | {"prompt": prompt.messages or prompt.text}
            seed = mix(request.seed, _ENVIRONMENT, request.step, prompt.index)
            resets += [Call("reset", episode.key, row, seed) for episode in episodes_G]
        try:
            for episode, reply in zip(all_episodes, self._play(resets), strict=True):
                if isinstance(reply, Failure):
                    episode.failure = reply
                else:
                    episode.history.opening = reply.messages
            yield
        finally:
            closed = self._play([Call("close", episode.key) for episode in all_episodes])
            for failure, count in Counter(reply for reply in closed if isinstance(reply, Failure)).items():
                _logger.warning("%d environments: %s: %s", count, failure.cause, failure.message)

    def _converse(self, request: GenerateRequest, episodes_P_G: EpisodesPG) -> list[Group]:
        """Sample the conversations of environments that have begun to their ends, and score them."""

        def answer(turns: list[Turn]) -> list[list[int] | None]:
            return self._answers([(episodes_P_G[turn.index][turn.sample_index], turn) for turn in turns])

        conversation = Conversation(turn_tokens=self._config.turn_tokens, answer=answer)
        groups = self._engine.generate(request, conversation=conversation)
        self.stats = self._engine.stats
        self._score([episode for episodes_G in episodes_P_G for episode in episodes_G])
        return [
            dataclasses.replace(group, samples_G=list(map(_finished_sample, group.samples_G, episodes_G)))
            for group, episodes_G in zip(groups, episodes_P_G, strict=True)
        ]

    def _new_episodes(self, request: GenerateRequest) -> EpisodesPG:
        return [
            [_Episode((p, g), between) for g in range(request.num_samples)]
            for p, between in enumerate(map(self._between, request.prompts_P))
        ]

    def _replay(self, triples: list[tuple[_Episode, _History, int]]) -> None:
        """Play the first turns of each history, as many as the number beside it, in its episode."""
        for episode, before, _ in triples:
            if episode.failure is None and episode.history.opening != before.opening:
                episode.failure = _OTHER_REPLY
        for turn in range(max((num_turns for *_, num_turns in triples), default=0)):
            live = [(e, before) for e, before, num in triples if turn < num and e.failure is None]
            replies = self._play([Call("step", e.key, before.turns[turn][0]) for e, before in live])
            for (episode, before), reply in zip(live, replies, strict=True):
                text, known = before.turns[turn]
                if reply != known:
                    episode.failure = reply if isinstance(reply, Failure) else _OTHER_REPLY
                episode.history.turns.append((text, known))
                episode.messages += [{"role": "assistant", "content": text}, *known.messages]
                episode.num_turns += 1
                episode.add_reward(known)

    def _score(self, episodes: list[_Episode]) -> None:
        """Add what the environments give to whole episodes."""
        live = [episode for episode in episodes if episode.failure is None and self._pool.scores_episodes]
        scores = self._play([Call("score", episode.key, episode.messages) for episode in live])
        for episode, reply in zip(live, scores, strict=True):
            if isinstance(reply, Failure):
                episode.failure = reply
            else:
                episode.add_reward(reply)

    def _play(self, calls: Sequence[Call]) -> list[EnvironmentReply | Failure]:
        start_s = time.perf_counter()
        replies = self._pool.play(calls)
        self.waited_s += time.perf_counter() - start_s
        return replies

    def _between(self, prompt: Prompt) -> Between:
        if not self._has_template(prompt):
            return plain_reply_tokens
        return partial(chat_reply_tokens, variables=self._variables(prompt))

    def _has_template(self, prompt: Prompt) -> bool:
        return prompt.messages is not None and bool(self._tokenizer.chat_template)

    def _variables(self, prompt: Prompt) -> dict[str, Any]:
        """Return what the row itself gave to the chat template, such as tools."""
        if not any(name in prompt.columns for name in VARIABLES):
            return {}
        try:
            variables = read_variables(prompt.columns)
            text, _ = render_chat(self._tokenizer, prompt.messages or [], variables)
        except (BadRow, UserError):
            return {}
        return variables if text == prompt.text else {}

    def _opened(self, prompt: Prompt, episodes_G: list[_Episode]) -> Prompt:
        """Return the prompt with the messages of reset, which must be equal for all of its samples."""
        live_G = [episode for episode in episodes_G if episode.failure is None]
        opening = live_G[0].history.opening if live_G else []
        for episode in live_G:
            if episode.history.opening != opening:
                message = "reset returned different messages for samples of the same prompt"
                episode.failure = Failure("different messages", message)
        if not opening:
            return prompt
        question = prompt.messages or [{"role": "user", "content": prompt.text}]
        if self._pool.extends_prompt:  # the first opening message continues the last one of the prompt
            text = question[-1]["content"] + opening[0]["content"]
            question, opening = question[:-1], [{**question[-1], "content": text}, *opening[1:]]
        messages = [*question, *opening]
        num_plain = len(question) if prompt.messages is None else 0
        try:
            if self._has_template(prompt):
                text, tokens_T = render_chat(self._tokenizer, messages, self._variables(prompt))
            else:
                text, tokens_T = join_messages(self._tokenizer, messages, num_plain)
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
        steps = [Call("step", episode.key, episode.messages[-1]["content"]) for episode in live]
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
        episode.add_reward(reply)
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
        episode.history.turns.append((turn.text, reply))
        return reply_T


def with_environment(
    engine: LocalEngine, pool: RewardPool, config: EnvironmentConfig, max_prompt_tokens: int
) -> LocalEngine | MultiTurnEngine:
    """Return the engine itself if none of the rewards is an environment."""
    return engine if pool.environment is None else MultiTurnEngine(engine, pool, config, max_prompt_tokens)


class EnvironmentEpisodes:
    """The environment's process in a worker that samples for another process, which scores."""

    def __init__(self, task: TaskConfig, sample: SampleConfig, environment: Reward | str):
        """environment: see RewardPool."""
        made = resolve(environment, task) if isinstance(environment, str) else environment
        self._config, self._max_tokens = task.environment, sample.max_tokens
        self.pool = RewardPool(dataclasses.replace(task, reward_weights=()), [made])

    def engine(self, engine: LocalEngine) -> MultiTurnEngine:
        return MultiTurnEngine(engine, self.pool, self._config, engine.max_positions - self._max_tokens)


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
