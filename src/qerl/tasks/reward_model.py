"""The reward `reward_model`: a sequence classifier rates prompt and completion, many samples at a time.

It is transformers' AutoModelForSequenceClassification (safetensors only, no code of the checkpoint's own), in
the run's own process, loaded when the first samples are scored. A conversation is rendered with the reward
model's own chat template; without one, texts are joined. Values are those of transformers for the same tokens
(tests/tasks/test_reward_model.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks.chat_tokens import encoded, quoted
from qerl.tasks.scoring import Failure, Text, finite_number


class RewardModel:
    __name__ = "reward_model"

    def __init__(self, config: TaskConfig):
        if not config.reward_model.model:
            raise UserError("the reward reward_model needs task.reward_model.model: a folder or hub id")
        self._config = config.reward_model
        self._model: Any = None

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer  # take seconds

        config = self._config
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                config.model,
                dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[config.dtype],
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # damaged or missing files raise many unrelated types
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(f"task.reward_model.model {config.model}: cannot be loaded: {reason}") from None
        if loading["missing_keys"]:
            raise UserError(
                f"task.reward_model.model {config.model}: is not a sequence classifier:"
                f" it lacks {min(loading['missing_keys'])}"
            )
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self._tokenizer.pad_token_id
        num_labels = model.config.num_labels
        if config.label is not None and config.label >= num_labels:
            raise UserError(f"task.reward_model.label must be under {num_labels}, got {config.label}")
        self._model = model.to(config.device).eval().requires_grad_(False)

    def score_groups(
        self, calls_P_G: Sequence[Sequence[Mapping[str, list[Any]]]]
    ) -> list[list[float | Failure]]:
        """Return the reward of each sample of each group, as `score_calls`."""
        values = iter(self.score_calls([call for calls_G in calls_P_G for call in calls_G]))
        return [[next(values) for _ in calls_G] for calls_G in calls_P_G]

    def score_calls(self, calls: Sequence[Mapping[str, list[Any]]]) -> list[float | Failure]:
        """Return the reward of each call's sample; raise UserError if the model cannot be loaded."""
        if self._model is None and calls:
            self._load()
        tokens = [self._tokens(call["prompts"][0], call["completions"][0]) for call in calls]
        order = sorted(range(len(calls)), key=lambda i: len(tokens[i]))  # equal lengths need no padding
        order = [i for i in order if tokens[i]]
        is_empty = Failure("empty", "prompt and completion have no token")
        rewards: list[float | Failure] = [is_empty] * len(calls)
        for start in range(0, len(order), self._config.batch_size):
            some = order[start : start + self._config.batch_size]
            values = self._values([tokens[i] for i in some])
            for i, value in zip(some, values, strict=True):
                rewards[i] = finite_number("reward_model", value)
        return rewards

    def _tokens(self, prompt: Text, completion: Text) -> list[int]:
        tokenizer = self._tokenizer
        if isinstance(prompt, str) or isinstance(completion, str) or not tokenizer.chat_template:
            texts = (
                text if isinstance(text, str) else quoted(tokenizer, text) for text in (prompt, completion)
            )
            ids = encoded(tokenizer, "".join(map(_joined, texts)), with_special_tokens=True)
        else:
            messages = quoted(tokenizer, [*prompt, *completion])
            ids = encoded(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False))
        return ids[-self._config.max_length :]

    def _values(self, batch: list[list[int]]) -> list[float]:
        import torch

        longest, pad = max(map(len, batch)), self._model.config.pad_token_id
        ids_BT = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in batch])
        mask_BT = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in batch])
        device = self._model.device
        with torch.no_grad():
            logits_BL = self._model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device)).logits
        logits_BL = logits_BL.float()
        if logits_BL.shape[1] == 1:
            return logits_BL[:, 0].tolist()
        label = -1 if self._config.label is None else self._config.label
        return logits_BL.softmax(-1)[:, label].tolist()


def _joined(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(str(message["content"]) for message in text)
