"""Train a model on GSM8K with a reward of three lines, and print what it gained on held-out problems.

    python examples/gsm8k.py                        # Qwen2.5-1.5B-Instruct, rows from the hub, one GPU
    python examples/gsm8k.py --rows train.jsonl     # rows of a file, with the columns question and answer
    python examples/gsm8k.py --model smollm2-135m-instruct --steps 2 --prompts 2 --samples 4 --max-tokens 64 \
        --evaluate 8                                # that it runs, on a CPU; so small a model learns little

The run's folder has the samples, the adapter and a page: `qerl watch runs/gsm8k-example`. Ctrl-C saves the
step, and the same command goes on from it.
"""

import argparse
import re

import qerl
from qerl import config

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Braces name columns of the rows.
TEMPLATE = "{question}\n\nReason step by step, and end with the number that answers the question."


def is_right(completions, answer, **columns):
    """Return 1 for each reply whose last number is the row's, else 0.

    The signature is TRL's: completions are lists of messages, and each column of the rows is a list with one
    entry a sample. A row's answer ends in its number, here "18", in the file "... #### 18"."""
    numbers = [NUMBER.findall(messages[-1]["content"].replace(",", "")) for messages in completions]
    right = [float(text.split()[-1].replace(",", "")) for text in answer]
    return [float(found != [] and float(found[-1]) == r) for found, r in zip(numbers, right, strict=True)]


def run_config(options: argparse.Namespace) -> qerl.RunConfig:
    """Return the settings of the run; all that is not set has its default (docs/config.md)."""
    is_hub = options.rows == "gsm8k"
    return qerl.RunConfig(
        out=options.out,
        num_steps=options.steps,
        # One step: prompts x samples. Samples are compared within the group of their prompt, so a group
        # teaches something only if its rewards differ.
        num_prompts=options.prompts,
        num_generations=options.samples,
        model=config.ModelConfig(path=options.model),  # frozen, in NVFP4
        adapter=config.AdapterConfig(rank=32),  # what is learned
        task=config.TaskConfig(
            name=options.rows,
            template=TEMPLATE,
            # From the hub: the test split. Of a file: its last rows.
            held_out_split="test" if is_hub else None,
        ),
        sample=config.SampleConfig(max_tokens=options.max_tokens),
        noise=config.NoiseConfig(schedule="none"),
        algo=config.AlgoConfig(loss_type="dapo"),
        learn=config.LearnConfig(learning_rate=options.learning_rate),
        # A reward of one's own has an accuracy only with a threshold.
        evaluate=config.EvalConfig(num_prompts=options.evaluate, success_threshold=1.0),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rows", default="gsm8k", help="gsm8k: from the hub; or a .jsonl, .parquet or .csv file"
    )
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct", help="folder, .gguf file or hub id")
    parser.add_argument("--out", default="runs/gsm8k-example", help="the run's folder")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest sample")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="5e-5 suits 0.5B to 1.5B")
    parser.add_argument("--evaluate", type=int, default=256, help="held-out problems, before and after")
    return parser.parse_args()


# The reward runs in processes of its own, which import this file: hence the guard.
if __name__ == "__main__":
    result = qerl.train(run_config(parse()), rewards=[is_right])
    for moment in ("before", "after"):
        if f"accuracy_{moment}" in result:
            print(f"held-out accuracy {moment}: {result[f'accuracy_{moment}']:.3f}")
    print(f"qerl export {result['run']} {result['run']}-adapter    # writes the adapter")
