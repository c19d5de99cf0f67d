"""Scripts written for TRL run after a change of their import, on a tiny model with local rows.

TRL's source package has no examples/. The scripts in scripts/ have the shapes of those examples, in words of
their own: their fields, data sets, parsers, rewards, tools and environments; those in trl/scripts are of
TRL. OF_TRL says which of TRL's scripts each one stands for, REFUSED what is refused. Hub ids
of models are replaced by a folder; load_dataset, HfApi, loggers and servers by stand-ins. A token in three
of the tiny model's vocabulary is a whole tool call. With TRL's source,

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
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

import tiny_run

HERE = Path(__file__).parent
CHATML = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
OWN = re.compile(r"(?!Model|Script|Dataset)\w+(Config|Trainer)")
CALLS = {
    **{"click": {"bid": "13"}, "noop": {}, "guess": {"guess": "[crane]"}, "move": {"direction": "left"}},
    **{"stay": {}, "place": {"row": 1, "col": 2, "number": 3}, "query": {"sql": "select 1"}},
    **{"bash": {"command": "ls"}, "observe": {}, "lane_change": {"direction": "left"}},
}
NUM_CALLS = 12
SHORT = (
    "--max_steps 2 --max_completion_length 8 --logging_steps 1 --model_name_or_path MODEL --output_dir out "
)
GSM8K = SHORT + "--dataset_name openai/gsm8k --dataset_config main "
PREFERENCES = "--model_name_or_path MODEL --max_steps 2 --logging_steps 1 --use_peft --lora_r 4 "
THINKING = "--model_name_or_path MODEL --dataset_name HuggingFaceH4/Multilingual-Thinking "
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
    "wordle": "",
    "carla": "--env-urls road-1 road-2",
    "catch": "--model MODEL",
    "sudoku": "--use-lora",
    "browser": "",
    "harbor": "",
    "sft_gpt_oss": THINKING
    + "--output_dir oss --packing true packing_strategy wrapped --run_name eager --dtype float32"
    " --attn_implementation eager"
    " --dataset_num_proc 12 --gradient_checkpointing --max_length 256 --per_device_train_batch_size 2"
    " --num_train_epochs 1 --logging_steps 1 --warmup_ratio 0.03 --lr_scheduler_type cosine_with_min_lr"
    ' --report_to trackio --seed 42 --lr_scheduler_kwargs {"min_lr_rate":0.1}',
    "sft_gemma3": "",
    "sft_nemotron": THINKING
    + "--output_dir nemotron --dtype bfloat16 --attn_implementation eager --max_length 128"
    " --per_device_train_batch_size 1"
    " --gradient_accumulation_steps 4 --num_train_epochs 1 --learning_rate 2e-4 --optim paged_adamw_8bit"
    " --logging_steps 10 --report_to trackio --use_peft --lora_r 8 --lora_alpha 16"
    " --lora_target_modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "sft_tools": "",
    "trl/scripts/grpo.py": SHORT + "--dataset_name trl-lib/DeepMath-103K --use_peft --push_to_hub True"
    " --lora_r 4 --reward_funcs think_format_reward get_soft_overlong_punishment",
    "trl/scripts/sft.py": "--model_name_or_path MODEL --output_dir out --dataset_name trl-lib/Capybara"
    " --num_train_epochs 0.5 --per_device_train_batch_size 4 --packing --max_length 256 --use_peft --lora_r 4"
    " --eval_strategy steps --eval_steps 1 --logging_steps 1 --push_to_hub True --report_to none",
    "trl/scripts/dpo.py": PREFERENCES + "--dataset_name trl-lib/ultrafeedback_binarized --output_dir dpo"
    " --eval_strategy steps --eval_steps 2 --precompute_ref_log_probs True --learning_rate 5e-6",
    "trl/scripts/kto.py": PREFERENCES + "--dataset_name trl-lib/kto-mix-14k --output_dir kto",
}
"""Arguments by the script's name; MODEL stands for the tiny model's folder."""
REFUSED = {
    "nemo_gym": ("", "rollout_func is not supported"),
    "maxrl": (SHORT, "scale_rewards must be one of group, batch, none, got mean"),
    "trl/scripts/dpo.py images": (
        PREFERENCES + "--dataset_name HuggingFaceH4/rlaif-v_formatted --output_dir dpo",
        "train_dataset has a column 'images': vision models are not supported",
    ),
    "grpo_images": (SHORT, "train_dataset has a column 'image': vision models are not supported"),
    "browser images": (
        "--images",
        "the tool (click|noop) returned a block of type image: only texts",
    ),
    "sft_images": ("", "data_collator is not supported"),
    "sft_images prepared": ("--skip-prepare", "dataset_kwargs = .* is not supported"),
}
"""Arguments, and the line with which a script ends."""
OF_TRL = {
    "grpo_2048": "game",
    "grpo_agent": "agent",
    "gspo": "gspo",
    "maxrl": "maxrl",
    "openenv/browsergym_llm": "browser",
    "openenv/carla": "carla",
    "openenv/catch": "catch",
    "openenv/echo": "echo",
    "openenv/multi_env": "multi_game",
    "openenv/sudoku": "sudoku",
    "openenv/wordle": "wordle",
    "harbor/data_agent": "harbor",
    "nemo_gym/train_multi_environment": "nemo_gym",
    "sft": "trl/scripts/sft.py",
    "sft_gpt_oss": "sft_gpt_oss",
    "sft_gemma3": "sft_gemma3",
    "sft_nemotron_3": "sft_nemotron",
    "sft_tiny_aya_tool_calling": "sft_tools",
    "dpo": "trl/scripts/dpo.py",
    "trl/scripts/grpo.py": "trl/scripts/grpo.py",
}
"""TRL's example scripts without images of GRPOTrainer, SFTTrainer and DPOTrainer, by what stands for each."""
WITH_IMAGES = {
    **dict.fromkeys(("grpo_vlm", "gspo_vlm"), "grpo_images"),
    **dict.fromkeys(("openenv/browsergym", "openenv/carla_vlm", "openenv/carla_vlm_gemma"), "browser images"),
    **dict.fromkeys(("sft_vlm_smol_vlm",), "sft_images"),
    **dict.fromkeys(("sft_vlm", "sft_vlm_gemma3", "sft_video_llm"), "sft_images prepared"),
    **dict.fromkeys(("dpo_vlm", "mpo_vlm"), "trl/scripts/dpo.py images"),
}
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
    "open-r1/codeforces-cots": [
        {
            "prompt": "x",
            "id": i,
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
        }
        for i in range(24)
    ],
    "HuggingFaceH4/Multilingual-Thinking": [
        {
            "reasoning_language": "German",
            "messages": [
                {"role": "user", "content": row["question"], "thinking": None},
                {"role": "assistant", "content": row["answer"], "thinking": "Hm."},
            ],
        }
        for row in QUESTIONS
    ],
    "bebechien/SimpleToolCalling": [
        {"tool_name": "search", "tool_arguments": '{"query": "a"}', "user_content": f"Find {i}."}
        for i in range(24)
    ],
    "trl-lib/ultrafeedback_binarized": [
        {
            "chosen": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": "Yes."},
            ],
            "rejected": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "?"}],
            "score_chosen": 9.0,
        }
        for row in QUESTIONS
    ],
    "trl-lib/kto-mix-14k": [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": "Yes." if i % 2 else "?"}],
            "label": bool(i % 2),
        }
        for i, row in enumerate(QUESTIONS)
    ],
    "HuggingFaceH4/rlaif-v_formatted": [
        {"prompt": "x", "chosen": "a", "rejected": "b", "images": ["c"]} for _ in range(24)
    ],
    "mixed/tasks": [{"prompt": f"Task {i}:", "task": ("math", "code")[i % 2]} for i in range(24)],
}


