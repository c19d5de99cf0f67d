"""A teacher behind an OpenAI-compatible endpoint: it echoes a sample's tokens with their logprobs.

    POST /v1/completions   {"prompt": [prompt and sample, tokens], "echo": true, "max_tokens": 0,
                            "logprobs": top_k, "return_tokens_as_token_ids": true}

`qerl serve` and vLLM answer it. A sample whose answer fails, or is not what was asked for, loses its own
place in the loss only. The key, if there is one, is in the environment variable QERL_TEACHER_KEY.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qerl.algo.distillation import MIN_LOGPROB
from qerl.algo.seeds import mix
from qerl.config import DistilConfig
from qerl.errors import UserError
from qerl.tasks.judges.openai_client import Json, OpenAIClient, RequestFailed
from qerl.tasks.scoring import Failure
from qerl.types import GenerateRequest, Group, OnBurst, Prompt, RolloutEngine, Sample, TeacherLogprobs

KEY_VARIABLE = "QERL_TEACHER_KEY"
_PROBES = (
    "Hello, world! What is 12 + 345?\n",
    "def square(x):\n    return x ** 2  # 3.14159\n",
    "Grüße, наука, 漢字 and \U0001f642: naïve café",
)
_TOKEN_ID = "token_id:"
_ROUNDING = 1e-3  # a logprob above 0, or probabilities above 1 in sum, by no more than this


def check_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> None:
    """Raise UserError unless both tokenizers have the same tokens and split the same way."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours != theirs:
        token = min(ours.keys() ^ theirs.keys() or (t for t in ours if ours[t] != theirs[t]))
        there, here = (each.get(token, "none") for each in (theirs, ours))
        raise UserError(
            f"distil.teacher {name}: has another vocabulary than the student: token {token!r} is"
            f" {there} there and {here} here; take a teacher of the same family"
        )
    for text in _PROBES:
        if list(student(text)["input_ids"]) != list(teacher(text)["input_ids"]):
            raise UserError(f"distil.teacher {name}: splits {text!r} into other tokens than the student")


