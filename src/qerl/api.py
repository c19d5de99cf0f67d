"""A training loop of your own: a policy that samples, and a learner that updates its adapter.

    policy = qerl.load("smollm2-135m-instruct", sample=SampleConfig(max_tokens=16))
    learner = policy.learner(num_steps=10)
    for step in range(10):
        prompts = [policy.prompt("What is 2 + 2?", index=step, answer="4"), ...]
        with policy.noise(0.01, step=step):
            groups = policy.generate(prompts, num_generations=8, step=step)
        groups = [...]  # the same, each sample with a reward and an advantage
        metrics = learner.step(groups)
        policy.publish(learner.version)
    policy.save_adapter("adapter")

These are the functions that `qerl train` calls, in the order of training/loop.py: with the same settings,
seed and prompts, metrics and adapter are equal bit for bit (tests/test_rl_loop.py). The loop decides what a
run's config otherwise does: prompts, rewards, advantages, noise and which samples are learned from.
"""

import dataclasses
import datetime
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from transformers import PreTrainedTokenizerBase

from qerl.algo.loss import LOSSES
from qerl.aqn.norm_noise import noised
from qerl.config import (
    AdapterConfig,
    AlgoConfig,
    EngineConfig,
    LearnConfig,
    ModelConfig,
    RunConfig,
    SampleConfig,
)
from qerl.engine.local_engine import LocalEngine
from qerl.errors import UserError, check_platform, did_you_mean, require
from qerl.export.write import write_adapter
from qerl.learner.checkpoint import adapter_description
from qerl.learner.distributed import ALONE
from qerl.learner.learner import Learner
from qerl.models import hf_writer
from qerl.models.checkpoint.notices import checkpoint_notices
from qerl.models.checkpoint.source import locate
from qerl.models.device import resolve_device
from qerl.models.peft.adapter import adapter_tensors, load_adapter
from qerl.models.peft.peft_names import peft_tensors
from qerl.models.peft.peft_reader import read_adapter
from qerl.models.policy_model import PolicyModel
from qerl.tasks.rows.conversation import messages_of
from qerl.tasks.rows.prompt import BadRow, render_chat, set_template_date
from qerl.training.calibrated import refuse_calibration
from qerl.training.planned_learner import planned_learner
from qerl.training.policy import check_prompt_fits, load_sampler, load_tokenizer_and_limit
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest, Group, Prompt, Sampling

Notice = Callable[[str], None]


def _print_notice(line: str) -> None:
    print(line, file=sys.stderr)


def load(
    model: str | ModelConfig,
    *,
    adapter: AdapterConfig = AdapterConfig(),
    sample: SampleConfig = SampleConfig(),
    engine: EngineConfig = EngineConfig(),
    max_prompt_tokens: int = 1024,
    seed: int = 0,
    notice: Notice = _print_notice,
) -> "Policy":
    """Load a model with a LoRA adapter; a checkpoint in 16 or 32 bits is quantized to model.format, NVFP4 by
    default.

    model: a config, or only its path: the built-in smollm2-135m-instruct, a folder, a .gguf file or a hub id.
    sample: how samples are drawn to learn from; the learner computes their logprobs at its temperature.
    max_prompt_tokens: length of the longest prompt, for which a GPU's memory is planned. seed: of the
    adapter's first values, of the samples and of the noise. notice: receives a line about what the user
    should know, such as kernels that are not available; by default it is printed to stderr.

    Raise UserError for a model that is not found or not supported, and for a setting that does not exist or
    that a loop of one process cannot have.
    """
    check_platform()
    model = ModelConfig(path=model) if isinstance(model, str) else model
    refuse_calibration(model)
    is_plain = adapter.kind == "lora" and not adapter.router
    require(is_plain, "load adds a LoRA adapter: adapter.kind full and adapter.router are for qerl.train")
    config = RunConfig(seed=seed, model=model, adapter=adapter, sample=sample, engine=engine)
    _check_choices(config)
    config = dataclasses.replace(config, model=resolve_device(model))
    tokenizer, limit = load_tokenizer_and_limit(config)
    set_template_date(tokenizer, str(datetime.date.today()))
    check_prompt_fits(limit, sample.max_tokens, "sample.max_tokens")
    require(max_prompt_tokens > 0, f"max_prompt_tokens must be positive, got {max_prompt_tokens}")
    decoder, sampler = load_sampler(config, tokenizer)
    for line in [*checkpoint_notices(locate(model.path).open(), model.format), *sampler.notices]:
        notice(line)
    if adapter.init_from is not None:
        load_adapter(decoder, read_adapter(adapter.init_from, adapter))
    return Policy(config, tokenizer, decoder, sampler, min(max_prompt_tokens, limit), notice)


