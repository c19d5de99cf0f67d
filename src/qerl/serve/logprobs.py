"""Logprobs of tokens in OpenAI's two forms: of a chat, and of a completion."""

import itertools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from qerl.types import TokenLogprob

Json = dict[str, Any]


def token_id_text(token: int) -> str:
    """Return a token's name in vLLM's return_tokens_as_token_ids."""
    return f"token_id:{token}"


def chat_logprobs(tokenizer: Tokenizer, tokens: list[TokenLogprob]) -> Json:
    def entry(token: int, logprob: float) -> Json:
        text = str(tokenizer.decode([token]))
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(each.token, each.logprob) | {"top_logprobs": [entry(*top) for top in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    name: Callable[[int], str], tokens: list[TokenLogprob | None], texts: list[str], num_top: int
) -> Json:
    """name: of a token among the most likely ones. texts: of the tokens. None: the first token of a prompt,
    which nothing predicts."""

    def top(each: TokenLogprob) -> dict[str, float]:
        """Tokens with the same name are one entry, that of the most likely."""
        logprobs: dict[str, float] = {}
        for token, logprob in (*each.top, (each.token, each.logprob)):
            logprobs.setdefault(name(token), logprob)
        return logprobs

    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else each.logprob for each in tokens],
        "top_logprobs": [None if each is None else top(each) for each in tokens] if num_top else None,
        "text_offset": [0, *itertools.accumulate(map(len, texts))][:-1],
    }