def changed_import(source, model):
    """Return the script with the trainers and configs of qerl.trl and a local model."""

    def split(match):
        names = re.findall(r"\w+", match[2])
        ours, theirs = ([n for n in names if bool(OWN.fullmatch(n)) is own] for own in (True, False))
        lines = [f"from qerl.trl import {', '.join(ours)}"] * bool(ours)
        lines += [f"from trl import {', '.join(theirs)}"] * bool(theirs)
        return "\n".join(match[1] + line for line in lines)

    source = re.sub(r"^( *)from trl import (\([^)]*\)|[^\n]*)", split, source, flags=re.M)
    source = source.replace('"google/gemma-3-12b-it"', repr(f"{model}/gemma3"))
    return re.sub(r'"(Qwen|CohereLabs)/[^"]*"', repr(model), source)


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


class SilentLogger(types.ModuleType):
    """The module trackio, of which a run calls init, log and finish."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: self


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
    sys.modules["trackio"] = SilentLogger("trackio")
    sys.path.insert(0, str(HERE / "scripts"))
    os.chdir(folder)
    script = folder / "script.py"
    script.write_text(changed_import(source, model))
    sys.argv = [str(script), *(model if a == "MODEL" else a for a in arguments)]
    runpy.run_path(str(script), run_name="__main__")


def write_model(folder):
    vocab_size = 258 + NUM_CALLS * len(CALLS)
    tiny_run.write_model(folder, ff_width=128, max_positions=1024, vocab_size=vocab_size)
    (folder / "chat_template.jinja").write_text(CHATML)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    calls = [json.dumps({"name": name, "arguments": given}) for name, given in CALLS.items()]
    spaces = [" " * n for n in range(1, NUM_CALLS + 1)]
    tokenizer.add_tokens([f"<tool_call>{space}{call}</tool_call>" for call in calls for space in spaces])
    tokenizer.save_pretrained(folder)
    write_gemma3(folder / "gemma3", tokenizer, vocab_size)
    return str(folder)


def write_gemma3(folder, tokenizer, vocab_size):
    text = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    text |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": vocab_size}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=0)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def finished(name, arguments, model, folder):
    """Run the script and return (exit code, stdout, stderr)."""
    trl = pytest.importorskip("trl")
    is_trls = name.startswith("trl/")
    path = (
        Path(trl.__file__).parents[1] / name.split()[0]
        if is_trls
        else HERE / "scripts" / f"{name.split()[0]}.py"
    )
    process = tiny_run.Forked(lambda: run(path.read_text(), arguments.split(), model, folder))
    return process.communicate(timeout=240), process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_script_runs_with_its_import_changed(name, model, tmp_path):
    (out, errors), code = finished(name, RUNS[name], model, tmp_path)
    assert code == 0, errors[-3000:]
    folder = Path(model) if name == "sft_gemma3" else tmp_path
    (metrics,) = (path for path in folder.glob("**/metrics.jsonl") if "checkpoints" not in path.parts)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert steps and all("loss" in step or step["trained_samples"] >= 0 for step in steps)
    pushes = "--push_to_hub" in RUNS[name] or name in ("qlora_notebook", "sft_gemma3", "sft_tools")
    assert ("pushed" in out) == pushes
    assert sum(step.get("num_failed_episodes", 0) for step in steps) == 0


@pytest.mark.slow
def test_trls_own_script_trains_on_a_reward_that_compares_the_samples_of_a_group(model, tmp_path):
    arguments = SHORT + "--dataset_name trl-lib/DeepMath-103K --use_peft --lora_r 4 --num_generations 4"
    arguments += " --reward_funcs group_rewards.longest_of_group"
    (_, errors), code = finished("trl/scripts/grpo.py", arguments, model, tmp_path)
    assert code == 0, errors[-3000:]
    (path,) = (each for each in tmp_path.glob("**/samples.jsonl") if "checkpoints" not in each.parts)
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    for start in range(0, len(samples), 4):
        lengths = [len(sample["text"]) for sample in samples[start : start + 4]]
        expected = [float(length == max(lengths)) for length in lengths]
        assert [sample["reward"] for sample in samples[start : start + 4]] == expected
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}  # each sample alone is the longest


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_cannot_run_is_refused_in_one_line(name, model, tmp_path):
    arguments, message = REFUSED[name]
    (_, errors), code = finished(name, arguments, model, tmp_path)
    last = errors.strip().splitlines()[-1]
    assert code != 0 and re.search(rf"(UserError|ImportError): .*{message}", last), errors[-2000:]


def test_trls_scripts_run_or_are_refused():
    runs = [name for name, own in OF_TRL.items() if own in RUNS]
    assert len(runs) == 18 and {*OF_TRL.values()} <= {*RUNS, *REFUSED}
    assert {*WITH_IMAGES.values()} <= {*REFUSED}


if __name__ == "__main__":
    script = Path(sys.argv[1])
    run(script.read_text(), sys.argv[2:], write_model(Path("tiny-model").resolve()), Path.cwd())
