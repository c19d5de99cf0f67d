"""Rewards that a model gives: a judge behind an endpoint, and a reward model."""

import dataclasses
import re
from typing import Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.errors import require

_EACH = """\
Rate the answer to the question below from {min_score} to {max_score}: {max_score} is correct, complete and \
clear, {min_score} is wrong or empty.
Think in a few sentences, then end with one line: Score: N

<question>
{prompt}
</question>

<answer>
{completion}
</answer>
"""

_LIST = """\
Below are a question and {num_completions} answers. Compare the answers, and rate each from {min_score} to \
{max_score}: a better answer has a higher score, and answers that are equally good have the same one.
Think in a few sentences, then end with one line for each answer, in this order: Answer K, Score: N

<question>
{prompt}
</question>

{completions}
"""
_PAIRS = """\
Below are a question and two answers. Compare them, and rate each from {min_score} to {max_score}: the \
better one has the higher score, and two that are equally good have the same one.
Think in a few sentences, then end with two lines: First, Score: N and Second, Score: N

<question>
{prompt}
</question>

<first>
{first}
</first>

<second>
{second}
</second>
"""
RUBRICS = {"none": _EACH, "list": _LIST, "pairs": _PAIRS}
"""The rubric by task.judge.compare."""
_FIELDS = {"none": (), "list": ("completions",), "pairs": ("first", "second")}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig:
    """Settings of the reward `judge`. Its key, if the endpoint needs one, is in the environment variable
    QERL_JUDGE_KEY."""

    url: str = ""
    """An OpenAI-compatible endpoint, up to and including /v1; base: the model that is trained, without its
    adapter, in the run's own process."""

    model: str | None = None
    """Name of the model in requests; None: the first that the endpoint lists."""

    compare: Literal["none", "list", "pairs"] = "none"
    """none: rate each sample alone. list: rate all samples of a prompt in one request, relative to each
    other. pairs: compare two at a time; a sample's reward is the share of comparisons that it wins, a draw
    counts half. Samples with the same text are shown once."""

    rounds: int | None = 2
    """With pairs: a sample is compared with this many after it, in a circle; None: with all others."""

    rubric: str | None = None
    """Question to the judge; {prompt}, {completion}, {min_score}, {max_score} and the row's columns in braces
    are filled in; with list {completions} and {num_completions}, with pairs {first} and {second}. @FILE reads
    it from a file. None: one for task.judge.compare."""

    pattern: str = r"score\W{0,5}(-?\d+(?:\.\d+)?)"
    """Regular expression of the score in the judge's reply, upper or lower case; the last match counts, of
    several samples the last ones, in their order."""

    min_score: float = 0.0
    """Lowest score; the reward is 0 there."""

    max_score: float = 10.0
    """Highest score; the reward is 1 there."""

    max_tokens: int = 512
    """Maximum tokens of the judge's reply."""

    timeout_s: float = 60.0
    """Longest wait for one reply. task.reward_timeout_s limits all tries on a sample, or, where samples are
    compared, on each four requests of a prompt."""

    retries: int = 3
    """Number of times that a request is repeated, with growing pauses."""

    requests_per_minute: float | None = None
    """Limit of the rate, over all workers; None: no limit. task.reward_workers is the number of requests at
    once, with pairs a fourth of it."""

    max_requests: int | None = None
    """Number of requests, over all runs with this judge and cache, after which samples get no reward."""

    max_cost: float | None = None
    """Cost of these requests, in the unit of the prices, that is not exceeded: samples get no reward where
    a request may cost more than is left."""

    price_per_million_input: float = 0.0
    """Price of a million tokens of the judge's prompts."""

    price_per_million_output: float = 0.0
    """Price of a million tokens of its replies."""

    cache: str | None = None
    """Folder that caches the replies; None: the folder judge in $QERL_CACHE, by default
    ~/.cache/qerl."""

    def __post_init__(self):
        check_positive(self, "max_tokens", "timeout_s", prefix="task.judge.")
        check_positive(self, "requests_per_minute", "max_requests", "max_cost", prefix="task.judge.")
        check_positive(self, "rounds", prefix="task.judge.")
        check_not_negative(self, "retries", prefix="task.judge.")
        check_not_negative(self, "price_per_million_input", "price_per_million_output", prefix="task.judge.")
        require(
            self.min_score < self.max_score,
            f"task.judge.min_score must be less than task.judge.max_score ({self.max_score}),"
            f" got {self.min_score}",
        )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            groups = f"not a regular expression: {error}"
        require(groups == 1, f"task.judge.pattern must have one group, the score: {groups}")
        rubric = self.rubric or ""
        missing = [f"{{{name}}}" for name in _FIELDS[self.compare] if f"{{{name}}}" not in rubric]
        is_given = rubric != "" and not rubric.startswith("@")
        needs = f"must contain {' and '.join(missing)} where task.judge.compare is {self.compare}"
        require(not (is_given and missing), f"task.judge.rubric {needs}")
        has_price = self.price_per_million_input > 0 or self.price_per_million_output > 0
        require(self.max_cost is None or has_price, "task.judge.max_cost needs a price per million tokens")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """Settings of the reward `reward_model`: a sequence classifier, in the run's own process."""

    model: str = ""
    """A folder or hub id, such as LlamaForSequenceClassification or Qwen2ForSequenceClassification."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the model; `qerl plan` does not count it."""

    dtype: Literal["bf16", "fp32"] = "fp32"
    """Dtype of its weights."""

    batch_size: int = 16
    """Samples at a time."""

    max_length: int = 2048
    """Tokens of prompt and completion; of a longer one the last tokens are scored."""

    label: int | None = None
    """The class whose probability is the reward; None: the last. A model with one output gives its value."""

    def __post_init__(self):
        check_positive(self, "batch_size", "max_length", prefix="task.reward_model.")
        check_not_negative(self, "label", prefix="task.reward_model.")
