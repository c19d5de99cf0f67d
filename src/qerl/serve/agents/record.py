"""Record one episode's answers as the tokens that the engine sampled.

    request           messages M                      prompt P            answer S (sampled)
    later request     M, the answer, further ones     P + S + between     S'

A request whose messages are those of an earlier one, the answer to it, and something more continues that
answer: its prompt is the earlier prompt, the sampled tokens themselves and what the chat template puts after
them, so nothing is tokenized twice. Any other request, with a shorter history or another system prompt, gets
the template's rendering; if that happens to begin with the tokens of an earlier prompt and answer, it
continues that one too.

Each answer is learned from once. Of the requests that continue an answer one goes on in the same sample, and
each other begins a sample, whose prompt has the tokens before it. It is chosen by its tokens, not by its
arrival: the samples of requests that run beside each other do not depend on which is faster.
"""

import dataclasses
import hashlib
import json
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.errors import UserError
from qerl.serve.agents.replay import AnsweredCall, Replay, turn_starts
from qerl.serve.batcher import PendingRequest
from qerl.tasks.environment import says_error
from qerl.tasks.rows.prompt import chat_reply_tokens, render_chat, special_end
from qerl.types import AllowedTokens, Group, Prompt, Sample

Message = Mapping[str, Any]


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class RecordedCall:
    """One request for answers."""

    number: int
    prompt_T: list[int]
    messages: Sequence[Message] | None
    """None for a plain text."""
    digest: str
    """Digest of the messages and of what else the prompt is made of."""
    parent: "RecordedAnswer | None"
    added: Sequence[Message]
    """Messages since the parent's answer."""
    answered: AnsweredCall | None = None
    """The same as a branch plays it again; None before it has begun."""
    is_replayed: bool = False
    """True if a branch got the answers of its episode."""


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class RecordedAnswer:
    call: RecordedCall
    choice: int
    sample: Sample
    child: "RecordedAnswer | None" = None
    """The first answer to a prompt that continues this one."""

    @property
    def all_T(self) -> list[int]:
        return self.call.prompt_T + self.sample.tokens_T


