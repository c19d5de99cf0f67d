"""On-policy distillation: the teacher, and what the student learns from it."""

import dataclasses
from typing import Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.config.conflicts import check_conflicts
from qerl.config.task import ROW_FILES
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistilConfig:
    """A run with an empty `teacher` learns from rewards; `qerl distil` needs a teacher."""

    teacher: str = ""
    """A PEFT adapter of the student's own base (a checkpoint of a run, or the run), which shares the base's
    weights; another model; or the URL of an OpenAI-compatible endpoint that echoes prompt logprobs, such as
    http://127.0.0.1:8000/v1."""

    format: Literal["nvfp4", "mxfp4", "nf4", "fp8", "fp8-flow", "int8", "bf16"] | None = None
    """Format of another model's linear weights; None: model.format."""

    loss: Literal["policy_gradient", "forward_kl", "reverse_kl", "jsd"] = "policy_gradient"
    """policy_gradient: the advantage of each sampled token is the teacher's logprob less the student's, in
    the loss of algo.loss_type. The others are divergences over the teacher's most likely tokens: KL(teacher,
    student), KL(student, teacher), or the generalized Jensen-Shannon divergence of both (GKD)."""

    jsd_beta: float = 0.5
    """jsd: the teacher's share of the mixture; towards 0 the loss is forward_kl's, towards 1 reverse_kl's,
    times beta (1 - beta)."""

    top_k: int = 20
    """Divergences: number of the teacher's most likely tokens at each position; all other tokens together are
    one more outcome."""

    off_policy_share: float = 0.0
    """Divergences: share of the step's samples that are rows of `data` instead (GKD's 1 - lambda)."""

    data: str = ""
    """Rows for off_policy_share, as those of `qerl sft`: a .jsonl, .json, .parquet or .csv file, or a hub
    id."""

    split: str = "train"
    """Split of a hub data set in `data`."""

    endpoint_model: str | None = None
    """Name of the model in requests to an endpoint; None: the first that it lists."""

    timeout_s: float = 60.0
    """Longest wait for one answer of an endpoint."""

    retries: int = 3
    """Number of times that a request to an endpoint is repeated, with growing pauses, before its sample is
    left out of the loss."""

    max_concurrent: int = 8
    """Number of requests to an endpoint at once."""

    def __post_init__(self):
        check_positive(self, "top_k", "timeout_s", "max_concurrent", prefix="distil.")
        check_not_negative(self, "retries", prefix="distil.")
        beta, share = self.jsd_beta, self.off_policy_share
        require(0 < beta < 1, f"distil.jsd_beta must be between 0 and 1, got {beta}")
        require(0 <= share <= 1, f"distil.off_policy_share must be in [0, 1], got {share}")
        check_conflicts(self, "distil")

    @property
    def is_on(self) -> bool:
        return self.teacher != ""

    @property
    def is_file(self) -> bool:
        """True if `data` is a file, which has no splits."""
        return self.data.endswith(ROW_FILES)

    @property
    def is_divergence(self) -> bool:
        return self.loss != "policy_gradient"

    @property
    def is_endpoint(self) -> bool:
        return self.teacher.startswith(("http://", "https://"))
