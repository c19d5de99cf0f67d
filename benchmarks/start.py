"""Time a fresh process up to its first decode step and its first update: `python -m benchmarks start`.

    imported_s     since the process was started: Python, PyTorch and this package are imported
    loaded_s       the weights are read, quantized and on the device
    first_step_s   the first decode step is done: prefill, kernels, the first CUDA graph
    learned_s      the first update is done
    compile_s      time in which at least one of num_compiled kernels was compiled
    waited_s       time in which the process did nothing but wait for kernels

Each case is a process of its own: an empty cache of kernels (cold), then the one that this filled (warm);
with kernels compiled while the weights are read, and without. The files of weights are read once before, so
that they come from memory in every case. Of --shape, a checkpoint of random weights is written first. Each
case prints one line of JSON.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.algo.seeds import mix
from qerl.bench.decode import NullTokenizer, random_prompts
from qerl.config import AdapterConfig, EngineConfig, ModelConfig, RunConfig, SampleConfig
from qerl.config.check import check_positive
from qerl.errors import RunError, UserError
from qerl.kernels.runtime.compile_tally import TALLY
from qerl.learner import Learner
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of, tensor_shapes
from qerl.models.device import resolve_device
from qerl.models.hf_writer import write_json, write_shards
from qerl.models.random_weights import shape
from qerl.training.compile_plan import compile_while_loading
from qerl.training.policy import load_sampler
from qerl.training.rollouts.rollout import sampling_of, with_advantages
from qerl.types import GenerateRequest

_GROUP, _TOKENS = 8, 2  # samples of a prompt, tokens of a sample: the second is the first decode step's
_MODELS = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    shape: str = "qwen2.5-7b"
    """Model whose shape a checkpoint of random weights gets."""

    model: str | None = None
    """Checkpoint to load instead, a folder."""

    format: str = "nvfp4"
    """model.format."""

    lora_rank: int = 32
    """Rank of the adapters."""

    rows: int = 64
    """Samples of the first call, and engine.max_num_seqs."""

    prompt_tokens: int = 256
    """Tokens per prompt."""

    max_tokens: int = 1024
    """sample.max_tokens of the run, which tables of pages have room for; the call draws 2."""

    runs: int = 1
    """Processes of each case."""

    child: str | None = None
    """Used by the benchmark itself: time.time() of this process's start."""

    ahead: bool | None = None
    """Compile while the weights are read, or not; by default both are measured."""

    def __post_init__(self):
        check_positive(self, "lora_rank", "rows", "prompt_tokens", "max_tokens", "runs")
        if self.rows % _GROUP:
            raise UserError(f"rows must be a multiple of {_GROUP}, got {self.rows}")


