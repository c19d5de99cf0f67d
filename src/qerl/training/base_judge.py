"""Replies of the run's own model without its adapter and without noise: the judge of task.judge.url base.

It has an engine of its own, whose kernels and graphs are made while the adapter is off; weights are shared.
Its KV cache is open only while it answers, which is after the samples of a step.
"""

from transformers import PreTrainedTokenizerBase

from qerl.config import RunConfig
from qerl.engine.local_engine import LocalEngine
from qerl.engine.paged_engine import PagedEngine
from qerl.errors import UserError
from qerl.models.decoder import Decoder
from qerl.models.peft.adapter import adapter_off
from qerl.models.policy_model import PolicyModel
from qerl.tasks import RewardPool
from qerl.tasks.prompt import render_chat
from qerl.tasks.scoring import Failure
from qerl.types import GenerateRequest, Prompt, Sampling


class BaseJudge:
    def __init__(
        self,
        model: PolicyModel,
        engine: LocalEngine,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
    ):
        """engine: the run's; only its stop tokens are used where the decoder is qerl's own."""
        self._model, self._run_engine, self._tokenizer = model, engine, tokenizer
        self._settings, self._config = config.task.judge, config.engine
        self._engine: LocalEngine | None = None

    def __call__(self, messages: list[str]) -> list[str | Failure]:
        """Return the reply to each message, or why there is none."""
        found = [self._prompt(index, message) for index, message in enumerate(messages)]
        prompts_P = [each for each in found if isinstance(each, Prompt)]
        sampling = Sampling(max_tokens=self._settings.max_tokens, temperature=0.0)
        with self._model.noise_table.paused(), adapter_off(self._model):
            engine = self._engine = self._engine or self._made()
            request = GenerateRequest(prompts_P, num_samples=1, sampling=sampling, seed=0, step=0)
            groups = engine.generate(request)
        replies = iter(group.samples_G[0].text for group in groups)
        return [each if isinstance(each, Failure) else next(replies) for each in found]

    def _prompt(self, index: int, message: str) -> Prompt | Failure:
        asked = [{"role": "user", "content": message}]
        try:
            text, tokens_T = render_chat(self._tokenizer, asked)
        except UserError as error:
            return Failure("not messages", f"judge: {error}")
        limit = self._model.max_positions - self._settings.max_tokens
        if not 0 < len(tokens_T) <= limit:
            return Failure("too long", f"judge: the rubric has {len(tokens_T)} tokens; the limit is {limit}")
        return Prompt(index=index, text=text, tokens_T=tokens_T, messages=asked, columns={})

    def _made(self) -> LocalEngine:
        """Return an engine whose kernels have no adapter; transformers' operations look at each call."""
        if not isinstance(self._model, Decoder):
            return self._run_engine
        stop_ids = self._run_engine.stop_token_ids
        return PagedEngine(self._model, self._tokenizer, self._config, stop_token_ids=stop_ids)


def let_base_judge(
    pool: RewardPool,
    model: PolicyModel,
    engine: LocalEngine,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
) -> None:
    """Let the pool's rewards that ask the run's own base model do so."""
    judge = BaseJudge(model, engine, tokenizer, config)
    for each in pool.own_judges:
        each.answer_by(judge, f"{config.model.path} {config.model.format}")