class EpisodeRecord:
    """Thread-safe: requests are parsed in one thread, and answers end in another."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, sample_index: int, replay: Replay | None = None
    ):
        """replay: the calls of a branch that are played again."""
        self.replay, self.sample_index = replay, sample_index
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.calls: list[AnsweredCall] = []
        """The calls, with their answers once the episode is over."""
        self._num_calls = 0
        self.num_malformed_calls = 0
        self._answers: list[RecordedAnswer] = []
        self._by_messages: dict[str, list[RecordedAnswer]] = {}
        self._by_tokens: dict[tuple[int, bytes], RecordedAnswer] = {}
        self._tool_results: dict[tuple[str, str], None] = {}
        self._prompts: dict[bytes, int] = {}
        self._num_running, self._running_since, self._busy_s = 0, 0.0, 0.0

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    @property
    def num_tool_calls(self) -> int:
        return len(self._tool_results)

    @property
    def num_tool_failures(self) -> int:
        return sum(says_error(content) for _, content in self._tool_results)

    @property
    def turn_starts(self) -> tuple[int, ...]:
        """Numbers of tokens sampled before each answer from which a branch may begin."""
        return tuple(turn_starts(self.calls))

    @property
    def busy_s(self) -> float:
        """Seconds in which a call was running."""
        with self._lock:
            since_s = time.monotonic() - self._running_since if self._num_running else 0.0
            return self._busy_s + since_s

    def count_call(self) -> int:
        """Count a request of the episode; return their number so far."""
        with self._lock:
            self._num_calls += 1
            return self._num_calls

    def count_prompt(self, digest: bytes) -> int:
        """Return how often a prompt with this digest was counted before."""
        with self._lock:
            self._prompts[digest] = self._prompts.get(digest, -1) + 1
            return self._prompts[digest]

    def begin(self, call: RecordedCall, pending: PendingRequest) -> None:
        with self._lock:
            may_branch = all(each.can_replay for each in self.calls)
            call.answered = AnsweredCall.of(pending, may_branch=may_branch)
            self.calls.append(call.answered)
            self._num_running += 1
            if self._num_running == 1:
                self._running_since = time.monotonic()

    def end(self) -> None:
        with self._lock:
            self._num_running -= 1
            if not self._num_running:
                self._busy_s += time.monotonic() - self._running_since

    def call(
        self,
        rendered_T: list[int],
        messages: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> RecordedCall:
        """Return the call with the prompt that the model gets. rendered_T: the prompt as the chat template or
        the tokenizer has it. variables: further ones of the template, such as tools."""
        with self._lock:
            parent, prompt_T, added, digest = None, rendered_T, messages or (), ""
            if messages is not None:
                *prefixes, (_, digest) = _digests(messages, variables or {})
                if (continued := self._continued(messages, prefixes, variables or {})) is not None:
                    parent, prompt_T, added = continued
            parent = parent or self._with_prefix(rendered_T)
            for message in added:
                if message["role"] == "tool":
                    key = str(message.get("tool_call_id") or ""), str(message["content"])
                    self._tool_results[key] = None
            return RecordedCall(
                number=self._num_calls,
                prompt_T=prompt_T,
                messages=messages,
                digest=digest,
                parent=parent,
                added=added,
            )

    def _continued(
        self, messages: Sequence[Message], prefixes: list[tuple[int, str]], variables: Mapping[str, Any]
    ) -> tuple[RecordedAnswer, list[int], Sequence[Message]] | None:
        """Return the answer that the messages continue, their prompt, and the messages after the answer."""
        for end, digest in reversed(prefixes):
            answers, rest = self._by_messages.get(digest, []), messages[end:]
            if not answers or rest[-1]["role"] == "assistant":
                continue
            if not self._writes_reasoning(messages, end, variables):
                continue
            answer = next((each for each in answers if each.child is None), answers[-1])
            ended_by = special_end(self._tokenizer, answer.sample.tokens_T)
            try:
                between_T = chat_reply_tokens(self._tokenizer, list(rest), ended_by, variables)
            except UserError:  # the template takes these messages in another place only
                return None
            return answer, answer.all_T + between_T, rest
        return None

    def _writes_reasoning(self, messages: Sequence[Message], end: int, variables: Mapping[str, Any]) -> bool:
        """True unless the last of these messages up to `end` has reasoning that the chat template leaves out,
        as many do once the user has answered: the sampled tokens, which have it, are then not the prompt."""
        start = next((i for i in range(end, 0, -1) if messages[i - 1]["role"] != "assistant"), 0)
        if all("reasoning_content" not in each for each in messages[start:end]):
            return True
        plain = [{k: v for k, v in each.items() if k != "reasoning_content"} for each in messages[start:end]]
        without = [*messages[:start], *plain, *messages[end:]]
        try:
            texts = {render_chat(self._tokenizer, each, variables)[0] for each in (messages, without)}
        except UserError:
            return False
        return len(texts) == 2

    def _with_prefix(self, prompt_T: list[int]) -> RecordedAnswer | None:
        """Return the longest answer whose prompt and tokens the prompt begins with."""
        lengths = sorted({length for length, _ in self._by_tokens if length < len(prompt_T)})
        answer, digest, start, values = None, hashlib.blake2b(), 0, array("q", prompt_T)
        for length in lengths:
            digest.update(values[start:length].tobytes())
            start = length
            answer = self._by_tokens.get((length, digest.copy().digest())) or answer
        return answer

    def add(
        self,
        call: RecordedCall,
        choice: int,
        sample: Sample,
        reply: Message | None,
        num_malformed_calls: int = 0,
    ) -> None:
        """Record an answer. reply: the message that the client gets; None for a plain text."""
        with self._lock:
            self.num_malformed_calls += num_malformed_calls
            answer = RecordedAnswer(call=call, choice=choice, sample=sample)
            self._answers.append(answer)
            if call.answered is not None:
                call.answered.samples[choice] = sample
            if call.parent is not None and call.parent.child is None:
                call.parent.child = answer
            all_T = array("q", answer.all_T)
            self._by_tokens.setdefault((len(all_T), hashlib.blake2b(all_T.tobytes()).digest()), answer)
            if reply is not None and call.messages and call.messages[-1]["role"] != "assistant":
                # Some clients leave out the text beside calls when they send an answer back.
                echoes = [reply, {**reply, "content": ""}] if reply.get("tool_calls") else [reply]
                for echo in {_text_of(each): each for each in echoes}.values():
                    key = _next_digest(call.digest, echo)
                    self._by_messages.setdefault(key, []).append(answer)

    def parts(self, prompt: Prompt) -> list[Group]:
        """Return the samples of the episode, in the order of their first requests: groups of one sample each,
        with their own prompts. In a branch, answers that were played again are in the prompts. prompt: the
        row's, whose index and columns they get."""
        with self._lock:
            answers = sorted(self._answers, key=lambda each: (each.call.number, each.choice))
        parts = []
        following = _following(answers)
        for whole in (_chain(each, following) for each in answers if _begins(each, following)):
            chain = [each for each in whole if not each.call.is_replayed]
            if not chain:
                continue
            first = chain[0].call
            tokens_T, spans = _joined(chain)
            sample = Sample(
                tokens_T=tokens_T,
                logprobs_T=[value for answer in chain for value in answer.sample.logprobs_T],
                text="",
                finish=chain[-1].sample.finish,
                version=chain[-1].sample.version,
                sample_index=self.sample_index,
                environment_spans=spans,
                allowed=_joined_sets(chain),
                routes=_joined_routes(chain),
                messages=[each for answer in whole for each in _shown(answer)],
            )
            row_prompt = dataclasses.replace(prompt, text="", tokens_T=first.prompt_T, messages=None)
            parts.append(Group(prompt=row_prompt, samples_G=[sample]))
        return parts


