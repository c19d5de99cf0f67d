"""The teacher of a distillation: a model in this process. An endpoint is in teacher_endpoint.py.

    an adapter         active on the student's own base, of which there is one copy
    the same model     the student's base without its adapter, likewise
    another model      a decoder of its own, frozen, in its own format
    a URL              an endpoint

A teacher says how likely each sampled token is to it and, for a divergence, which tokens are most likely. It
must have the student's vocabulary.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.algo.distillation import MIN_LOGPROB
from qerl.config import DistilConfig, RunConfig
from qerl.engine.paged_engine import PagedEngine
from qerl.errors import require
from qerl.kernels.head.divergence import top_outcomes
from qerl.learner.checkpoint import OPTIMIZER, adapter_folder
from qerl.learner.forward import head_of, packed_hidden
from qerl.learner.minibatch import MinibatchPart
from qerl.learner.oom_retry import OomRetry
from qerl.learner.packing import PackedBatch
from qerl.models.checkpoint.encoding import SCALES
from qerl.models.checkpoint.source import Checkpoint, ModelSource, locate
from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from qerl.models.decoder import Decoder
from qerl.models.device import COMPUTE
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import OtherAdapter, adapter_off
from qerl.models.peft.peft_reader import ADAPTER_CONFIG, adapter_config, read_adapter
from qerl.models.policy_model import PolicyModel
from qerl.models.quantize.quantization_check import check_quantization
from qerl.tasks.scoring import Failure
from qerl.tasks.sources import file_digest
from qerl.training.rollouts.teacher_endpoint import EndpointTeacher, check_vocabulary
from qerl.types import Group, RolloutEngine, TeacherLogprobs

Scores = list[list[TeacherLogprobs | Failure]]
"""Logprobs, or the failure, of each sample of each group."""
_DESCRIPTIONS = ADAPTER_CONFIG, "config.json"
Policy = Callable[[], contextlib.AbstractContextManager[Decoder]]
"""Yields the decoder with the teacher's weights and adapter."""
_ADVICE = "set --distil.format fp8 or bf16, or give a teacher from: qerl quantize --calibrate gptq"


class Teacher(Protocol):
    def score(self, groups: list[Group]) -> Scores: ...

    def engine(self) -> contextlib.AbstractContextManager[RolloutEngine]:
        """Yield what samples from the teacher."""
        ...


def load_teacher(
    config: RunConfig, student: Decoder, tokenizer: PreTrainedTokenizerBase, notice: Callable[[str], None]
) -> Teacher:
    """Load config.distil.teacher; raise UserError if it has another vocabulary than the student."""
    distil = config.distil
    if distil.is_endpoint:
        return EndpointTeacher(distil, tokenizer, vocab_size=student.architecture.vocab_size)
    policy = _policy(config, student, tokenizer)
    return LocalTeacher(policy, config, student, tokenizer, notice)


def teacher_sources(distil: DistilConfig) -> dict[str, str]:
    """Return {"teacher runs/demo": SHA-256} of the weights of a teacher in this process and of the files that
    describe them; {} without one. An endpoint's cannot be read."""
    if not distil.is_on or distil.is_endpoint:
        return {}
    place = adapter_folder(distil.teacher) or locate(distil.teacher).path
    paths = [*map(place.joinpath, _DESCRIPTIONS), *sorted(place.glob("*.safetensors"))]
    files = [place] if place.is_file() else [path for path in paths if path.name != OPTIMIZER]
    digests = [f"{file.name} {file_digest(file)}" for file in files if file.is_file()]
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return {f"teacher {distil.teacher}": digest}


def teacher_checkpoint(config: RunConfig) -> list[tuple[Checkpoint, str]]:
    """Return the teacher's own checkpoint and its format; [] for an adapter, a URL or the student's base."""
    distil = config.distil
    if not distil.is_on or distil.is_endpoint or adapter_folder(distil.teacher) is not None:
        return []
    source = locate(distil.teacher)
    return [] if _is_base(config, source) else [(source.open(), _format(config))]


def _is_base(config: RunConfig, source: ModelSource) -> bool:
    """True if the teacher is the student's base without its adapter, in the same format."""
    shares = config.adapter.kind == "lora" and _format(config) == config.model.format
    return shares and source == locate(config.model.path)


