"""Replies of the run's own model without its adapter and without noise: the judge of task.judge.url base.

It has an engine of its own, whose kernels and graphs are made while the adapter is off; weights are shared.
Its KV cache is open only while it answers, which is after the samples of a step.
"""

import functools

from qerl.config import EngineConfig, JudgeConfig
from qerl.engine.local_engine import LocalEngine
from qerl.engine.paged_engine import PagedEngine
from qerl.errors import UserError
from qerl.models.decoder import Decoder
from qerl.models.peft.adapter import adapter_off
from qerl.models.policy_model import PolicyModel
from qerl.tasks.rows.prompt import render_chat
from qerl.tasks.scoring import Failure
from qerl.types import GenerateRequest, Prompt, Sampling


class BaseJudge:
    def __init__(self, model: PolicyModel, engine: LocalEngine, judge: JudgeConfig, config: EngineConfig):
        """engine: the run's; only its tokens are used where the decoder is qerl's own."""
        self._model, self._run_engine, self._tokenizer = model, engine, engine.tokenizer
        self._judge, self._config = judge, config

    def __call__(self, messages: list[str]) -> list[str | Failure]:
        """Return the reply to each message, or why there is none."""
        prompts = [self._prompt(index, message) for index, message in enumerate(messages)]
        prompts_P = [each for each in prompts if isinstance(each, Prompt)]
        sampling = Sampling(max_tokens=self._judge.max_tokens, temperature=0.0)
        with self._model.noise_table.paused(), adapter_off(self._model):
            request = GenerateRequest(prompts_P, num_samples=1, sampling=sampling, seed=0, step=0)
            groups = self._engine.generate(request)
        replies = iter(group.samples_G[0].text for group in groups)
        return [each if isinstance(each, Failure) else next(replies) for each in prompts]

    def _prompt(self, index: int, message: str) -> Prompt | Failure:
        messages = [{"role": "user", "content": message}]
        try:
            text, tokens_T = render_chat(self._tokenizer, messages)
        except UserError as error:
            return Failure("not messages", f"judge: {error}")
        limit = self._model.max_positions - self._judge.max_tokens
        if not 0 < len(tokens_T) <= limit:
            return Failure("too long", f"judge: the rubric has {len(tokens_T)} tokens; the limit is {limit}")
        return Prompt(index=index, text=text, tokens_T=tokens_T, messages=messages, columns={})

    @functools.cached_property
    def _engine(self) -> LocalEngine:
        """Return an engine whose kernels have no adapter; transformers' operations look at each call."""
        if not isinstance(self._model, Decoder):
            return self._run_engine
        stop_ids = self._run_engine.stop_token_ids
        return PagedEngine(self._model, self._tokenizer, self._config, stop_token_ids=stop_ids)