def bench_start(options: StartOptions) -> None:
    """Time a fresh process up to its first decode step and its first update."""
    if options.child is not None:
        print(json.dumps(measure(options, float(options.child))), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = str(write_checkpoint(shape(options.shape), Path(folder) / "model"))
        options = dataclasses.replace(options, model=model)
        _read_once(Path(model))
        for run in range(options.runs):
            for ahead in (False, True) if options.ahead is None else (options.ahead,):
                cache = Path(folder) / f"cache-{run}-{ahead}"
                for state in ("cold", "warm"):
                    case = {"cache": state, "while_loading": ahead, "run": run}
                    print(json.dumps(case | _in_process(options, cache, ahead)), flush=True)


def measure(options: StartOptions, start_s: float) -> dict[str, Any]:
    """Load, sample and learn in this process, which was started at start_s of time.time()."""
    imported_s = time.time() - start_s
    assert options.model is not None
    config = run_config(options)
    positions = options.prompt_tokens + options.max_tokens
    architecture = architecture_of(locate(options.model).open())
    tokenizer: Any = NullTokenizer(architecture.vocab_size)
    tokenizer.eos_token_id = None
    if options.ahead is not False:
        compile_while_loading(config, positions)
    decoder, engine = load_sampler(config, tokenizer)
    engine.expect(positions)
    _wait(config)
    loaded_s = time.time() - start_s
    prompts_P = random_prompts(config.num_prompts, options.prompt_tokens, architecture.vocab_size)
    sampling = dataclasses.replace(sampling_of(config), max_tokens=_TOKENS)
    request = GenerateRequest(prompts_P, num_samples=_GROUP, sampling=sampling, seed=0, step=0)
    groups = engine.generate(request)
    _wait(config)
    first_step_s = time.time() - start_s
    rewards_G: list[float | None] = [float(g % 2) for g in range(_GROUP)]
    learner = Learner(decoder, config, notice=lambda text: None)
    learner.step(with_advantages(config.algo, config.sample, groups, [rewards_G] * len(groups)))
    _wait(config)
    times = {"imported_s": imported_s, "loaded_s": loaded_s, "first_step_s": first_step_s}
    report = TALLY.report()
    return {
        **{name: round(value, 2) for name, value in times.items()},
        "learned_s": round(time.time() - start_s, 2),
        "num_kernels": 0 if report is None else report.num_kernels,
        "num_compiled": 0 if report is None else report.num_compiled,
        "compile_s": 0.0 if report is None else round(report.compile_s, 2),
        "waited_s": 0.0 if report is None else round(report.waited_s or 0.0, 2),
        "error": None if report is None else report.error,
        "device": torch.cuda.get_device_name() if config.model.device == "cuda" else "cpu",
        "format": options.format,
        "rows": options.rows,
        "layers": architecture.num_layers,
    }


def run_config(options: StartOptions) -> RunConfig:
    model = ModelConfig(path=options.model or "", format=options.format)  # type: ignore[arg-type]
    return RunConfig(
        num_prompts=options.rows // _GROUP,
        num_generations=_GROUP,
        model=resolve_device(model),
        adapter=AdapterConfig(rank=options.lora_rank),
        sample=SampleConfig(max_tokens=options.max_tokens),
        engine=EngineConfig(max_num_seqs=options.rows),
    )


def write_checkpoint(a: Architecture, folder: Path) -> Path:
    """Write a dense model of random weights, in BF16, without a tokenizer. Raise UserError for a shape whose
    config.json needs more than the entries here."""
    config = {
        "architectures": [a.family],
        "model_type": _MODELS.get(a.family, a.family.removesuffix("ForCausalLM").lower()),
        "hidden_size": a.width,
        "intermediate_size": a.ff_width,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_positions,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope.theta,
        "tie_word_embeddings": a.tied_head,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    write_shards(folder, _random_tensors(a))
    read = architecture_of(locate(str(folder)).open())
    same = {
        "rope": a.rope,
        "layer_kinds": a.layer_kinds,
    }  # a plain rope and plain layers, written in two ways
    if dataclasses.replace(read, **same) != a or a.rope.kind != "default" or any(a.layer_kinds):
        raise UserError(f"no checkpoint of shape {a.family} can be written; give one with --model")
    return folder


def _random_tensors(a: Architecture) -> Iterator[tuple[str, Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for index, (name, sizes) in enumerate(tensor_shapes(a).items()):
        rng = torch.Generator(device).manual_seed(mix(0, index))
        tensor = torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=rng)
        yield name, (tensor.add_(1) if name.endswith("norm.weight") else tensor).cpu()


def _in_process(options: StartOptions, cache: Path, ahead: bool) -> dict[str, Any]:
    names = ("model", "format", "lora_rank", "rows", "prompt_tokens", "max_tokens")
    arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    command = [sys.executable, "-m", "benchmarks", "start", *arguments, f"--ahead={ahead}"]
    environment = os.environ | {"QERL_CACHE": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    process = subprocess.run(
        [*command, f"--child={time.time()}"], env=environment, capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        raise RunError(f"start: a process ended with {process.returncode}: {process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def _read_once(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            while stream.read(1 << 26):
                pass


def _wait(config: RunConfig) -> None:
    if config.model.device == "cuda":
        torch.cuda.synchronize()
