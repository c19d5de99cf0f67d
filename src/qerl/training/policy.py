"""Build what samples from a config: the model with its adapter, the engine, the task's prompts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qerl.config import EvalConfig, RunConfig
from qerl.config.conflicts import NEEDS_OUR_DECODER, holding
from qerl.engine.local_engine import LocalEngine
from qerl.engine.paged_engine import PagedEngine
from qerl.engine.transformers_engine import TransformersEngine
from qerl.errors import UserError, quantity, require
from qerl.learner import checkpoint
from qerl.learner.distributed import Ranks
from qerl.models.checkpoint.encoding import SCALES
from qerl.models.checkpoint.notices import checkpoint_notices, skipped_notices
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import check_tokens, load_tokenizer, stop_token_ids
from qerl.models.device import COMPUTE
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import add_adapter, check_rank, load_adapter, set_router_noise
from qerl.models.policy_model import PolicyModel
from qerl.models.quantize.quantization_check import TEXT, check_quantization
from qerl.models.sampler_copy import make_sampler_copy
from qerl.models.transformers_backend.backend import backend_of, max_positions_of
from qerl.tasks import RewardPool, Task
from qerl.tasks.chat_tokens import allow_special_tokens
from qerl.tasks.rows.prompt import set_template_date, set_template_variables
from qerl.tracking.progress import ignore
from qerl.training.rollouts.teacher import teacher_checkpoint
from qerl.types import Prompt, Report


def check_backend(config: RunConfig) -> None:
    """Raise UserError if transformers is to run the model and a setting needs our own decoder."""
    if backend_of(config.model) == "qerl":
        return
    setting = holding(config, NEEDS_OUR_DECODER).partition(", ")[0]
    if setting:
        raise UserError(
            f"{setting} needs the package's own decoder, but transformers' code runs this model"
            " (model.backend): set it back to its default"
        )


def load_task(config: RunConfig) -> tuple[PreTrainedTokenizerBase, Task]:
    tokenizer, max_prompt_tokens = load_tokenizer_and_limit(config)
    check_prompt_fits(max_prompt_tokens, config.sample.max_tokens, "sample.max_tokens")
    settings = {"seed": config.seed, "max_prompt_tokens": max_prompt_tokens, "strict": config.strict}
    return tokenizer, Task(config.task, tokenizer, **settings)


def check_task(config: RunConfig, task: Task, pool: RewardPool) -> list[str]:
    """Raise UserError if a reward lacks a column. Return a line for each table of rows, and one for each
    checkpoint, the teacher's too, of which a part is not used as it is stored; with config.strict these are
    errors, but not the lines about tensors that no language model has, and about columns of known sets."""
    pool.check(task.train_prompts(0, config.num_prompts)[0])
    notices = task.notices(config.task, reads_answer=pool.reads_answer(config.task.answer_column))
    stored = [(locate(config.model.path).open(), config.model.format), *teacher_checkpoint(config)]
    notices += [line for each in stored for line in checkpoint_notices(*each)]
    require(not (config.strict and notices), f"strict: {'; '.join(notices)}")
    skipped = [line for checkpoint, _ in stored for line in skipped_notices(checkpoint)]
    return [*task.known_columns, *notices, *skipped]


def fewer_prompts(option: str, num: int | None, prompts_P: Sequence[object]) -> list[str]:
    """Return a line if an evaluation has fewer prompts than the option asks for, with another value than
    evaluate.num_prompts has by default: as many as there are, up to that."""
    if num is None or num == EvalConfig().num_prompts or len(prompts_P) >= num:
        return []
    return [f"{option} is {num:,}, but there are only {quantity(len(prompts_P), 'row')} to evaluate on"]


def check_supported(config: RunConfig, pool: RewardPool, ranks: Ranks) -> None:
    """Raise UserError for what several ranks or an environment cannot do."""
    is_deep, has_env = config.algo.branching == "deep", pool.environment is not None
    is_refused = config.rollout.partial and (has_env or config.num_prompts < ranks.count)
    require(
        not is_refused, "rollout.partial needs at least one prompt per rank; environments are not supported"
    )
    if is_deep and has_env:
        require(
            pool.is_deterministic,
            "algo.branching deep plays an environment's turns again: set `deterministic = True` in its class"
            " if the same seed and answers always get the same replies",
        )
        scope = config.noise.scope
        conflict = f"noise.scope {scope} does not work with algo.branching deep and an environment"
        require(scope == "step", f"{conflict}: set it to step")


def load_tokenizer_and_limit(config: RunConfig) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer, and the longest prompt that fits beside sample.max_tokens."""
    check_backend(config)
    max_positions = max_positions_of(config.model)
    tokenizer = load_tokenizer(config.model.path)
    set_template_variables(tokenizer, json.loads(config.task.chat_template_kwargs))
    allow_special_tokens(tokenizer, config.task.allow_special_tokens)
    set_template_date(tokenizer, config.task.chat_template_date)
    return tokenizer, max_positions - config.sample.max_tokens


