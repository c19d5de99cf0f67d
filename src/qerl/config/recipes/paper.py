"""The demo, GSM8K in minutes, and the runs of QeRL's paper.

    demo         sums of two numbers as plain text with the built-in model: minutes on two CPU cores
    demo_long    the same sums as a chat, with AQN: the base of the methods and of the studies
    higher_lower the long demo in several turns, with an environment that says higher or lower
    gsm8k_small  GSM8K in minutes on one GPU: Qwen2.5-Coder-0.5B-Instruct, as in the study of that name, but
                 calibrated; also for the 1.5B
    gsm8k        QeRL's GSM8K run, arXiv 2510.11696, table 4: Qwen2.5-3B-Instruct, GRPO
    big_math     QeRL's BigMath run, the same table: Qwen2.5-7B-Instruct, DAPO's loss
    dapo_math    DAPO, arXiv 2503.14476, on its own 17,000 problems, with QeRL's model, noise and adapter
    math         MATH's 7,500 training problems with the settings of gsm8k; 500 of its test split held out
    code         35,735 programming problems, graded by their tests, with the settings of dapo_math
    plain        defaults of `qerl train --task FILE --reward FILE.py:FUNCTION`

Where the paper says nothing, these recipes take: alpha 32, equal to the rank; a batch of 128 prompts; four
updates of a GSM8K step, one for each quarter of its prompts. Warm-up, weight decay, betas, gradient norm and
the masking of truncated samples are those of the paper's released scripts.

Departures from table 4 and the text of the paper:

    optimizer    AdamW with fp32 moments; table 4 has AdamW-8bit, `--learn.optim adamw_8bit`, which needs
                 bitsandbytes
    correction   truncated importance sampling, since sampler and learner are different policies; the paper
                 has none, `--algo.importance none`
    noise        one draw a step, as in the paper's Algorithm 1; its text has one in each forward pass
"""

from collections.abc import Callable
from dataclasses import replace

from qerl.config import (
    AlgoConfig,
    CheckpointConfig,
    CodeConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    LearnConfig,
    ModelConfig,
    NoiseConfig,
    RunConfig,
    SampleConfig,
    TaskConfig,
)

GSM8K_REQUEST = (
    "Solve the math problem above step by step. Put the reasoning inside <think></think> tags, then only the"
    " final number inside <answer></answer> tags: <think> reasoning </think><answer> number </answer>."
)
"""Follows each GSM8K problem, in training and in evaluation."""

GSM8K_TEMPLATE = "{question}\n\n" + GSM8K_REQUEST

GSM8K_SMALL_TEMPLATE = "{question}\nThink step by step, then give the final number after ####."

MATH_TEMPLATE = (
    "{question}\n\nReason step by step inside <think></think> tags, then put only the final answer inside"
    " <answer></answer> tags."
)

CODE_TEMPLATE = (
    "{question}\n\nReason step by step, then put the whole program into one block that begins with ```python"
    " and ends with ```."
)


def demo() -> RunConfig:
    """Train SmolLM2-135M in NVFP4 to complete sums, in minutes on two CPU cores."""
    long = demo_long()
    return replace(
        long,
        out="runs/demo",
        num_steps=24,
        task=replace(long.task, chat="messages", template="The sum of {metadata[expression]} is"),
        sample=SampleConfig(max_tokens=6, temperature=1.0, stop=("\n",)),
        noise=NoiseConfig(schedule="none"),
        evaluate=EvalConfig(num_prompts=128),
    )


def demo_long() -> RunConfig:
    """Train SmolLM2-135M in NVFP4 to answer sums in chats, with AQN."""
    # Sigma is relative to the model's norm weights, of about 0.3.
    # 64 rows of logits are for a CPU: a larger vocabulary on a GPU wants the default.
    return RunConfig(
        out="runs/demo-long",
        num_steps=40,
        num_prompts=16,
        num_generations=8,
        task=TaskConfig(
            gym="basic_arithmetic",
            gym_options=(
                ("operators", "+"),
                ("min_terms", 2),
                ("max_terms", 2),
                ("min_digits", 1),
                ("max_digits", 2),
                ("allow_parentheses", False),
                ("allow_negation", False),
            ),
            template="What is {metadata[expression]}? Answer with just the number.",
        ),
        sample=SampleConfig(max_tokens=16, temperature=1.0),
        engine=EngineConfig(kv_cache_gb=0.5),
        noise=NoiseConfig(schedule="exponential", sigma_start=3e-2, sigma_end=1.5e-3, unit="relative"),
        algo=AlgoConfig(loss_type="grpo", advantage="group", beta=0.0),
        learn=LearnConfig(
            learning_rate=5e-4, lr_scheduler_type="cosine", warmup_ratio=0.0, logprob_chunk_tokens=64
        ),
        evaluate=EvalConfig(num_prompts=256),
    )


def higher_lower() -> RunConfig:
    """Train on such sums in up to three turns; the reply to a wrong number is higher or lower."""
    config = demo_long()
    return replace(
        config,
        out="runs/higher_lower",
        task=replace(
            config.task,
            rewards=("higher_lower",),
            environment=EnvironmentConfig(max_turns=3, turn_tokens=16),
        ),
        sample=SampleConfig(max_tokens=112, temperature=1.0),
        evaluate=EvalConfig(num_prompts=256, success_threshold=0.25),
    )