def _policy(config: RunConfig, student: Decoder, tokenizer: PreTrainedTokenizerBase) -> Policy:
    distil, model = config.distil, config.model
    folder = adapter_folder(distil.teacher)
    if folder is not None:
        is_lora = config.adapter.kind == "lora"
        require(is_lora, "a teacher that is an adapter needs adapter.kind lora: its base must stay as it is")
        settings = adapter_config(str(folder))
        return OtherAdapter(student, settings, read_adapter(str(folder), settings)).active
    source = locate(distil.teacher)
    check_vocabulary(tokenizer, load_tokenizer(distil.teacher), distil.teacher)
    if _is_base(config, source):
        return partial(_without_adapter, student)
    device = torch.device(model.device)
    decoder = build_decoder(
        source.open(device),
        format=_format(config),
        compute=COMPUTE[model.dtype],
        device=device,
        resident=model.operand == "resident",
        scales=SCALES[model.block_scales],
    )
    return lambda: contextlib.nullcontext(decoder)


def _format(config: RunConfig) -> str:
    return config.distil.format or config.model.format


def check_teacher(
    teacher: Teacher | None, config: RunConfig, student: PolicyModel, prompts: Sequence[Sequence[int]]
) -> str | None:
    """Return the line of `check_quantization` about a teacher with a decoder of its own; else None."""
    if not isinstance(teacher, LocalTeacher):
        return None
    path = config.distil.teacher
    with teacher.policy() as decoder:
        if decoder is student:
            return None
        line = check_quantization(decoder, path, _format(config), prompts, advice=_ADVICE)
    return None if line is None else f"teacher {path}: {line}"


@contextlib.contextmanager
def _without_adapter(decoder: Decoder) -> Iterator[Decoder]:
    with adapter_off(decoder):
        yield decoder


class LocalTeacher:
    """A model in this process."""

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        student: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        notice: Callable[[str], None],
    ):
        self.policy, self._config, self._tokenizer = policy, config, tokenizer
        self._device, self._vocab_size = student.device, student.architecture.vocab_size
        self._oom_retry = OomRetry(config.learn.microbatch_tokens, student.device, notice)

    def score(self, groups: list[Group]) -> Scores:
        samples = [sample for group in groups for sample in group.samples_G]
        if not samples:
            return [[] for _ in groups]
        part = MinibatchPart([(group, [1.0] * len(group.samples_G)) for group in groups], self._device)
        with torch.no_grad(), self.policy() as decoder:
            score_batch = partial(self._score_batch, decoder)
            scores = iter(self._oom_retry.run(part, lambda batches: [*chain(*map(score_batch, batches))]))
        return [[_finite(next(scores)) for _ in group.samples_G] for group in groups]

    def _score_batch(self, decoder: Decoder, batch: PackedBatch) -> Iterator[TeacherLogprobs]:
        config = self._config
        head = head_of(
            decoder, temperature=config.sample.temperature, chunk_tokens=config.learn.logprob_chunk_tokens
        )
        # tables may have more rows than the vocabulary has tokens, and not the same number
        num_common = min(self._vocab_size, head.operand.shape[0])
        head = head._replace(operand=head.operand_VD[:num_common])
        outcomes = top_outcomes(
            packed_hidden(decoder, batch),
            batch.source_rows_C,
            batch.targets_C.clamp(max=num_common - 1),
            head,
            top_k=config.distil.top_k if config.distil.is_divergence else 1,
            min_logprob=MIN_LOGPROB,
        )
        logprob_C = torch.where(batch.targets_C < num_common, outcomes.logprob_C, MIN_LOGPROB)
        lengths = batch.spans.lengths_S.tolist()
        for own_C, ids_CK, outcomes_CX in zip(
            *(t.cpu().split(lengths) for t in (logprob_C, outcomes.ids_CK, outcomes.logprobs_CX)), strict=True
        ):
            yield TeacherLogprobs(own_C, *((ids_CK, outcomes_CX) if config.distil.is_divergence else ()))

    @contextlib.contextmanager
    def engine(self) -> Iterator[RolloutEngine]:
        with self.policy() as decoder:
            stop_ids = stop_token_ids(self._tokenizer, locate(self._config.model.path))
            yield PagedEngine(decoder, self._tokenizer, self._config.engine, stop_token_ids=stop_ids)


def _finite(logprobs: TeacherLogprobs) -> TeacherLogprobs | Failure:
    tensors: list[Tensor | None] = [logprobs.logprob_C, logprobs.outcomes_CX]
    if all(t is None or bool(t.isfinite().all()) for t in tensors):
        return logprobs
    return Failure("not a number", "the teacher's logprobs are not finite")
