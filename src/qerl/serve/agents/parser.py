"""Parse the requests of one episode: any model name, the run's sampling, and prompts that are recorded.

A request's temperature, top_p, top_k, min_p and seed are not used: the learner needs the policy that the run
trains, and the samples of a row must differ. Its max_tokens, stop strings, n, tools and formats are.
"""

import asyncio
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from qerl.algo.seeds import mix
from qerl.serve.agents.record import EpisodeRecord, Message, RecordedCall
from qerl.serve.batcher import PendingRequest
from qerl.serve.fields import ApiError, ChatBody, RequestBody
from qerl.serve.grammar import Grammars
from qerl.serve.loaded_model import LoadedModel
from qerl.serve.request import CompletionRequest, RequestParser
from qerl.serve.stream import marked_text
from qerl.types import Sample, Sampling

_BRANCH = 11  # keeps the seeds of branches apart from those of their episodes


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class OpenEpisode:
    """An episode whose key is alive until it is over."""

    number: int
    base_url: str
    api_key: str
    record: EpisodeRecord
    seed: int
    sampling: Sampling
    is_over: bool = False
    running: set[PendingRequest] = dataclasses.field(default_factory=set)
    num_requests: int = 0
    """Requests whose response has not ended."""
    turn: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Locked while one of its requests is parsed: all episodes have one thread for it."""

    def check(self) -> None:
        """Raise ApiError if it is over."""
        if self.is_over:
            raise ApiError(410, f"episode {self.number} is over: its key is invalid now", code="episode_over")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeParser(RequestParser):
    shared: RequestParser
    """Its grammars are used, which take time to make."""
    episode: OpenEpisode
    max_calls: int
    timeout_s: float

    @property
    def record(self) -> EpisodeRecord:
        return self.episode.record

    @functools.cached_property
    def grammars(self) -> Grammars:
        return self.shared.grammars

    @property
    def known_names(self) -> tuple[str, ...] | None:
        return None

    def _chat_request(self, body: ChatBody, messages: list[dict[str, Any]]) -> CompletionRequest:
        self._count()
        rendered = self._rendered(body, messages)
        call = self.record.call(rendered[1], messages, self._variables(body))
        text = rendered[0] if call.prompt_T is rendered[1] else ""
        return self._watched(call, self._request(body, [(text, call.prompt_T)], body.offered_schemas))

    def completion(self, content: bytes) -> CompletionRequest:
        self._count()
        request = super().completion(content)
        if len(request.prompts_P) > 1:
            message = "an episode's completion takes one prompt; send the others in requests of their own"
            raise ApiError(400, message, param="prompt")
        return self._watched(self.record.call(request.prompts_P[0].tokens_T), request)

    def _count(self) -> None:
        self.episode.check()
        if self.record.count_call() > self.max_calls:
            message = f"the episode has made its {self.max_calls} calls (agent.max_calls)"
            raise ApiError(400, message, code="too_many_calls")

    def _watched(self, call: RecordedCall, request: CompletionRequest) -> CompletionRequest:
        """Record the answers to the request when they end."""
        self.episode.check()
        pending, record, running = request.pending, self.record, self.episode.running
        pending.episode = self.episode
        if record.replay is not None:
            pending.recorded = record.replay.answers(pending)
            call.is_replayed = pending.recorded is not None

        def add(choice: int, sample: Sample) -> None:
            is_text = call.messages is None
            reply = (None, 0) if is_text else _reply(self.model, request, sample)
            record.add(call, choice, sample, *reply)

        pending.on_choice, pending.timeout_s, pending.is_learned = add, self.timeout_s, True

        def end(future: Future[list[Sample]]) -> None:
            running.discard(pending)
            record.end()

        record.begin(call, pending)
        running.add(pending)
        pending.future.add_done_callback(end)
        return request

    def _variables(self, body: ChatBody) -> Mapping[str, Any]:
        tools = {"tools": [tool.function.for_template() for tool in body.tools]} if body.offered_tools else {}
        return {**body.chat_template_kwargs, **tools}

    def _seed(self, body: RequestBody, prompts: list[tuple[str, list[int]]]) -> int:
        """Return a seed that depends on the prompt, and on how often it was sent before: the order in which
        requests that run beside each other arrive does not matter."""
        digest, replay = hashlib.sha256(json.dumps(prompts[0][1]).encode()).digest(), self.record.replay
        seed = self.episode.seed if replay is None else mix(self.episode.seed, _BRANCH, replay.branch)
        return mix(seed, int.from_bytes(digest[:8]) >> 1, self.record.count_prompt(digest))

    def _sampling(self, body: RequestBody) -> Sampling:
        run, wanted = self.episode.sampling, super()._sampling(body)
        stop = tuple(dict.fromkeys((*run.stop, *wanted.stop)))
        return dataclasses.replace(run, max_tokens=min(wanted.max_tokens, run.max_tokens), stop=stop)


def _reply(model: LoadedModel, request: CompletionRequest, sample: Sample) -> tuple[Message, int]:
    """Return the message that the client gets, as a chat's messages are parsed, and the number of malformed
    calls."""
    shown = marked_text(model, request.stop, sample, request.markers)
    stream = request.answer_stream()
    answer = stream.whole(shown)
    reply: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        reply["reasoning_content"] = answer.reasoning
    if answer.calls:
        functions = [{"name": each.name, "arguments": json.loads(each.arguments)} for each in answer.calls]
        reply["tool_calls"] = [{"id": "", "type": "function", "function": each} for each in functions]
    return reply, stream.num_malformed
