import re

import pytest

from qerl.cli.arguments import check_options
from qerl.cli.foreign_options import FOREIGN
from qerl.cli.help import options_of
from qerl.cli.main import command
from qerl.cli.sft import SftOptions
from qerl.config import RunConfig
from qerl.config.options import ExportOptions
from qerl.errors import UserError

SHORT = {"--model", "--task", "--reward", "--nproc-per-node", "--push-to-hub"}


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--bf16", "--model.dtype bf16"),
        ("--use_vllm", "nothing: the sampler is part of the run"),
        ("--per-device-train-batch-size=4", "--num-prompts"),
        ("--gpu", "CUDA_VISIBLE_DEVICES"),
        ("--max_completion_length", "--sample.max-tokens"),
        ("--no-gradient-checkpointing", "--learn.gradient-checkpointing"),
    ],
)
def test_an_option_of_trl_or_vllm_is_answered_with_ours(option, ours):
    with pytest.raises(
        UserError, match=f"^unknown option {option.partition('=')[0].replace('_', '-')}; here"
    ) as e:
        check_options(RunConfig, [option])
    assert ours in str(e.value)


def test_every_answer_names_options_that_there_are():
    known = {f"--{option.name}" for kind in (RunConfig, SftOptions) for option in options_of(kind)} | SHORT
    for option, answer in FOREIGN.items():
        named = set(re.findall(r"--[a-z][a-z0-9.-]*", answer))
        assert named <= known, option
        assert named or answer.startswith(("nothing: ", "the environment variable ")), option


def test_gguf_is_answered_with_the_form_that_llama_cpp_reads():
    with pytest.raises(UserError, match="--as gguf-ready writes what"):
        command(["export", "run", "out", "--as", "gguf"])


def test_a_command_without_our_option_does_not_name_it():
    with pytest.raises(UserError) as error:
        check_options(ExportOptions, ["--lora-alpha"])
    assert "--adapter.alpha" not in str(error.value)
