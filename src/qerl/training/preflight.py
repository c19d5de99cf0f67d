"""Try what a run needs, part by part, without training: what works, and what must be fixed first.

    python    device    kernels    sandbox                                      of the machine
    out       loggers   functions  model   tokenizer   rows   reward   speed    of a run

A part is tried even if another is broken, unless it needs that one. Nothing is written, and the weights are
read for the speed only.
"""

import contextlib
import dataclasses
import importlib.util
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from qerl.algo.seeds import mix
from qerl.config import RunConfig
from qerl.config.effects import effect_notices
from qerl.config.task import is_environment_name
from qerl.engine.decode.kernel_forward import NO_KERNELS, kernel_obstacle
from qerl.errors import RunError, UserError, printable, redact, require
from qerl.models.checkpoint.notices import layout_line
from qerl.models.checkpoint.source import ModelSource, locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from qerl.models.device import COMPUTE, Kernels, choose_kernels, resolve_device
from qerl.models.transformers_backend.backend import backend_of, language_limits, transformers_config
from qerl.tasks import RewardPool
from qerl.tasks.code.runner import SandboxUnavailable
from qerl.tasks.code.sandbox import choose
from qerl.tasks.env_packages import ENDPOINT_PACKAGES, require_installed, require_package
from qerl.tasks.environment import Call
from qerl.tasks.graders import NEED_ANSWER
from qerl.tasks.reward import format_failures, imported
from qerl.tasks.rows.prompt import render_chat
from qerl.tasks.scoring import Failure
from qerl.tracking.atomic_file import finite, read_object
from qerl.tracking.loggers import check_loggers
from qerl.tracking.provenance import check_same_run, version
from qerl.training.policy import check_backend, check_task, fewer_prompts, load_sampler, load_task
from qerl.training.rollouts.rollout import sampling_of, step_request
from qerl.types import Group, Prompt, Sample

