"""The questions to a judge about the samples of a call, and the rewards in its replies.

    none     each sample alone                        reward = score of the sample
    list     all samples of a prompt in one request   reward = score of the sample
    pairs    two samples in one request               reward = mean over its requests of 1 for the higher
                                                               score, 0 for the lower, 1/2 for a draw

Scores are in [0, 1]: (score - min_score) / (max_score - min_score). Texts that are equal are one answer.
Pairs are (i, i + o) in a circle for o = 1 .. rounds: each sample comes first as often as second, so a judge
that prefers a place favours none. Two that are opposite in the circle, as two alone are, meet once: which
comes first depends on the texts, not on their order. A request without a reply is left out; a sample without
any has no reward.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qerl.algo.seeds import mix
from qerl.config import JudgeConfig
from qerl.config.judge import RUBRICS
from qerl.errors import UserError
from qerl.tasks.scoring import Arguments, Failure, Scope, Text


class JudgeFailed(Exception):
    """Failure of one request."""


class JudgeRequest(NamedTuple):
    """JudgeRequest("Rate the answer ...", ("It is 3",))"""

    message: str
    texts: tuple[str, ...]
    """The samples' texts that the reply scores, in this order."""


def readable(text: Text) -> str:
    """Return a text, or the messages of a conversation with their roles; of a single one its content."""
    if isinstance(text, str):
        return text
    if len(text) == 1:
        return str(text[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in text)


class Rubric:
    """Rates each sample alone."""

    scope: Scope = "sample"

    def __init__(self, settings: JudgeConfig):
        self._settings = settings
        self._text = _text_of(RUBRICS[settings.compare] if settings.rubric is None else settings.rubric)

    def requests(self, arguments: Arguments) -> list[JudgeRequest]:
        """Return the requests for the samples of one call."""
        texts = list(map(readable, arguments["completions"]))
        return [self._request(arguments, i, (text,), {"completion": text}) for i, text in enumerate(texts)]

    def max_requests(self, num_samples: int) -> int:
        """Return the number of requests for samples whose texts differ."""
        return num_samples

    def rewards(self, arguments: Arguments, scores: Sequence[list[float] | Failure]) -> list[float | Failure]:
        """Return the reward of each sample by the scores of each request."""
        return [each if isinstance(each, Failure) else each[0] for each in scores]

    def scores(self, reply: str, request: JudgeRequest) -> list[float]:
        """Return the score of each text of the request; raise JudgeFailed if one lacks or is out of range."""
        settings, num = self._settings, len(request.texts)
        matches = re.findall(settings.pattern, reply[-20_000:], flags=re.IGNORECASE)
        try:
            scores = [float(score) for score in matches[-num:]]
        except ValueError:
            scores = []
        if len(scores) < num:
            needed = "no score" if num == 1 else f"fewer than {num} scores"
            raise JudgeFailed(f"{needed} in the reply {reply[-80:]!r}")
        low, high = settings.min_score, settings.max_score
        for score in scores:
            if not low <= score <= high:
                raise JudgeFailed(f"the score {score:g} is not in {low:g} to {high:g}")
        return [(score - low) / (high - low) for score in scores]

    def _request(
        self, arguments: Arguments, index: int, texts: tuple[str, ...], fields: dict[str, Any]
    ) -> JudgeRequest:
        """index: of the sample whose prompt and columns are filled in."""
        row = {name: values[index] for name, values in arguments.items()}
        fields["prompt"] = readable(row.pop("prompts"))
        fields |= {name: f"{getattr(self._settings, name):g}" for name in ("min_score", "max_score")}
        values = row | fields
        # In one pass: braces of a sample's own text stay as they are.
        message = re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), self._text)
        return JudgeRequest(message, texts)


class ListRubric(Rubric):
    scope = "group"

    def requests(self, arguments: Arguments) -> list[JudgeRequest]:
        texts = _distinct(arguments)
        numbered = (f"<answer {k}>\n{text}\n</answer {k}>" for k, text in enumerate(texts, 1))
        fields = {"completions": "\n\n".join(numbered), "num_completions": len(texts)}
        return [self._request(arguments, 0, texts, fields)]

    def max_requests(self, num_samples: int) -> int:
        return 1

    def rewards(self, arguments: Arguments, scores: Sequence[list[float] | Failure]) -> list[float | Failure]:
        (scores_D,) = scores
        if isinstance(scores_D, Failure):
            return [scores_D for _ in arguments["completions"]]
        by_text = dict(zip(_distinct(arguments), scores_D, strict=True))
        return [by_text[readable(completion)] for completion in arguments["completions"]]


class PairRubric(Rubric):
    scope = "group"

    def requests(self, arguments: Arguments) -> list[JudgeRequest]:
        texts = _distinct(arguments)
        prompt = readable(arguments["prompts"][0])
        pairs = [
            _by_seed(prompt, texts[i], texts[j]) if 2 * (j - i) == len(texts) else (texts[i], texts[j])
            for i, j in pairs_of(len(texts), self._settings.rounds)
        ]
        return [self._request(arguments, 0, (a, b), {"first": a, "second": b}) for a, b in pairs]

    def max_requests(self, num_samples: int) -> int:
        return len(pairs_of(num_samples, self._settings.rounds))

    def rewards(self, arguments: Arguments, scores: Sequence[list[float] | Failure]) -> list[float | Failure]:
        shares: dict[str, list[float]] = defaultdict(list)
        failure = None
        for request, each in zip(self.requests(arguments), scores, strict=True):
            if isinstance(each, Failure):
                failure = failure or each
                continue
            first, second = each
            share = 0.5 + 0.5 * (first > second) - 0.5 * (first < second)
            shares[request.texts[0]].append(share)
            shares[request.texts[1]].append(1 - share)
        known = {text: sum(values) / len(values) for text, values in shares.items()}
        # A single answer is compared with none.
        otherwise = 0.5 if failure is None else failure
        return [known.get(readable(completion), otherwise) for completion in arguments["completions"]]


def rubric_of(settings: JudgeConfig) -> Rubric:
    return {"none": Rubric, "list": ListRubric, "pairs": PairRubric}[settings.compare](settings)


def pairs_of(num: int, rounds: int | None) -> list[tuple[int, int]]:
    """Return [(0, 1), (1, 2), (2, 0)] for 3 answers: each pair once, of neighbours in a circle first."""
    return [
        (i, (i + offset) % num)
        for offset in range(1, 1 + min(num // 2, num if rounds is None else rounds))
        for i in range(offset if 2 * offset == num else num)
    ]


def _by_seed(prompt: str, *texts: str) -> tuple[str, str]:
    """Return two texts in the order that their coordinates choose: the prompt and both, in either order."""
    lower, higher = sorted(texts)
    coordinates = (text.encode("utf-8", errors="surrogatepass") for text in (prompt, lower, higher))
    seed = mix(*(int.from_bytes(hashlib.sha256(each).digest()[:8]) for each in coordinates))
    return (lower, higher) if seed % 2 else (higher, lower)


def _distinct(arguments: Arguments) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(readable, arguments["completions"])))


def _text_of(text: str) -> str:
    """Return the text, or for @FILE that of the file."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(f"task.judge.rubric {text}: cannot be read: {error}") from None