class EndpointTeacher:
    def __init__(self, config: DistilConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int):
        """Raise UserError if the endpoint does not answer, or has another tokenizer."""
        self._config, self._tokenizer, self._vocab_size = config, tokenizer, vocab_size
        self._top_k = config.top_k if config.is_divergence else 0
        self._client = OpenAIClient(
            config.teacher, key_variable=KEY_VARIABLE, timeout_s=config.timeout_s, retries=config.retries
        )
        try:
            self._model = config.endpoint_model or self._client.first_model()
            for text in _PROBES:
                self._check_tokens(text)
        except RequestFailed as error:
            raise UserError(f"distil.teacher: {error.cause}: {error.message}") from None

    def _check_tokens(self, text: str) -> None:
        expected = list(self._tokenizer(text)["input_ids"])
        choice = self._echoed(text)
        token_ids, logprobs = choice.get("prompt_token_ids"), choice["logprobs"].get("token_logprobs")
        count = len(logprobs) if isinstance(logprobs, list) else 0
        if (token_ids is not None and token_ids != expected) or count != len(expected):
            raise UserError(
                f"distil.teacher {self._client.url}: splits {text!r} into other tokens than the student:"
                f" {token_ids or count}, here {expected}; take a teacher of the same family"
            )

    def _echoed(self, prompt: str | list[int]) -> Json:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": 0,
            "echo": True,
            "logprobs": self._top_k,
            "temperature": 1.0,
            "return_token_ids": True,
            **({"return_tokens_as_token_ids": True} if self._top_k else {}),
        }
        choices = self._client.post("completions", body).get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not isinstance(choice.get("logprobs"), dict):
            raise RequestFailed("no logprobs", f"{self._client.url} does not echo the prompt's logprobs")
        return choice

    def score(self, groups: list[Group]) -> list[list[TeacherLogprobs | Failure]]:
        pairs = [(group.prompt, sample) for group in groups for sample in group.samples_G]
        scores = iter(self._all(lambda pair: self._score(*pair), pairs))
        return [[next(scores) for _ in group.samples_G] for group in groups]

    def _all(self, work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        with ThreadPoolExecutor(self._config.max_concurrent, "teacher") as pool:
            return list(pool.map(work, items))

    def _score(self, prompt: Prompt, sample: Sample) -> TeacherLogprobs | Failure:
        try:
            logprobs = self._echoed(prompt.tokens_T + sample.tokens_T)["logprobs"]
            places = [len(prompt.tokens_T) + index for index in sample.sampled_indices]
            num_tokens = len(prompt.tokens_T) + len(sample.tokens_T)
            own_C = _numbers(logprobs.get("token_logprobs"), places, num_tokens)
            if not self._top_k:
                return TeacherLogprobs(torch.tensor(own_C))
            top = logprobs.get("top_logprobs")
            if not isinstance(top, list) or len(top) < num_tokens:
                raise RequestFailed("too few logprobs", "top_logprobs does not have an entry for each token")
            rows = [self._outcomes(top[place]) for place in places]
        except RequestFailed as error:
            return Failure(error.cause, error.message)
        ids_CK, outcomes_CX = (list(each) for each in zip(*rows, strict=True))
        return TeacherLogprobs(torch.tensor(own_C), torch.tensor(ids_CK), torch.tensor(outcomes_CX))

    def _outcomes(self, top: Any) -> tuple[list[int], list[float]]:
        """Return the top_k most likely tokens, their logprobs and that of the rest."""
        if not isinstance(top, dict) or len(top) < self._top_k:
            raise RequestFailed("too few logprobs", f"fewer than distil.top_k {self._top_k} for a token")
        try:
            logprob_by_id = {int(name.removeprefix(_TOKEN_ID)): float(value) for name, value in top.items()}
        except (TypeError, ValueError):
            message = "the endpoint names tokens by their text, not by token_id:N"
            raise RequestFailed("no token ids", f"{message}; set distil.loss policy_gradient") from None
        ranked = sorted(logprob_by_id.items(), key=lambda pair: -pair[1])[: self._top_k]
        ids, logprobs = [token for token, _ in ranked], [value for _, value in ranked]
        if not all(0 <= token < self._vocab_size for token in ids):
            raise RequestFailed("unknown token", f"token {max(ids)} of {self._vocab_size}")
        if not all(math.isfinite(value) and value <= _ROUNDING for value in logprobs):
            raise RequestFailed("not a number", f"top_logprobs {logprobs}")
        total = math.fsum(map(math.exp, logprobs))
        if total > 1 + _ROUNDING:
            raise RequestFailed("not logprobs", f"probabilities of one token's place add up to {total:.4f}")
        return ids, [*logprobs, math.log(max(1 - total, math.exp(MIN_LOGPROB)))]

    @contextlib.contextmanager
    def engine(self) -> Iterator[RolloutEngine]:
        yield self

    def generate(self, request: GenerateRequest, *, on_burst: OnBurst | None = None) -> list[Group]:
        """Sample from the endpoint; raise UserError if it fails."""
        prompts_P, size = request.prompts_P, request.num_samples
        places = [(prompt, g) for prompt in prompts_P for g in range(size)]
        samples = iter(self._all(lambda place: self._sample(place[0], place[1], request), places))
        return [Group(prompt=p, samples_G=[next(samples) for _ in range(size)]) for p in prompts_P]

    def _sample(self, prompt: Prompt, index: int, request: GenerateRequest) -> Sample:
        sampling = request.sampling
        fields = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        body = {
            "model": self._model,
            "prompt": prompt.tokens_T,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": mix(request.seed, prompt.index, index) % (1 << 31),
            **{name: value for name, value in fields.items() if value is not None},
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
        }
        try:
            choices = self._client.post("completions", body).get("choices")
            text = choices[0]["text"] if isinstance(choices, list) and choices else None
        except (RequestFailed, KeyError, TypeError) as error:
            raise UserError(f"distil.teacher: {error}") from None
        if not isinstance(text, str):
            raise UserError(f"distil.teacher: {self._client.url} sent an answer without text")
        tokens_T = list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) or [0]
        return Sample(
            tokens_T=tokens_T, logprobs_T=[0.0] * len(tokens_T), text=text, finish="stop", version=0
        )

    def publish(self, version: int) -> None:
        """Do nothing: the endpoint's weights are its own."""

    def take_metrics(self) -> dict[str, float]:
        return {}


def _numbers(values: Any, places: list[int], num_tokens: int) -> list[float]:
    if not isinstance(values, list) or len(values) < num_tokens:
        count = len(values) if isinstance(values, list) else 0
        raise RequestFailed("too few logprobs", f"{count} for {num_tokens} tokens")
    logprobs = [values[place] for place in places]
    for value in logprobs:
        if not (type(value) in (int, float) and math.isfinite(value) and value <= _ROUNDING):
            raise RequestFailed("not a number", f"a logprob is {value!r}")
    return [float(value) for value in logprobs]
