"""GRPO and DAPO with quantization noise, the whole loop in one file: train a 135M model in 4 bits to add.

    python examples/rl_loop.py                    # 5 steps, about a minute on two CPU cores
    python examples/rl_loop.py --loss dapo --max-rounds 3 --steps 40

    problems --> groups of samples --> rewards --> advantages --> update of the adapter --> publish
                 (noise in the norms)

Change what a study is about: `problems`, `reward`, `advantages`, `sigma`, the loss, and which groups are
learned from. `qerl train` makes the same steps, bit for bit (tests/test_rl_loop.py), and adds what a long run
needs: checkpoints, evaluation, rewards in their own processes, a report.

Shapes in names: P prompts of a step, G samples of a prompt.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import reasoning_gym

import qerl
from qerl import config

# AQN, arXiv 2510.11696: noise in the RMSNorm weights of the sampling policy, smaller in each stage.
NUM_STAGES = 10
SIGMA_START, SIGMA_END = 3e-2, 1.5e-3  # of each norm's RMS

Problems = Callable[[int, int], list[qerl.Prompt]]
"""(step, round) -> the prompts of that round."""


def problems(policy: qerl.Policy, options: argparse.Namespace) -> Problems:
    """Return sums of two numbers of one or two digits, others in each step and round."""
    per_step = options.prompts * options.max_rounds
    rows = reasoning_gym.create_dataset(
        "basic_arithmetic",
        seed=options.seed,
        size=per_step * options.steps,
        operators=["+"],
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=2,
        allow_parentheses=False,
        allow_negation=False,
    )

    def prompts(step: int, round: int) -> list[qerl.Prompt]:
        first = step * per_step + round * options.prompts
        return [prompt(index) for index in range(first, first + options.prompts)]

    def prompt(index: int) -> qerl.Prompt:
        question = f"What is {rows[index]['metadata']['expression']}? Answer with just the number."
        messages = [{"role": "user", "content": question}]
        return policy.prompt(messages, index=index, answer=rows[index]["answer"])

    return prompts


def reward(prompt: qerl.Prompt, sample: qerl.Sample) -> float:
    """Return 1 if the last number in the text is the answer, else 0."""
    return float(re.findall(r"-?\d+", sample.text)[-1:] == [prompt.columns["answer"]])


def advantages(rewards_G: list[float]) -> list[float]:
    """Return how much better each sample is than its group, in standard deviations (GRPO)."""
    if max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)  # no gradient
    mean, scale = fmean(rewards_G), stdev(rewards_G) + 1e-4
    return [(reward - mean) / scale for reward in rewards_G]


def scored(group: qerl.Group) -> qerl.Group:
    """Return the group with the reward and the advantage of each sample."""
    rewards_G = [reward(group.prompt, sample) for sample in group.samples_G]
    triples = zip(group.samples_G, rewards_G, advantages(rewards_G), strict=True)
    return replace(group, samples_G=[replace(s, reward=r, advantage=a) for s, r, a in triples])


def is_informative(group: qerl.Group) -> bool:
    return any(sample.advantage != 0 for sample in group.samples_G)


def sigma(step: int, num_steps: int) -> float:
    """Return the noise of a step: none in the first stage, then from SIGMA_START down to SIGMA_END."""
    num_stages = max(2, min(NUM_STAGES, num_steps))
    stage = step * num_stages // num_steps
    if stage == 0:
        return 0.0
    fraction = (stage - 1) / max(1, num_stages - 2)
    return SIGMA_START ** (1.0 - fraction) * SIGMA_END**fraction


def sampled(
    policy: qerl.Policy, prompts: Problems, step: int, options: argparse.Namespace
) -> list[qerl.Group]:
    """Return the groups to learn from. With one round these are all; with more only those whose rewards
    differ, until there are enough (DAPO's dynamic sampling)."""
    kept_P: list[qerl.Group] = []
    groups_P: list[qerl.Group] = []
    for round in range(options.max_rounds):
        groups_P = policy.generate(prompts(step, round), num_generations=options.samples, step=step)
        groups_P = [scored(group) for group in groups_P]
        if options.max_rounds == 1:
            return groups_P
        kept_P = [*kept_P, *filter(is_informative, groups_P)][: options.prompts]
        if len(kept_P) == options.prompts:
            break
    return kept_P or groups_P


def train(
    policy: qerl.Policy, learner: qerl.PolicyLearner, prompts: Problems, options: argparse.Namespace
) -> Iterator[dict[str, float]]:
    """Make the steps; yield the metrics of each (docs/metrics.md)."""
    for step in range(options.steps):
        start_s, noise = time.perf_counter(), sigma(step, options.steps)
        with policy.noise(noise, step=step, unit="relative"):
            groups_P = sampled(policy, prompts, step, options)
        metrics = learner.step(groups_P)
        policy.publish(learner.version)
        samples = [sample for group in groups_P for sample in group.samples_G]
        num_tokens, took_s = sum(len(s.tokens_T) for s in samples), time.perf_counter() - start_s
        mean = fmean(s.reward for s in samples if s.reward is not None)
        yield {**metrics, "sigma": noise, "reward": mean, "tokens_per_s": num_tokens / took_s}


def load(options: argparse.Namespace) -> tuple[qerl.Policy, qerl.PolicyLearner]:
    """Return the model in 4 bits with a fresh adapter, and the learner of the adapter."""
    policy = qerl.load(
        config.ModelConfig(path=options.model, format=options.format),
        adapter=config.AdapterConfig(rank=options.rank, alpha=float(options.rank)),
        sample=config.SampleConfig(max_tokens=options.max_tokens, temperature=1.0),
        engine=config.EngineConfig(kv_cache_gb=0.5),
        max_prompt_tokens=64,
        seed=options.seed,
    )
    learner = policy.learner(
        num_steps=options.steps,
        num_prompts=options.prompts,
        num_generations=options.samples,
        algo=config.AlgoConfig(loss_type=options.loss, epsilon=0.2, epsilon_high=0.28),
        learn=config.LearnConfig(learning_rate=options.learning_rate, warmup_ratio=0.0),
    )
    return policy, learner


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--model", default="smollm2-135m-instruct", help="folder, .gguf file or hub id")
    known.add_argument("--format", default="nvfp4", help="of the frozen weights: nvfp4, nf4, bf16, ...")
    known.add_argument("--loss", default="grpo", help="grpo, dapo, gspo, cispo, ...: docs/methods.md")
    known.add_argument("--steps", type=int, default=5)
    known.add_argument("--prompts", type=int, default=16, help="of a step")
    known.add_argument("--samples", type=int, default=8, help="of a prompt")
    known.add_argument("--max-rounds", type=int, default=1, help="of sampling a step; more than 1: DAPO's")
    known.add_argument("--max-tokens", type=int, default=16, help="of a sample")
    known.add_argument("--rank", type=int, default=32, help="of the adapter")
    known.add_argument("--learning-rate", type=float, default=5e-4)
    known.add_argument("--seed", type=int, default=0)
    known.add_argument("--out", default="runs/rl_loop", help="new folder for the adapter")
    return known


def main() -> None:
    options = parser().parse_args()
    if Path(options.out).exists():
        raise qerl.UserError(f"{options.out} exists already: remove it, or name another folder with --out")
    policy, learner = load(options)
    for step, metrics in enumerate(train(policy, learner, problems(policy, options), options)):
        print(
            f"step {step:3}  sigma {metrics['sigma']:.4f}  reward {metrics['reward']:.3f}"
            f"  entropy {metrics['entropy']:.3f}  mismatch {metrics['mismatch_abs']:.4f}"
            f"  {metrics['tokens_per_s']:,.0f} tokens/s",
            flush=True,
        )
    policy.save_adapter(options.out)
    print(f"saved {options.out}: PEFT and vLLM load it")


if __name__ == "__main__":
    try:
        main()
    except qerl.UserError as error:
        raise SystemExit(f"rl_loop: {error}") from None
