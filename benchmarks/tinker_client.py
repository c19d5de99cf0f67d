"""A program for Tinker's API: RL on rows of a file. Started by `python -m benchmarks tinker`, or by hand:
`python -m benchmarks.tinker_client SETTINGS.json`.

It prints a JSON row for each step, and one with the greedy accuracy on held-out rows before and after.
The loss is that of a mean over all tokens of the step, with advantages normalized by group.
"""

import dataclasses
import json
import statistics
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from qerl.config import ModelConfig, RunConfig
from qerl.tasks.graders import gold_number, last_number
from qerl.training.policy import load_tokenizer_and_limit


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientSettings:
    url: str
    model: str
    rows: str
    """File of {"train": [[tokens, answer], ...], "test": [...]}."""
    rank: int
    learning_rate: float
    num_steps: int
    num_prompts: int
    num_generations: int
    max_tokens: int
    num_held_out: int
    seed: int = 0
    waits: bool = False
    """True: begin the steps once a line is read, so that several clients begin together."""


class Client:
    def __init__(self, settings: ClientSettings):
        self._settings = settings
        model = ModelConfig(path=settings.model, device="cpu")
        self._tokenizer, _ = load_tokenizer_and_limit(RunConfig(model=model))
        self._rows = json.loads(Path(settings.rows).read_text())
        service = tinker.ServiceClient(base_url=settings.url, api_key="tml-local")
        made = service.create_lora_training_client(settings.model, rank=settings.rank, seed=settings.seed)
        self._client = made.result()

    def run(self) -> None:
        settings = self._settings
        sampler = self._client.save_weights_and_get_sampling_client().result()
        self._print(accuracy=self._accuracy(sampler), at_step=0)
        if settings.waits:
            print("ready", flush=True)
            sys.stdin.readline()
        for step in range(settings.num_steps):
            sampler = self._step(step, sampler)
        self._print(accuracy=self._accuracy(sampler), at_step=settings.num_steps)

    def _step(self, step: int, sampler: Any) -> Any:
        """Return a sampler of the new weights."""
        settings, start_s = self._settings, time.monotonic()
        first = (settings.seed * 97 + step) * settings.num_prompts
        rows = self._rows["train"]
        batch = [rows[(first + i) % len(rows)] for i in range(settings.num_prompts)]
        groups = self._sample(sampler, batch, settings.num_generations, temperature=1.0, seed=step)
        rewards = [
            [self._reward(s.tokens, answer) for s in g] for g, (_, answer) in zip(groups, batch, strict=True)
        ]
        sampled_s = time.monotonic() - start_s
        num_tokens = sum(len(s.tokens) for group in groups for s in group)
        data = [
            _datum(
                tokens,
                sample,
                (reward - statistics.fmean(of_group)) / (statistics.pstdev(of_group) * num_tokens),
            )
            for (tokens, _), group, of_group in zip(batch, groups, rewards, strict=True)
            if len(set(of_group)) > 1
            for sample, reward in zip(group, of_group, strict=True)
        ]
        if data:
            passed = self._client.forward_backward(data, "importance_sampling")
            adam = types.AdamParams(learning_rate=settings.learning_rate, beta1=0.9, beta2=0.99, eps=1e-8)
            updated = self._client.optim_step(adam)
            passed.result()
            updated.result()
        sampler = self._client.save_weights_and_get_sampling_client().result()
        step_s = time.monotonic() - start_s
        reward = statistics.fmean(each for of_group in rewards for each in of_group)
        times = {"step_s": step_s, "sampled_s": sampled_s, "num_tokens": num_tokens, "num_data": len(data)}
        self._print(step=step, reward=reward, **times)
        return sampler

    def _sample(
        self, sampler: Any, batch: list[Any], num_samples: int, *, temperature: float, seed: int
    ) -> list[list[Any]]:
        how = {"max_tokens": self._settings.max_tokens, "temperature": temperature}
        futures: list[Future[Any]] = [
            sampler.sample(
                types.ModelInput.from_ints(tokens),
                num_samples,
                types.SamplingParams(**how, seed=1000 * (seed + 1) + i),
            )
            for i, (tokens, _) in enumerate(batch)
        ]
        return [future.result().sequences for future in futures]

    def _reward(self, tokens: list[int], answer: str) -> float:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return float(last_number(str(text)) == gold_number(answer))

    def _accuracy(self, sampler: Any) -> float | None:
        batch = self._rows["test"][: self._settings.num_held_out]
        if not batch:
            return None
        groups = self._sample(sampler, batch, 1, temperature=0.0, seed=0)
        return statistics.fmean(
            self._reward(group[0].tokens, answer) for group, (_, answer) in zip(groups, batch, strict=True)
        )

    def _print(self, **values: Any) -> None:
        print(json.dumps({"client": self._settings.seed, **values}), flush=True)


def _datum(prompt_T: list[int], sample: Any, advantage: float) -> types.Datum:
    tokens, before = prompt_T + list(sample.tokens), len(prompt_T) - 1
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * before + list(sample.logprobs),
        "advantages": [0.0] * before + [advantage] * len(sample.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


if __name__ == "__main__":
    Client(ClientSettings(**json.loads(Path(sys.argv[1]).read_text()))).run()
