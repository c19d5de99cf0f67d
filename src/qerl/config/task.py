"""The task: data, prompts and rewards."""

import dataclasses
import datetime
import json
from typing import Any, Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.config.judge import JudgeConfig, RewardModelConfig
from qerl.errors import require

VERIFIERS, OPENENV = "verifiers:", "openenv:"
ROW_FILES = (".jsonl", ".json", ".parquet", ".csv")


def is_environment_name(name: str) -> bool:
    """True if the name of a task or an agent is that of an environment of verifiers or OpenEnv."""
    return name.startswith((VERIFIERS, OPENENV))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeConfig:
    """Settings of the reward `code`."""

    credit: Literal["fraction", "all"] = "fraction"
    """fraction: the share of tests that pass. all: 1 if every test passes, else 0."""

    test_timeout_s: float = 4.0
    """A program that runs longer than this on one test is killed. All tests of a sample together get 0.8 of
    task.reward_timeout_s."""

    memory_mb: int = 1024
    """Address space of a program, MiB."""

    max_tests: int = 16
    """Number of tests to run per row, the first ones."""

    unsafe: bool = False
    """Run programs also on a machine that cannot confine them, with the parts of the sandbox that it has.
    They may then read and write what the user may."""

    def __post_init__(self):
        check_positive(self, "test_timeout_s", "memory_mb", "max_tests", prefix="task.code.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentConfig:
    """Used if one of task.rewards is an environment. sample.max_tokens limits all turns and replies
    together."""

    max_turns: int = 8
    """Maximum number of turns; the sample then ends with the rewards so far."""

    turn_tokens: int | None = None
    """Maximum length of one turn; None: sample.max_tokens. A truncated turn is answered too."""

    max_concurrent: int = 256
    """Maximum number of calls of reset or step that wait at the same time."""

    max_environments: int | None = None
    """Maximum number of environments that exist at once, at least those of one prompt: a step's prompts are
    then sampled part by part. None: one for each sample of the step."""

    def __post_init__(self):
        check_positive(self, "max_turns", "turn_tokens", "max_concurrent", prefix="task.environment.")
        check_positive(self, "max_environments", prefix="task.environment.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    name: str = "reasoning-gym"
    """reasoning-gym, gsm8k, a .jsonl, .json, .parquet or .csv file, the id of a hub data set, or
    verifiers:NAME or openenv:PLACE, an environment of that package."""

    env_options: str = "{}"
    """Settings of that environment, as a JSON object: `{"taskset": {"game": "Hangman-v0"}}`;
    docs/agent.md."""

    gym: str = "basic_arithmetic"
    """Name of the reasoning-gym task."""

    gym_options: tuple[tuple[str, int | float | bool | str], ...] = ()
    """Settings of that task, e.g. (("min_digits", 1), ("max_terms", 2))."""

    template: str = "{question}"
    """The user message; braces name columns, for example `{question}\\nAnswer with just the number.`"""

    system_prompt: str | None = None
    """The system message; None leaves it to the chat template."""

    chat: Literal["all", "messages"] = "all"
    """Prompts that get the chat template. all: plain-text prompts too, as user messages. messages: a plain
    text is given to the model as it is, and rewards receive texts."""

    allow_special_tokens: bool = False
    """Read `<|im_end|>` and other control tokens in the text of messages as control tokens: a message may
    then end its turn and begin another one. False: they are text. Plain texts are read as written."""

    chat_template_kwargs: str = "{}"
    """Variables of the chat template, as a JSON object: `{"enable_thinking": false}`."""

    chat_template_date: str | None = None
    """Day that `strftime_now` of a chat template gives, such as 2026-11-29; None: that on which the run
    started, also in a resumed run and its evaluation."""

    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of messages."""

    answer_column: str = "answer"
    """Column with the reference answer."""

    split: str = "train"
    """Split of a hub data set to train on."""

    held_out_split: str | None = None
    """Split of a hub data set to evaluate on, or a file of rows if task.name is one; None holds out the last
    rows."""

    num_rows: int = 100_000
    """Number of problems that a procedural task generates, held-out ones included."""

    num_held_out: int | None = None
    """Number of rows held out for evaluation. None: all rows of held_out_split; of one's own training rows
    5 %, at least 32 and at most 256."""

    rewards: tuple[str, ...] = ("numeric",)
    """Built-in rewards (exact, numeric, math, tags, gym, code, calls, judge, reward_model, length,
    length_rank, diversity, higher_lower), module:function, or file.py:function. Some may be environments,
    classes with reset and step: docs/environments.md."""

    reward_weights: tuple[float, ...] = ()
    """One weight per reward; empty means 1 each."""

    reward_timeout_s: float = 10.0
    """A reward, or an environment, that takes longer for one call is killed, and the samples of the call get
    no reward."""

    reward_scope: Literal["sample", "group", "batch"] = "sample"
    """Samples in one call of one's own functions, unless a decorator says it (docs/own-reward.md): one, all
    of a prompt, or all of a step; with torchrun all of one rank."""

    reward_workers: int = 2
    """Number of processes that compute rewards."""

    reward_overlap: Literal["auto", "always", "never"] = "auto"
    """Begin to score a group when its last sample ends, while others are sampled; reward models, environments
    and agents are scored after sampling. The rewards are the same. auto: where a GPU samples, and elsewhere
    if `judge` is the only reward: computing workers slow PyTorch on the same CPU cores."""

    reward_memory_gb: float = 8.0
    """Memory that each such process may have beyond what it starts with, and the stacks of an agent's or
    environment's threads beyond that; more raises MemoryError (Linux)."""

    code: CodeConfig = CodeConfig()
    """Settings of the reward `code`, which runs a sample's Python program against the tests in
    answer_column."""

    judge: JudgeConfig = JudgeConfig()
    """Settings of the reward `judge`, a model that rates samples by a rubric, each alone or compared."""

    reward_model: RewardModelConfig = RewardModelConfig()
    """Settings of the reward `reward_model`, a sequence classifier."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Settings of an environment among the rewards."""

    def __post_init__(self):
        check_positive(self, "num_rows", "reward_workers", "reward_timeout_s", prefix="task.")
        check_positive(self, "reward_memory_gb", prefix="task.")
        check_not_negative(self, "num_held_out", prefix="task.")
        for name in ("chat_template_kwargs", "env_options"):
            text = getattr(self, name)
            require(isinstance(_parsed(text), dict), f"task.{name} must be a JSON object, got {text}")
        day = self.chat_template_date
        require(
            day is None or _is_day(day), f"task.chat_template_date must be a day like 2026-11-29, got {day}"
        )
        num_weights, num_rewards = len(self.reward_weights), len(self.rewards)
        wrong = f"task.reward_weights must be one for each of {num_rewards} rewards, got {num_weights}"
        require(num_weights in (0, num_rewards), wrong)

    @property
    def source(self) -> Literal["gym", "gsm8k", "environment", "file", "hub"]:
        """The kind of place that has the rows."""
        if is_environment_name(self.name):
            return "environment"
        if self.name in ("reasoning-gym", "gsm8k"):
            return "gym" if self.name == "reasoning-gym" else "gsm8k"
        return "file" if self.name.endswith(ROW_FILES) else "hub"

    def num_held_out_of(self, num_rows: int) -> int:
        """Return num_held_out where the training rows, this many, hold them: resolved."""
        return min(max(num_rows // 20, 32), 256) if self.num_held_out is None else self.num_held_out


def _is_day(text: str) -> bool:
    try:
        return str(datetime.date.fromisoformat(text)) == text
    except ValueError:
        return False


def _parsed(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
