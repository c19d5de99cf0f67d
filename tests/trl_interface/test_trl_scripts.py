"""Scripts written for TRL run after a change of their import, on a tiny model with local rows.

TRL's source package has no examples/. The scripts in scripts/ have the shapes of those examples, in words of
their own: their fields, data sets, parsers, rewards, tools and environments; trl/scripts/grpo.py and sft.py
are of TRL. A script's hub ids of models are replaced by a folder, load_dataset and HfApi by stand-ins. With
TRL's source,

    python tests/trl_interface/test_trl_scripts.py CHECKOUT/examples/scripts/grpo_agent.py --max_steps 2 ...

runs a script of it in the same way, in the current folder.
"""

import json
import os
import re
import runpy
import sys
import types
import warnings
from pathlib import Path

import datasets
import huggingface_hub
import pytest

import tiny_run

HERE = Path(__file__).parent
CHATML = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
OWN = "GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer"
SHORT = (
    "--max_steps 2 --max_completion_length 8 --logging_steps 1 --model_name_or_path MODEL --output_dir out "
)
GSM8K = SHORT + "--dataset_name openai/gsm8k --dataset_config main "
RUNS = {
    "gsm8k": GSM8K + "--learning_rate 1e-5",
    "gsm8k peft": GSM8K + "--use_peft --lora_r 4 --eval_strategy steps --eval_steps 1 --push_to_hub True"
    " --loss_type sapo --report_to tensorboard",
    "gspo": SHORT + "--use_peft --lora_target_modules q_proj v_proj --importance_sampling_level sequence"
    " --epsilon 3e-4 --epsilon_high 4e-4 --loss_type grpo --steps_per_generation 2 --num_generations 4"
    " --load_in_4bit --bnb_4bit_quant_type nf4",
    "agent": SHORT + "--use_vllm True --vllm_mode colocate --log_completions True",
    "cispo": SHORT + "--loss_type cispo --epsilon_high 5.0 --lr_scheduler_type cosine --save_strategy epoch",
    "multi_game": "--size 6",
    "deepmath": "",
    "game": "",
    "echo": "",
    "own_data": "",
    "qlora_notebook": "",
    "lora_notebook": "",
    "stream": "",
    "kl_notebook": "",
    "continue_peft": "--steps 2",
    "trl/scripts/grpo.py": SHORT + "--dataset_name trl-lib/DeepMath-103K --use_peft --push_to_hub True"
    " --lora_r 4 --reward_funcs think_format_reward get_soft_overlong_punishment",
    "trl/scripts/sft.py": "--model_name_or_path MODEL --output_dir out --dataset_name trl-lib/Capybara"
    " --num_train_epochs 0.5 --per_device_train_batch_size 4 --packing --max_length 256 --use_peft --lora_r 4"
    " --eval_strategy steps --eval_steps 1 --logging_steps 1 --push_to_hub True --report_to none",
}
"""Arguments by the script's name; MODEL stands for the tiny model's folder."""
QUESTIONS = [{"question": f"Does {i} and {i} make {2 * i}?", "answer": f"so #### {2 * i}"} for i in range(24)]
ROWS = {
    "openai/gsm8k": QUESTIONS,
    "genes/questions": [row | {"answer": "yes"} for row in QUESTIONS],
    "AI-MO/NuminaMath-TIR": [{"problem": row["question"], "solution": "2"} for row in QUESTIONS],
    "trl-lib/tldr": [{"prompt": f"Text {i} TL;DR:", "completion": "x"} for i in range(24)],
    "trl-lib/DeepMath-103K": [
        {"prompt": [{"role": "user", "content": row["question"]}], "solution": "2"} for row in QUESTIONS
    ],
    "trl-lib/Capybara": [
        {
            "messages": [
                {"role": r, "content": row[k]} for r, k in (("user", "question"), ("assistant", "answer"))
            ]
        }
        for row in QUESTIONS
    ],
    "mixed/tasks": [{"prompt": f"Task {i}:", "task": ("math", "code")[i % 2]} for i in range(24)],
}


def changed_import(source, model):
    """Return the script with the trainers and configs of qerl.trl and a local model."""

    def split(match):
        names = re.findall(r"\w+", match[2])
        ours, theirs = ([n for n in names if (n in OWN) is own] for own in (True, False))
        lines = [f"from qerl.trl import {', '.join(ours)}"] * bool(ours)
        lines += [f"from trl import {', '.join(theirs)}"] * bool(theirs)
        return "\n".join(match[1] + line for line in lines)

    source = re.sub(r"^( *)from trl import (\([^)]*\)|[^\n]*)", split, source, flags=re.M)
    return re.sub(r'"Qwen/[^"]*"', repr(model), source)


def load_dataset(path, name=None, *, split=None, streaming=False, **options):
    """Take the place of datasets.load_dataset, with the rows above."""
    whole = datasets.Dataset.from_list(ROWS[path])
    made = {"train": whole.select(range(16)), "test": whole.select(range(16, 24))}
    if split is None:
        return datasets.DatasetDict(made)
    if isinstance(split, list):
        return [load_dataset(path, split=one) for one in split]
    rows = made[split.partition("[")[0]]
    return rows.to_iterable_dataset() if streaming else rows


class SilentHub:
    def __init__(self, token=None): ...

    def create_repo(self, repo_id, **options):
        return types.SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path, **options):
        print("pushed", sorted(file.name for file in Path(folder_path).iterdir()))


def run(source, arguments, model, folder):
    """Run the script in this process, in the folder."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    datasets.load_dataset, huggingface_hub.HfApi = load_dataset, SilentHub
    os.chdir(folder)
    script = folder / "script.py"
    script.write_text(changed_import(source, model))
    sys.argv = [str(script), *(model if a == "MODEL" else a for a in arguments)]
    runpy.run_path(str(script), run_name="__main__")


def write_model(folder):
    tiny_run.write_model(folder, ff_width=128, max_positions=1024)
    (folder / "chat_template.jinja").write_text(CHATML)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs_with_its_import_changed(name, model, tmp_path):
    trl = pytest.importorskip("trl")
    is_trls = name.startswith("trl/")
    path = Path(trl.__file__).parents[1] / name if is_trls else HERE / "scripts" / f"{name.split()[0]}.py"
    process = tiny_run.Forked(lambda: run(path.read_text(), RUNS[name].split(), model, tmp_path))
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert steps and all("loss" in step or step["trained_samples"] >= 0 for step in steps)
    assert ("pushed" in out) == ("--push_to_hub" in RUNS[name] or name == "qlora_notebook")


if __name__ == "__main__":
    script = Path(sys.argv[1])
    run(script.read_text(), sys.argv[2:], write_model(Path("tiny-model").resolve()), Path.cwd())