def gsm8k_small() -> RunConfig:
    """Train on GSM8K, 40 steps of 64 problems, without noise; docs/gsm8k.md says what to expect."""
    return RunConfig(
        out="runs/gsm8k-small",
        num_steps=40,
        num_prompts=64,
        num_generations=8,
        model=ModelConfig(path="Qwen/Qwen2.5-Coder-0.5B-Instruct", calibrate="gptq"),
        task=TaskConfig(
            name="gsm8k",
            template=GSM8K_SMALL_TEMPLATE,
            held_out_split="test",
            num_held_out=256,
            rewards=("numeric",),
        ),
        sample=SampleConfig(max_tokens=512, temperature=1.0),
        noise=NoiseConfig(schedule="none"),
        learn=LearnConfig(learning_rate=5e-5, lr_scheduler_type="constant", warmup_ratio=0.05),
        evaluate=EvalConfig(num_prompts=256, every=10),
    )


def gsm8k() -> RunConfig:
    """Train on GSM8K, 600 steps of 128 problems; the KV cache is sized for a 24 GB card."""
    return RunConfig(
        out="runs/gsm8k",
        num_steps=600,
        num_prompts=128,
        num_generations=8,
        model=ModelConfig(path="Qwen/Qwen2.5-3B-Instruct"),
        task=TaskConfig(
            name="gsm8k",
            template=GSM8K_TEMPLATE,
            held_out_split="test",
            rewards=("numeric", "tags"),
            reward_weights=(1.0, 0.1),
        ),
        sample=SampleConfig(max_tokens=4096, temperature=1.0),
        engine=EngineConfig(kv_cache_gb=8.0),
        noise=NoiseConfig(
            schedule="exponential", sigma_start=1e-2, sigma_end=5e-4, num_stages=10, unit="absolute"
        ),
        algo=AlgoConfig(
            advantage="group", loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.0, overlong="mask"
        ),
        learn=LearnConfig(
            learning_rate=1e-5,
            lr_scheduler_type="cosine",
            warmup_ratio=0.1,
            betas=(0.9, 0.99),
            weight_decay=0.1,
            max_grad_norm=0.2,
            updates_per_step=4,
            gradient_checkpointing="layer",
        ),
        evaluate=EvalConfig(num_prompts=1319, every=100),
        checkpoint=CheckpointConfig(every=20),
    )


def big_math() -> RunConfig:
    """Train on levels 3 to 5 of Big-Math, 122,000 problems; the KV cache is sized for an 80 GB card."""
    config = gsm8k()
    return replace(
        config,
        out="runs/big-math",
        num_steps=1000,
        num_generations=16,
        model=ModelConfig(path="Qwen/Qwen2.5-7B-Instruct"),
        task=TaskConfig(
            name="open-r1/Big-Math-RL-Verified-Processed:level_3_4_5",
            template=MATH_TEMPLATE,
            answer_column="solution",
            num_held_out=512,
            rewards=("math", "tags"),
            reward_weights=(1.0, 0.1),
        ),
        sample=replace(config.sample, max_tokens=8192),
        engine=EngineConfig(kv_cache_gb=30.0, max_num_seqs=256),
        algo=replace(config.algo, loss_type="dapo"),
        learn=replace(config.learn, updates_per_step=1),
        evaluate=EvalConfig(num_prompts=512, every=100),
    )


def dapo_math() -> RunConfig:
    """Train on DAPO-Math-17k with dynamic sampling and soft overlong punishment, for an 80 GB card."""
    config = big_math()
    return replace(
        config,
        out="runs/dapo-math",
        task=replace(config.task, name="open-r1/DAPO-Math-17k-Processed:en"),
        algo=replace(config.algo, dynamic_sampling=True, overlong="shape", overlong_buffer=2048),
    )


def math() -> RunConfig:
    """Train on MATH, graded by the boxed answers of its solutions; sized for a 24 GB card."""
    return replace(
        gsm8k(),
        out="runs/math",
        task=replace(
            big_math().task,
            name="DigitalLearningGmbH/MATH-lighteval",
            prompt_column="problem",
            held_out_split="test",
            num_held_out=500,
        ),
        evaluate=EvalConfig(num_prompts=500, every=100),
    )


def code() -> RunConfig:
    """Train to write programs that pass the first 8 tests, for an 80 GB card and 16 CPU cores."""
    return replace(
        dapo_math(),
        out="runs/code",
        num_prompts=32,
        task=TaskConfig(
            name="open-r1/verifiable-coding-problems-python",
            template=CODE_TEMPLATE,
            prompt_column="problem_statement",
            answer_column="verification_info",
            num_held_out=256,
            rewards=("code",),
            reward_timeout_s=20.0,
            reward_workers=16,
            code=CodeConfig(credit="all", max_tests=8),
        ),
        evaluate=EvalConfig(num_prompts=256, every=100),
    )


def plain() -> RunConfig:
    """Train on your own rows and reward with the defaults, without noise."""
    return RunConfig(out="runs/own", noise=NoiseConfig(schedule="none"))


PAPER: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe
    for recipe in (demo, demo_long, higher_lower, gsm8k_small, gsm8k, big_math, dapo_math, math, code)
}