def check_prompt_fits(max_prompt_tokens: int, max_tokens: int, option: str) -> None:
    """Raise UserError if max_tokens leave no position for a prompt. max_prompt_tokens: of
    load_tokenizer_and_limit; option: the user's name for max_tokens."""
    positions = f"{max_prompt_tokens + max_tokens} positions, prompt included"
    require(max_prompt_tokens > 0, f"{option} is {max_tokens}, but the model has only {positions}: lower it")


def longest_prompt(config: RunConfig, prompts_P: list[Prompt]) -> int:
    """Return the tokens that the memory plan takes for a prompt; an agent makes its own."""
    if config.agent.function is not None:
        context_tokens = min(config.agent.context_tokens, max_positions_of(config.model))
        return max(1, context_tokens - config.sample.max_tokens)
    return max(len(prompt.tokens_T) for prompt in prompts_P)


def load_sampler(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: Report = ignore,
    *,
    stop_ids: frozenset[int] | None = None,
) -> tuple[PolicyModel, LocalEngine]:
    """report: gets the number of loaded layers; stop_ids: tokens that end every sample; None: those of the
    model."""
    model, source = config.model, locate(config.model.path)
    stop_ids = stop_token_ids(tokenizer, source) if stop_ids is None else stop_ids
    build: dict[str, Any] = {"format": model.format, "compute": COMPUTE[model.dtype]}
    build |= {"device": torch.device(model.device), "resident": model.operand == "resident"}
    build |= {"scales": SCALES[model.block_scales]}
    if backend_of(model) == "transformers":
        from qerl.models.transformers_backend import transformers_loader  # takes seconds to import

        check_backend(config)
        decoder = transformers_loader.load_transformers_model(source, **build)
        check_tokens(tokenizer, decoder.vocab_size, source.path)
        _add_adapter(decoder, config)
        return decoder, TransformersEngine(decoder, tokenizer, config.engine, stop_token_ids=stop_ids)
    decoder = build_decoder(source.open(build["device"]), **build, head=model.head_format, report=report)
    check_tokens(tokenizer, decoder.vocab_size, source.path)
    _add_adapter(decoder, config)
    set_router_noise(decoder, config.noise.router)
    sampler = decoder if model.sampler_format is None else make_sampler_copy(decoder, model.sampler_format)
    return decoder, PagedEngine(sampler, tokenizer, config.engine, stop_token_ids=stop_ids)


def _add_adapter(model: PolicyModel, config: RunConfig) -> None:
    check_rank(model, config.adapter)
    add_adapter(model, config.adapter, seed=config.seed)


def load_trained_sampler(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    checkpoints: Path | None,
    notice: Callable[[str], None],
    report: Report = ignore,
) -> LocalEngine:
    """Load the adapter of the newest intact checkpoint in the folder; None: the model as it is, with a notice
    of what quantizing it changed. Notices also say that transformers runs the model."""
    adapter = None if checkpoints is None else checkpoint.latest_adapter(checkpoints)
    decoder, engine = load_sampler(config, tokenizer, report)
    for line in engine.notices if decoder.architecture is None else ():
        notice(line)
    if adapter is not None:
        load_adapter(decoder, adapter)
        return engine
    model, text = config.model, list(tokenizer(TEXT)["input_ids"])
    line = check_quantization(decoder, model.path, model.format, [text], "a built-in text")
    if line is not None:
        notice(line)
    return engine