Status = Literal["ok", "note", "broken", "skipped"]
_PACKAGES = ("qerl", "torch", "transformers", "triton")
_SPEED_S = 10.0
_NUM_TRIED = 4  # rows that the reward is tried on
_CPU_ROWS = 8  # samples in parallel while the speed is measured on a CPU
_HELLO = [{"role": "user", "content": "Hello"}]
_TEXT = "The river rises in the mountains in the north of the country and flows through three valleys"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Finding("rows", "ok", "sums.jsonl: 40 rows, 8 held out", {"rows": 40, "held_out": 8})"""

    part: str
    status: Status
    text: str
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


Outcomes = Iterator[tuple[Status, str, dict[str, Any]]]


class Preflight:
    """The parts of one run; each leaves what later ones need."""

    def __init__(self, config: RunConfig, pool: contextlib.ExitStack):
        """pool: closes the processes of the rewards."""
        self._config, self._stack = config, pool
        self._prompts_P: list[Prompt] = []
        self._of_device: tuple[Status, str, dict[str, Any]] | None = None
        """The finding about the decode kernels, the model aside."""

    def findings(self, parts: list[str]) -> Iterator[Finding]:
        """Yield what is found about these parts of PARTS."""
        missing: set[str] = set()
        for part, (look, needs) in PARTS.items():
            if part not in parts:
                continue
            if broken := [name for name in needs if name in missing]:
                missing.add(part)
                yield Finding(part, "skipped", f"needs {broken[0]}")
                continue
            try:
                for status, text, values in look(self):
                    yield Finding(part, status, redact(printable(text)), values)
            except Exception as error:  # also the user's code and what a damaged file raises
                missing.add(part)
                is_ours = isinstance(error, UserError | RunError)
                text = str(error) if is_ours else f"{type(error).__name__}: {error}"
                yield Finding(part, "broken", redact(printable(text)))

    def python(self) -> Outcomes:
        versions = {name: version(name) for name in _PACKAGES}
        listed = ", ".join(f"{name} {number}" for name, number in versions.items() if number is not None)
        machine = f"{platform.system()} {platform.release()} {platform.machine()}"
        values = {"python": platform.python_version(), "os": machine, **versions}
        yield "ok", f"Python {values['python']}, {listed}, {machine}", values

    def device(self) -> Outcomes:
        num_cores = _num_cores()
        memory_gb = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
        values = {"cores": num_cores, "memory_gb": memory_gb}
        yield "ok", f"CPU: {num_cores} cores, {memory_gb} GB of memory", values
        for index in range(torch.cuda.device_count()):
            free, total = (round(each / 1e9, 1) for each in torch.cuda.mem_get_info(index))
            name = torch.cuda.get_device_name(index)
            yield "ok", f"cuda:{index}: {name}, {free} of {total} GB free", {"name": name, "memory_gb": total}
        self._config = dataclasses.replace(self._config, model=resolve_device(self._config.model))
        model = self._config.model
        yield "ok", f"the run uses {model.device}, computes in {model.dtype}", {"device": model.device}

    def kernels(self) -> Outcomes:
        """Report the obstacle of this device; `model` reports that of the model where it differs."""
        self._of_device = self._kernels(NO_KERNELS if self._chosen_kernels == "torch" else None)
        yield self._of_device

    def _kernels(self, obstacle: str | None) -> tuple[Status, str, dict[str, Any]]:
        if obstacle is not None:
            status = "ok" if self._config.model.device == "cpu" else "note"
            text = f"decode steps use PyTorch's operations; not the decode kernels: {obstacle}"
            return status, text, {"kernels": "torch"}
        message = "the decode kernels need cuda-bindings: pip install cuda-bindings"
        require(_is_installed("cuda.bindings"), message)
        kernels = self._chosen_kernels
        which = "for Hopper" if kernels == "hopper" else "for any NVIDIA GPU from Ampere on"
        return "ok", f"decode steps use the decode kernels {which}", {"kernels": kernels}

    @property
    def _chosen_kernels(self) -> Kernels:
        return choose_kernels(self._config.engine.kernels, torch.device(self._config.model.device))

    def sandbox(self) -> Outcomes:
        try:
            sandbox = choose(unsafe=self._config.task.code.unsafe)
        except SandboxUnavailable as error:
            yield "note", f"programs cannot be confined, so the reward code is refused: {error}", {}
        else:
            yield "ok", str(sandbox), {"backend": sandbox.backend}

    def out(self) -> Outcomes:
        folder = Path(self._config.out).absolute()
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            raise UserError(f"out: {existing} cannot be written; choose another folder with --out")
        free_gb = round(shutil.disk_usage(existing).free / 1e9, 1)
        yield "ok", f"{self._config.out}: {free_gb} GB free", {"free_gb": free_gb}
        record, metrics = folder / "run.json", folder / "metrics.jsonl"
        if record.is_file() and metrics.is_file() and metrics.stat().st_size > 0:
            config = dataclasses.replace(self._config, model=resolve_device(self._config.model))
            check_same_run(record, read_object(record).get("config", {}), finite(dataclasses.asdict(config)))
            yield "note", f"{self._config.out} holds a run of these settings, which goes on", {}

        for line in effect_notices(self._config):
            yield "note", line, {}

    def loggers(self) -> Outcomes:
        check_loggers(self._config.loggers)
        yield "ok", ", ".join(self._config.loggers) or "none", {}

    def functions(self) -> Outcomes:
        """Import the reward functions. Their processes are forked, so before a model is read."""
        if (agent := self._config.agent.function) is not None:
            require_installed("an agent", *ENDPOINT_PACKAGES)
            if is_environment_name(agent):
                require_package(agent)
            else:
                imported(agent, "agent.function")
            yield "ok", f"the agent {agent} can be imported", {}
            return
        self._pool = self._stack.enter_context(RewardPool(self._config.task))
        yield "ok", f"{self._rewards} can be imported", {}

    @property
    def _rewards(self) -> str:
        return ", ".join(self._config.task.rewards)

    def model(self) -> Outcomes:
        config, model = self._config, self._config.model
        source = locate(model.path)
        if backend_of(model) == "transformers":
            yield self._of_transformers(source)
            return
        checkpoint = source.open()
        a = architecture_of(checkpoint)
        self._max_positions, self._vocab_size = a.max_positions, a.vocab_size
        shape = f"{a.num_layers} layers of width {a.width}, {a.max_positions} positions"
        if a.rope.kind == "longrope":
            shape += " (the original length of its longrope)"
        values = {"path": str(source.path), "format": model.format, "max_positions": a.max_positions}
        yield "ok", f"{source.path}: {shape}, in {model.format}", values
        if (line := layout_line(checkpoint, model.format)) is not None:
            yield "ok", line, {"layout": line.partition(":")[0]}
        obstacle = kernel_obstacle(
            a,
            self._chosen_kernels,
            COMPUTE[model.dtype],
            ranks={config.adapter.rank, *(rank for _, rank in config.adapter.rank_pattern)},
            page_tokens=config.engine.block_size,
        )
        if (finding := self._kernels(obstacle)) != self._of_device:
            yield finding

    def _of_transformers(self, source: ModelSource) -> tuple[Status, str, dict[str, Any]]:
        """Raise UserError if a setting needs our own decoder."""
        check_backend(self._config)
        config = transformers_config(source)
        self._max_positions, width, self._vocab_size = language_limits(config)
        names = config.architectures or [config.model_type]
        text = f"{source.path}: transformers' own code runs {names[0]}, correctly but slowly: width {width},"
        text += f" {self._max_positions} positions, linears in {self._config.model.format}"
        values = {"path": str(source.path), "format": self._config.model.format}
        return "note", text, values | {"backend": "transformers", "max_positions": self._max_positions}

    def tokenizer(self) -> Outcomes:
        path = self._config.model.path
        tokenizer, vocab_size = load_tokenizer(path), self._vocab_size
        stop_tokens = stop_token_ids(tokenizer, locate(path))
        self._tokenizer = tokenizer
        text = f"{len(tokenizer)} tokens, of {vocab_size} of the model; stop tokens: {len(stop_tokens)}"
        yield "ok", text, {"tokens": len(tokenizer), "stop_tokens": sorted(stop_tokens)}
        if not stop_tokens:
            yield "note", "no stop token: every sample has sample.max_tokens tokens", {}
        if not tokenizer.chat_template:
            yield "note", "no chat template: prompts are plain text", {}
            return
        _, tokens_T = render_chat(tokenizer, _HELLO)
        yield "ok", f"the chat template makes {len(tokens_T)} tokens of a message of one word", {}

    def rows(self) -> Outcomes:
        config = self._config
        self._tokenizer, self._task = load_task(config)
        prompts_P = self._prompts_P = self._task.train_prompts(0, config.num_prompts)
        num_held_out = len(self._task.held_out(None))
        lengths = [len(prompt.tokens_T) for prompt in prompts_P]
        median = round(statistics.median(lengths))
        text = f"{self._task.name}: a step's {len(prompts_P)} prompts have {median} tokens (median),"
        text += f" at most {max(lengths)}; {num_held_out} prompts are held out"
        values = {"median_tokens": median, "max_tokens": max(lengths), "held_out": num_held_out}
        yield "ok", text, values
        held_out_P = self._task.held_out(None)
        for line in fewer_prompts("evaluate.num_prompts", config.evaluate.num_prompts, held_out_P):
            yield "note", line, {}

    def reward(self) -> Outcomes:
        if self._config.agent.function is not None:
            yield "ok", "the agent's return value is the reward; it is not tried here", {}
            return
        for notice in check_task(self._config, self._task, self._pool):
            yield "note", notice, {}
        prompts_P, names = self._prompts_P[:_NUM_TRIED], self._rewards
        if self._pool.environment is not None:
            prompt, key = prompts_P[0], (0, 0)
            row = prompt.columns | {"prompt": prompt.messages or prompt.text}
            (reply,) = self._pool.play([Call("reset", key, row, mix(self._config.seed, 0))])
            self._pool.play([Call("close", key)])
            if isinstance(reply, Failure):
                raise UserError(f"task.rewards: row {prompt.index + 1}: {reply.cause}: {reply.message}")
            yield "ok", f"{names}: the environment begins an episode", {}
            return
        if self._pool.own_judges:
            yield "ok", f"{names}: the model without its adapter is the judge; it is not tried here", {}
            return
        column = self._config.task.answer_column
        answers = [prompt.columns.get(column) for prompt in prompts_P]
        texts = ["" if answer is None else str(answer) for answer in answers]
        groups = [Group(prompt=p, samples_G=[self._sample(t)]) for p, t in zip(prompts_P, texts, strict=True)]
        rewards_P_G = self._pool.score(groups)
        rewards = [reward for (reward,) in rewards_P_G]
        has_answers = all(answer is not None for answer in answers)
        text = "their own answers" if has_answers else "an empty text"
        listed = ", ".join("none" if reward is None else f"{reward:g}" for reward in rewards)
        yield "ok", f"{names}: {len(rewards)} rows with {text} as the sample: {listed}", {"rewards": rewards}
        for failure in format_failures(self._pool.take_failures()):
            yield "note", failure, {}
        if has_answers and 0 in rewards and set(self._config.task.rewards) <= _COMPARE:
            yield "note", f"a row's own answer has the reward 0: check task.answer_column {column!r}", {}

    def _sample(self, text: str) -> Sample:
        tokens_T = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        tokens_T = tokens_T or [self._tokenizer.eos_token_id or 0]
        logprobs_T = [0.0] * len(tokens_T)
        return Sample(tokens_T=tokens_T, logprobs_T=logprobs_T, text=text, finish="stop", version=0)

    def speed(self) -> Outcomes:
        """Sample for about ten seconds; the first tokens, which make caches and graphs, do not count."""
        config, sampling = self._config, sampling_of(self._config)
        text, group = list(self._tokenizer(_TEXT)["input_ids"]), config.num_generations
        lone = Prompt(index=0, text=_TEXT, tokens_T=text, messages=None, columns={})
        most_rows = _CPU_ROWS if config.model.device == "cpu" else config.engine.max_rows(has_kernels=True)
        prompts_P = (self._prompts_P or [lone])[: max(1, most_rows // group)]
        longest = max(len(prompt.tokens_T) for prompt in prompts_P)
        max_tokens = min(sampling.max_tokens, self._max_positions - longest)
        _, engine = load_sampler(config, self._tokenizer)

        def generate(step: int, max_tokens: int, end_s: float) -> int:
            request = dataclasses.replace(
                step_request(config, prompts_P, step),
                sampling=dataclasses.replace(sampling, max_tokens=max_tokens),
            )
            groups = engine.generate(request, on_token=lambda *_: time.monotonic() > end_s)
            return sum(len(sample.tokens_T) for each in groups for sample in each.samples_G)

        generate(0, min(2, max_tokens), float("inf"))
        begin_s, num_tokens, step = time.monotonic(), 0, 0
        while (took_s := time.monotonic() - begin_s) < _SPEED_S:
            step += 1
            num_tokens += generate(step, max_tokens, begin_s + _SPEED_S)
        tokens_per_s = round(num_tokens / took_s, 1)
        rows = f"{len(prompts_P) * group} samples in parallel"
        yield "ok", f"{tokens_per_s} tokens/s of sampling with {rows}", {"tokens_per_s": tokens_per_s}
        for notice in engine.notices:
            yield "note", notice, {}


PARTS: dict[str, tuple[Callable[[Preflight], Outcomes], tuple[str, ...]]] = {
    "python": (Preflight.python, ()),
    "device": (Preflight.device, ()),
    "kernels": (Preflight.kernels, ("device",)),
    "sandbox": (Preflight.sandbox, ()),
    "out": (Preflight.out, ()),
    "loggers": (Preflight.loggers, ()),
    "functions": (Preflight.functions, ()),
    "model": (Preflight.model, ("device",)),
    "tokenizer": (Preflight.tokenizer, ("model",)),
    "rows": (Preflight.rows, ("tokenizer",)),
    "reward": (Preflight.reward, ("rows", "functions")),
    "speed": (Preflight.speed, ("tokenizer",)),
}
"""The check of each part, and the parts that it needs."""
_COMPARE = frozenset(NEED_ANSWER) - {"code"}  # rewards of which a row's own answer is a correct sample


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False
