"""Options of TRL, vLLM and Hugging Face that people type, and what stands for them here."""

FOREIGN: dict[str, str] = {
    "--bf16": "--model.dtype bf16",
    "--fp16": "--model.dtype bf16 or fp32",
    "--dtype": "--model.dtype",
    "--torch-dtype": "--model.dtype",
    "--model-name-or-path": "--model",
    "--load-in-4bit": "--model.format nvfp4, which is the default",
    "--load-in-8bit": "--model.format int8 or fp8",
    "--quantization": "--model.format",
    "--use-vllm": "nothing: the sampler is part of the run and shares its weights",
    "--vllm-mode": "nothing: the sampler is part of the run and shares its weights",
    "--vllm-gpu-memory-utilization": "--engine.kv-cache-gb",
    "--gpu-memory-utilization": "--engine.kv-cache-gb",
    "--use-peft": "--adapter.kind lora, which is the default",
    "--lora-r": "--adapter.rank",
    "--lora-rank": "--adapter.rank",
    "--lora-alpha": "--adapter.alpha",
    "--lora-dropout": "--adapter.dropout",
    "--lora-target-modules": "--adapter.target-modules",
    "--per-device-train-batch-size": "--num-prompts, the prompts of a step; micro-batches follow from memory",
    "--gradient-accumulation-steps": "--num-prompts, the prompts of a step; micro-batches follow from memory",
    "--gradient-checkpointing": "--learn.gradient-checkpointing layer; auto is the default",
    "--max-completion-length": "--sample.max-tokens",
    "--max-prompt-length": "nothing: a prompt that does not fit beside --sample.max-tokens is skipped",
    "--max-seq-length": "--max-length",
    "--max-model-len": "--sample.max-tokens",
    "--temperature": "--sample.temperature",
    "--top-p": "--sample.top-p",
    "--top-k": "--sample.top-k",
    "--learning-rate": "--learn.learning-rate",
    "--warmup-ratio": "--learn.warmup-ratio",
    "--weight-decay": "--learn.weight-decay",
    "--max-grad-norm": "--learn.max-grad-norm",
    "--beta": "--algo.beta",
    "--loss-type": "--algo.loss-type",
    "--num-train-epochs": "--num-steps",
    "--max-steps": "--num-steps",
    "--output-dir": "--out",
    "--report-to": "--loggers",
    "--save-steps": "--checkpoint.every",
    "--save-total-limit": "--checkpoint.keep",
    "--eval-steps": "--evaluate.every",
    "--dataset-name": "--task",
    "--dataset": "--task",
    "--reward-funcs": "--reward",
    "--gpu": "the environment variable CUDA_VISIBLE_DEVICES, which selects a GPU",
    "--device-map": "the environment variable CUDA_VISIBLE_DEVICES, which selects a GPU",
    "--tensor-parallel-size": "torchrun --nproc-per-node, which shares the samples of a step",
    "--enforce-eager": "--engine.kernels torch",
    "--kv-cache-dtype": "--engine.kv-cache-dtype",
    "--push-to-hub": "nothing: qerl export RUN OUT --push-to-hub OWNER/NAME uploads an export",
}
"""By option: what stands for it; an option that the command has is not looked up."""
_SHORT = frozenset({"--model", "--task", "--reward"})


def foreign_hint(option: str, known: set[str]) -> str | None:
    """Return "; here that is --model.dtype bf16"; None for an option of no other program, or where the
    command has no such option."""
    answer = FOREIGN.get(option.replace("_", "-").replace("--no-", "--", 1))
    if answer is None:
        return None
    named = [word.rstrip(",;") for word in answer.split() if word.startswith("--")]
    ours = [name for name in named if name in known]
    is_short = any(name in _SHORT for name in named)
    return f"; here that is {answer}" if ours or is_short or not answer.startswith("--") else None
