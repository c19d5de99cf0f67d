"""Logprobs of tokens in OpenAI's two forms: of a chat, and of a completion."""

import itertools
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from qerl.types import TokenLogprob

Json = dict[str, Any]


def token_texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [str(tokenizer.decode([token])) for token in tokens]


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
    tokenizer: Tokenizer, tokens: list[TokenLogprob | None], texts: list[str], num_top: int
) -> Json:
    """texts: of the tokens. None: the first token of a prompt, which nothing predicts."""

    def top(each: TokenLogprob) -> dict[str, float]:
        """Tokens with the same text are one entry, that of the most likely."""
        found: dict[str, float] = {}
        for token, logprob in (*each.top, (each.token, each.logprob)):
            found.setdefault(str(tokenizer.decode([token])), logprob)
        return found

    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else each.logprob for each in tokens],
        "top_logprobs": [None if each is None else top(each) for each in tokens] if num_top else None,
        "text_offset": [0, *itertools.accumulate(map(len, texts))][:-1],
    }
