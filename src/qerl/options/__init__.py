"""What the commands other than train can be told."""

from qerl.options.bench import (
    BenchDecodeOptions,
    BenchLearnOptions,
    BenchLinearOptions,
    BenchParityOptions,
    BenchStepOptions,
    BenchTileOptions,
    memory_options,
)
from qerl.options.commands import (
    STUDY_NAMES,
    EvalOptions,
    ExportOptions,
    GenerateOptions,
    PlanOptions,
    QuantizeOptions,
    ReportOptions,
    ServeOptions,
    StudyOptions,
    WatchOptions,
    of_run,
    paper_sampling,
)

__all__ = [
    "STUDY_NAMES",
    "BenchDecodeOptions",
    "BenchLearnOptions",
    "BenchLinearOptions",
    "BenchParityOptions",
    "BenchStepOptions",
    "BenchTileOptions",
    "EvalOptions",
    "ExportOptions",
    "GenerateOptions",
    "PlanOptions",
    "QuantizeOptions",
    "ReportOptions",
    "ServeOptions",
    "StudyOptions",
    "WatchOptions",
    "memory_options",
    "of_run",
    "paper_sampling",
]