def _following(answers: list[RecordedAnswer]) -> dict[RecordedAnswer, RecordedAnswer]:
    """Map each continued answer to the answer that follows it in its sample."""
    continued: dict[RecordedAnswer, list[RecordedAnswer]] = {}
    for answer in answers:
        if answer.call.parent is not None:
            continued.setdefault(answer.call.parent, []).append(answer)
    content = lambda answer: (answer.call.prompt_T, answer.sample.tokens_T, answer.choice)  # noqa: E731
    return {parent: min(each, key=content) for parent, each in continued.items()}


def _begins(answer: RecordedAnswer, following: Mapping[RecordedAnswer, RecordedAnswer]) -> bool:
    """True if a sample begins with this answer."""
    return answer.call.parent is None or following[answer.call.parent] is not answer


def _chain(
    answer: RecordedAnswer, following: Mapping[RecordedAnswer, RecordedAnswer]
) -> list[RecordedAnswer]:
    chain = [answer]
    while (child := following.get(chain[-1])) is not None:
        chain.append(child)
    return chain


def _joined(chain: list[RecordedAnswer]) -> tuple[list[int], tuple[range, ...]]:
    """Return the tokens after the first prompt, and the spans among them that were not sampled."""
    tokens_T, spans, start = [], [], len(chain[0].call.prompt_T)
    for answer in chain:
        added_T = answer.call.prompt_T[start + len(tokens_T) :]
        if added_T:
            spans.append(range(len(tokens_T), len(tokens_T) + len(added_T)))
        tokens_T += added_T + answer.sample.tokens_T
    return tokens_T, tuple(spans)


def _joined_sets(chain: list[RecordedAnswer]) -> AllowedTokens | None:
    """Return what grammars allowed in place of the sampled tokens of all answers."""
    if all(answer.sample.allowed is None for answer in chain):
        return None
    sets, set_C = dict[bytes, int](), list[int | None]()
    for sample in (answer.sample for answer in chain):
        allowed = sample.allowed or AllowedTokens((), [None] * len(sample.logprobs_T))
        indices = [sets.setdefault(bits, len(sets)) for bits in allowed.sets]
        set_C += [None if index is None else indices[index] for index in allowed.set_C]
    return AllowedTokens(tuple(sets), set_C)


def _joined_routes(chain: list[RecordedAnswer]) -> bytes | None:
    """Return the experts of all rows but the last, those of a row from the call that sampled after it."""
    joined, start = [], 0
    for answer in chain:
        routes, num_rows = answer.sample.routes, len(answer.all_T) - 1
        if routes is None:
            return None
        joined.append(routes[start * (len(routes) // num_rows) :])
        start = num_rows
    return b"".join(joined)


def _shown(answer: RecordedAnswer) -> Iterator[dict[str, str]]:
    """Yield the messages since the answer before this one, and the answer, for people to read."""
    for message in answer.call.added:
        calls = [json.dumps(each["function"], ensure_ascii=False) for each in message.get("tool_calls", ())]
        yield {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *calls]))}
    yield {"role": "assistant", "content": answer.sample.text}


def _digests(messages: Sequence[Message], variables: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return (number of messages, digest of these) for each beginning that ends with an answer of the model,
    and for all messages. Messages of the assistant that follow each other are one: an API that has an item
    for every part of an answer sends it back so."""
    digest, digests = _text_of(dict(variables)), list[tuple[int, str]]()
    merged: dict[str, Any] | None = None
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            merged = _merged(merged, message)
            is_last = number == len(messages) or messages[number]["role"] != "assistant"
            if not is_last:
                continue
            digest, merged = _next_digest(digest, merged), None
            digests.append((number, digest))
        else:
            digest = _next_digest(digest, message)
    return [*digests, (len(messages), digest)]


def _merged(before: dict[str, Any] | None, message: Message) -> dict[str, Any]:
    calls = [*(before or {}).get("tool_calls", ()), *message.get("tool_calls", ())]
    content = (before or {}).get("content", "") + message["content"]
    parts = [(each or {}).get("reasoning_content", "") for each in (before, message)]
    reasoning = {"reasoning_content": "".join(parts)} if any(parts) else {}
    return {"role": "assistant", "content": content, **reasoning, **({"tool_calls": calls} if calls else {})}


def _next_digest(digest: str, message: Message) -> str:
    return hashlib.sha256(f"{digest}{_text_of(message)}".encode()).hexdigest()


def _text_of(message: Message) -> str:
    """Return what two messages must have in common to be the same: ids do not count, nor blanks around an
    answer."""
    values = {name: value for name, value in message.items() if name not in ("tool_call_id", "tool_calls")}
    if message.get("role") == "assistant":
        values |= {name: str(values.get(name) or "").strip() for name in ("content", "reasoning_content")}
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return json.dumps([values, calls], sort_keys=True, ensure_ascii=True)
