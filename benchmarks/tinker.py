"""Measure `qerl tinker` beside `qerl train`: `python -m benchmarks tinker MODEL --data FOLDER --out FILE`.

    train       `qerl train` on GSM8K's rows, its rewards, seconds and tokens of the steps
    alone       a client of `qerl tinker` with the same settings (benchmarks/tinker_client.py)
    together    two such clients at once, each beside one alone
    decode      tokens/s of a batch with one adapter, and with 1, 2, 4 and 8 by row

A rate is sampled tokens over the time of whole steps, without the first ones. FOLDER has train.jsonl and
test.jsonl with the columns question and answer.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from qerl.bench.record import ROOT
from qerl.config import AdapterConfig, ModelConfig, NoiseConfig, RunConfig, SampleConfig, TaskConfig
from qerl.config.check import check_positive
from qerl.config.recipes.paper import GSM8K_SMALL_TEMPLATE
from qerl.engine.live_batch import LiveRequest
from qerl.engine.local_engine import LocalEngine
from qerl.errors import RunError, require
from qerl.models.decoder import Decoder
from qerl.models.device import resolve_device
from qerl.models.peft.adapter import adapter_tensors
from qerl.tinker.adapter import ALPHA, AdapterSlot
from qerl.tracking.json_lines import read_lines
from qerl.tracking.provenance import git_state
from qerl.training.policy import load_sampler, load_task, load_tokenizer_and_limit
from qerl.types import Prompt, Sampling

_BY_ROW, _PROMPT_TOKENS = (1, 2, 4, 8), 512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TinkerBenchOptions:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A folder or a .gguf file."""

    data: Path
    """Folder with train.jsonl and test.jsonl of GSM8K."""

    out: Path
    """File to append JSON rows to."""

    parts: tuple[str, ...] = ("train", "clients", "decode")
    """What is measured."""

    num_steps: int = 6
    """Steps of a run."""

    num_warm_up: int = 2
    """Steps that the rates leave out."""

    num_prompts: int = 64
    """Prompts of a step."""

    num_generations: int = 8
    """Samples of a prompt."""

    max_tokens: int = 512
    """Most tokens of a sample."""

    rank: int = 32
    """LoRA rank."""

    learning_rate: float = 5e-5
    """Learning rate, constant."""

    num_held_out: int = 128
    """Problems of test.jsonl that are answered before and after."""

    decode_rows: int = 64
    """Rows of the decode steps."""

    decode_tokens: int = 256
    """Tokens of each row."""

    def __post_init__(self):
        check_positive(
            self, "num_prompts", "num_generations", "max_tokens", "rank", "decode_rows", "decode_tokens"
        )
        require(self.num_steps > self.num_warm_up, "num_steps must be above num_warm_up")


def bench_tinker(options: TinkerBenchOptions) -> None:
    """Append a row for each part; print the rows."""
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(options, Path(folder))
        for part in options.parts:
            try:
                getattr(bench, part)()
            except (
                RunError,
                subprocess.CalledProcessError,
                RuntimeError,
            ) as error:  # the others are measured
                bench.append({"part": part, "error": f"{type(error).__name__}: {error}"[-2000:]})