class Policy:
    """A frozen model and its adapter: the engine samples from it, a learner updates it. `load` makes it."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        decoder: PolicyModel,
        engine: LocalEngine,
        max_prompt_tokens: int,
        notice: Notice,
    ):
        self.config = config
        """Settings of model, adapter, sampling, engine and seed; other fields have no effect here."""
        self.tokenizer, self.max_prompt_tokens = tokenizer, max_prompt_tokens
        self._decoder, self._engine, self._notice = decoder, engine, notice
        engine.expect(max_prompt_tokens + config.sample.max_tokens)

    @property
    def sampling(self) -> Sampling:
        """Parameters that `generate` uses by default; `dataclasses.replace` makes others of them."""
        return sampling_of(self.config)

    def prompt(self, messages: str | Sequence[Mapping[str, Any]], *, index: int, **columns: Any) -> Prompt:
        """Return a prompt: the messages in the model's chat template, up to where its answer begins.

        messages: dicts with role and content; a text is one message of the user. index: the row's index in
        the task; samples depend on (seed, step, index, sample), so prompts of a step need different ones.
        columns: what the reward reads, kept in Prompt.columns. Raise UserError for messages that the template
        rejects and for a prompt of more than max_prompt_tokens.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        try:
            turns = messages_of(turns)
        except BadRow as fault:
            raise UserError(f"prompt {index}: {fault}") from fault
        text, tokens_T = render_chat(self.tokenizer, turns)
        length, limit = len(tokens_T), self.max_prompt_tokens
        require(0 < length <= limit, f"prompt {index} has {length} tokens, max_prompt_tokens is {limit}")
        return Prompt(index=index, text=text, tokens_T=tokens_T, messages=turns, columns=columns)

    def generate(
        self, prompts: Sequence[Prompt], *, num_generations: int, step: int, sampling: Sampling | None = None
    ) -> list[Group]:
        """Return a group for each prompt, in order: num_generations samples with tokens, text and logprobs,
        in nats, of the policy that drew them, noise included.

        step: of the loop, from which the samples' random numbers follow. sampling: for samples that are not
        learned from, such as greedy ones (temperature 0) to evaluate; None: the policy's own.
        """
        require(num_generations > 0, f"num_generations must be positive, got {num_generations}")
        request = GenerateRequest(
            list(prompts),
            num_samples=num_generations,
            sampling=sampling or self.sampling,
            seed=self.config.seed,
            step=step,
        )
        return self._engine.generate(request)

    def noise(
        self, sigma: float, *, step: int, unit: Literal["absolute", "relative"] = "absolute"
    ) -> AbstractContextManager[Any]:
        """Add AQN's noise to the RMSNorm weights within the context: sigma * Z, where Z follows from (seed,
        step, layer). 0 adds none.

        unit: absolute: sigma is in the unit of the weights; relative: a fraction of each norm's RMS. Raise
        UserError for a negative sigma and for a model without such norms.
        """
        table = self._decoder.noise_table
        require(math.isfinite(sigma) and sigma >= 0, f"sigma must be a number from 0 on, got {sigma}")
        require(unit in ("absolute", "relative"), f"unit must be absolute or relative, got {unit!r}")
        require(sigma == 0 or len(table.norms) > 0, "this model has no RMSNorm that noise can be added to")
        return noised(table, sigma=sigma, unit=unit, seed=self.config.seed, step=step)

    def learner(
        self,
        *,
        num_steps: int,
        algo: AlgoConfig = AlgoConfig(),
        learn: LearnConfig = LearnConfig(),
        num_prompts: int = 16,
        num_generations: int = 8,
    ) -> "PolicyLearner":
        """Return a new learner of the adapter, with an optimizer of its own.

        num_steps: number of calls of `step`, over which the learning rate follows its schedule. num_prompts:
        groups of a step. num_generations: samples drawn of a prompt; a mean over samples counts as many, also
        where one has no reward. A GPU's memory is planned for both. algo: the loss, the KL penalty and the
        correction for the sampler; loss_type may be an entry of your own in LOSSES (docs/extend.md), and
        advantage is not read.
        """
        for name, value in (("dynamic_sampling", False), ("branching", "none"), ("overlong", "keep")):
            is_default = getattr(algo, name) == value
            require(is_default, f"algo.{name} is for qerl.train only: leave it at {value}")
        config = dataclasses.replace(
            self.config,
            num_steps=num_steps,
            num_prompts=num_prompts,
            num_generations=num_generations,
            algo=algo,
            learn=learn,
        )
        _check_choices(config)
        score = partial(self._engine.score, sampling=self.sampling) if config.engine.exact else None
        policy = self._decoder, config, self.max_prompt_tokens
        return PolicyLearner(planned_learner(*policy, notice=self._notice, score=score, ranks=ALONE))

    def publish(self, version: int) -> None:
        """Sample from the adapter's present weights from now on; samples record the learner's version."""
        self._engine.publish(version)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the fp32 adapter and the tokenizer in PEFT's layout, which AdapterConfig.init_from and vLLM
        read too. The folder appears when it is complete; raise UserError if it holds files already."""
        out = Path(folder).expanduser()
        hf_writer.check_output_folder(out)
        decoder = self._decoder
        masters = {name: master.detach() for name, master in adapter_tensors(decoder).items()}
        stored = peft_tensors(decoder.architecture, masters).items()
        copies = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in stored}
        write_adapter(
            copies,
            adapter_description(self.config.adapter, self.config.model, decoder),
            self.config.model,
            out,
        )


class PolicyLearner:
    """Updates the adapter of a policy. `Policy.learner` makes it."""

    def __init__(self, learner: Learner):
        self._learner = learner

    @property
    def version(self) -> int:
        """Number of planned updates so far, those of steps without a gradient included."""
        return self._learner.version

    def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Update the adapter from the samples that have a reward, each with its advantage; return the metrics
        that docs/metrics.md describes, such as entropy, mismatch_abs (in nats per token), loss and grad_norm.

        A reward of None leaves a sample out. Groups may be fewer than num_prompts and have fewer samples.
        Raise UserError if nothing could be learned from, and RunError if training diverges.
        """
        samples = [sample for group in groups for sample in group.samples_G]
        require(len(samples) > 0, "step needs groups with samples: call generate first")
        known = [sample.advantage for sample in samples if sample.reward is not None]
        hint = "no sample has a reward: set reward and advantage with dataclasses.replace(sample, ...)"
        require(len(known) > 0, hint)
        for advantage in known:
            require(math.isfinite(advantage), f"an advantage must be a finite number, got {advantage}")
        return self._learner.step(list(groups))


def _check_choices(section: Any, prefix: str = "") -> None:
    """Raise UserError for a value that is not among the names of its field, of nested sections too."""
    for name, hint in get_type_hints(type(section)).items():
        value, place = getattr(section, name), f"{prefix}{name}"
        if dataclasses.is_dataclass(value):
            _check_choices(value, f"{place}.")
            continue
        literals = [each for each in (hint, *get_args(hint)) if get_origin(each) is Literal]
        names = tuple(LOSSES) if place == "algo.loss_type" else sum(map(get_args, literals), ())
        is_known = not literals or isinstance(value, tuple) or value is None or value in names
        there_are = f"{place} must be one of {', '.join(map(str, names))}, got {value!r}"
        require(is_known, there_are + did_you_mean(str(value), map(str, names)))