class _Bench:
    def __init__(self, options: TinkerBenchOptions, folder: Path):
        self._options, self._folder, self._rates = options, folder, dict[str, float]()
        git = git_state(ROOT)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self._about = {"bench": "tinker", "model": Path(options.model).name, "device": device}
        self._about |= {"commit": git.commit if git else None}

    def train(self) -> None:
        options, out = self._options, self._folder / "train"
        fields = {
            "--model": options.model,
            "--task": str(options.data / "train.jsonl"),
            "--task.held-out-split": str(options.data / "test.jsonl"),
            "--task.prompt-column": "question",
            "--task.template": GSM8K_SMALL_TEMPLATE,
            "--reward": "numeric",
            "--adapter.rank": str(options.rank),
            "--adapter.alpha": str(int(ALPHA)),
            "--num-steps": str(options.num_steps),
            "--num-prompts": str(options.num_prompts),
            "--num-generations": str(options.num_generations),
            "--sample.max-tokens": str(options.max_tokens),
            "--learn.learning-rate": str(options.learning_rate),
            "--learn.lr-scheduler-type": "constant",
            "--learn.warmup-ratio": "0",
            "--noise.schedule": "none",
            "--evaluate.num-prompts": str(options.num_held_out),
            "--out": str(out),
        }
        start_s = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "qerl",
            "train",
            *(part for field in fields.items() for part in field),
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        lines = [line for line in read_lines(out / "metrics.jsonl") if "step_s" in line]
        steps = [
            {"step_s": line["step_s"], "num_tokens": line["sampled_tokens"], "reward": line["reward"]}
            for line in lines
        ]
        result = json.loads((out / "result.json").read_text())
        greedy = [
            result[f"greedy_{moment}"] for moment in ("before", "after") if f"greedy_{moment}" in result
        ]
        self._write("train", steps, greedy, time.monotonic() - start_s)

    def clients(self) -> None:
        start_s = time.monotonic()
        with self._server() as url:
            (rows,) = self._clients(url, 1, self._options.num_held_out)
            self._write_client("alone", rows, time.monotonic() - start_s)
            start_s = time.monotonic()
            for rows in self._clients(url, 2, 0):
                self._write_client("together", rows, time.monotonic() - start_s)

    def decode(self) -> None:
        """Decode with one adapter as the decoder's own, then with several by row."""
        options = self._options
        config = RunConfig(
            model=resolve_device(ModelConfig(path=options.model)),
            adapter=AdapterConfig(rank=options.rank, alpha=ALPHA),
            sample=SampleConfig(max_tokens=1),
            noise=NoiseConfig(schedule="none"),
        )
        tokenizer, _ = load_tokenizer_and_limit(config)
        decoder, engine = load_sampler(config, tokenizer, stop_ids=frozenset())
        assert isinstance(decoder, Decoder)
        slot = AdapterSlot(decoder, engine, options.rank, max(_BY_ROW))
        prompts = [tokens for tokens, _ in self._tokens()["train"][: options.decode_rows]]
        adapters = [_random_adapter(decoder, seed) for seed in range(max(_BY_ROW))]
        slot.hold(0, adapters[0], options.rank)
        one = self._decode(engine, prompts, [0] * len(prompts), "one adapter", None)
        for count in _BY_ROW:
            with slot.banked() as bank:
                numbers = [slot.add_to(bank, adapter, options.rank) for adapter in adapters[:count]]
                rows = [numbers[i % count] for i in range(len(prompts))]
                self._decode(engine, prompts, rows, f"{count} by row", one)

    def _decode(
        self, engine: LocalEngine, prompts: list[list[int]], numbers: list[int], name: str, one: float | None
    ) -> float:
        """Return tokens/s from the moment when every row has its first token."""
        num_tokens = self._options.decode_tokens
        runs = [_decode_once(engine, prompts, numbers, num_tokens) for _ in range(3)]
        rate = max(rate for rate, _ in runs[1:])
        of_one = {} if one is None else {"of_one": rate / one}
        shown = {"first_tokens_s": runs[-1][1], "rows": len(prompts), "all_rates": [rate for rate, _ in runs]}
        self.append({"part": "decode", "adapters": name, "tokens_per_s": rate, **of_one, **shown})
        return rate

    def _tokens(self) -> dict[str, list[tuple[list[int], str]]]:
        """Return rows as the task renders them: (tokens of the prompt, answer)."""
        options = self._options
        task = TaskConfig(
            name=str(options.data / "train.jsonl"),
            held_out_split=str(options.data / "test.jsonl"),
            prompt_column="question",
            template=GSM8K_SMALL_TEMPLATE,
        )
        sample = SampleConfig(max_tokens=options.max_tokens)
        _, rows = load_task(
            RunConfig(model=ModelConfig(path=options.model, device="cpu"), task=task, sample=sample)
        )
        size = max(2 * options.num_steps * options.num_prompts, options.decode_rows)
        found = {"train": rows.train_prompts(0, size), "test": rows.held_out(options.num_held_out)}
        return {name: [(p.tokens_T, p.columns["answer"]) for p in prompts] for name, prompts in found.items()}

    def _clients(self, url: str, count: int, num_held_out: int) -> list[list[dict[str, Any]]]:
        """Run this many clients at once; return the rows of each."""
        options, rows_file = self._options, self._folder / "rows.json"
        if not rows_file.exists():
            rows_file.write_text(json.dumps(self._tokens()))
        clients = []
        for seed in range(count):
            settings = {
                "url": url,
                "model": options.model,
                "rows": str(rows_file),
                "num_held_out": num_held_out,
                "seed": seed,
                "waits": True,
            }
            names = "rank", "learning_rate", "num_steps", "num_prompts", "num_generations", "max_tokens"
            settings |= {name: getattr(options, name) for name in names}
            file = self._folder / f"client-{seed}.json"
            file.write_text(json.dumps(settings))
            command = [sys.executable, "-m", "benchmarks.tinker_client", str(file)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            clients.append(subprocess.Popen(command, **pipes))
        try:
            lines = [_lines_until_ready(client) for client in clients]
            for client in clients:
                assert client.stdin is not None
                client.stdin.write("go\n")
                client.stdin.flush()
            found = []
            for before, client in zip(lines, clients, strict=True):
                rest, _ = client.communicate()
                if client.returncode:
                    raise RunError(f"a client ended with {client.returncode}")
                found.append(
                    [json.loads(line) for line in (*before, *rest.splitlines()) if line.startswith("{")]
                )
            return found
        finally:
            for client in clients:
                client.kill()

    @contextmanager
    def _server(self) -> Iterator[str]:
        options = self._options
        limits = ["--max-rank", str(options.rank), "--max-samples", str(options.num_generations)]
        limits += ["--max-context-tokens", str(options.max_tokens + _PROMPT_TOKENS)]
        limits += ["--checkpoints", str(self._folder / "checkpoints"), "--max-body-bytes", str(2**28)]
        command = [sys.executable, "-m", "qerl", "tinker", options.model, "--port", "0", *limits]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            line = next((line for line in server.stdout if " at http" in line), None)
            if line is None:
                raise RunError(f"the server did not start: {' '.join(command)}")
            yield line.strip().partition(" at ")[2]
        finally:
            server.terminate()
            server.wait(30)

    def _write_client(self, part: str, rows: list[dict[str, Any]], seconds: float) -> None:
        greedy = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
        self._write(part, [row for row in rows if "step_s" in row], greedy, seconds)

    def _write(self, part: str, steps: list[dict[str, Any]], greedy: list[float], seconds: float) -> None:
        counted = steps[self._options.num_warm_up :]
        rate = sum(step["num_tokens"] for step in counted) / sum(step["step_s"] for step in counted)
        self._rates.setdefault(part, rate)
        beside = {"alone": "train", "together": "alone"}.get(part, "")
        row = {
            "part": part,
            "step_s": statistics.median(step["step_s"] for step in counted),
            "tokens_per_s": rate,
            **({f"of_{beside}": rate / self._rates[beside]} if beside in self._rates else {}),
            "greedy": greedy,
            "rewards": [round(step["reward"], 3) for step in steps],
            "steps": [{name: round(step[name], 3) for name in ("step_s", "num_tokens")} for step in steps],
            "seconds": seconds,
        }
        if "sampled_s" in counted[0]:
            row["sampled_s"] = statistics.median(step["sampled_s"] for step in counted)
        self.append(row)

    def append(self, row: dict[str, Any]) -> None:
        line = json.dumps(self._about | row)
        print(line, flush=True)
        with self._options.out.open("a") as file:
            file.write(line + "\n")


def _decode_once(
    engine: LocalEngine, prompts: list[list[int]], numbers: list[int], num_tokens: int
) -> tuple[float, float]:
    """Return tokens/s after the first tokens, and the seconds until every row had one."""
    counts, before, first_s, start_s = [0] * len(prompts), 0, 0.0, time.monotonic()

    def on_token(i: int, *_: Any) -> None:
        counts[i] += 1

    with engine.live_batch(max(map(len, prompts)) + num_tokens) as batch:
        for i, (tokens, number) in enumerate(zip(prompts, numbers, strict=True)):
            prompt = Prompt(index=i, text="", tokens_T=tokens, messages=None, columns={})
            how = Sampling(max_tokens=num_tokens)
            batch.add(
                LiveRequest(prompt=prompt, sampling=how, on_token=partial(on_token, i), table_row=number)
            )
        while min(counts) < num_tokens:
            batch.step()
            if before == 0 and min(counts) > 0:
                first_s, before = time.monotonic() - start_s, sum(counts)
    return (sum(counts) - before) / (time.monotonic() - start_s - first_s), first_s


def _lines_until_ready(client: "subprocess.Popen[str]") -> list[str]:
    assert client.stdout is not None
    lines = []
    for line in client.stdout:
        if line.strip() == "ready":
            return lines
        lines.append(line)
    raise RunError(f"a client ended before its first step: {lines[-3:]}")


def _random_adapter(decoder: Decoder, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(master.shape, generator=generator) * 1e-3
        for name, master in adapter_tensors(decoder).items()
    }
