"""A small tokenizer, prompts, an engine, and the packed forward as its reference."""

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from models.tiny import logits_of
from qerl.config import EngineConfig
from qerl.engine import PagedEngine
from qerl.models.decoder import Decoder
from qerl.types import GenerateRequest, Pivot, Prompt, Sampling

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# As byte-level BPE spells them: \u0120 a space, \u010a a new line, \u00c3 \u00a9 the bytes of an acute e.
VOCABULARY = [
    *LETTERS,
    *LETTERS.upper(),
    "\u0120",
    "\u00c3",
    "\u00a9",
    "ab",
    "cde",
    ".",
    "\u010a",
    "<pad>",
    "<eos>",
]
EOS = VOCABULARY.index("<eos>")
STOPS = frozenset({EOS, *range(5)})  # so many that random samples end at many lengths


def tokenizer() -> PreTrainedTokenizerFast:
    """61 tokens, most of one byte; two special ones."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="."))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def tokens_of(*texts: str) -> list[int]:
    return [VOCABULARY.index(text) for text in texts]


def prompts_of(*lengths: int, first_index: int = 0) -> list[Prompt]:
    """Random prompts of these many tokens."""
    rng = torch.Generator().manual_seed(11)
    tokens_P = [torch.randint(0, len(VOCABULARY), (length,), generator=rng).tolist() for length in lengths]
    return [
        Prompt(index=first_index + i, text="", tokens_T=tokens_T, messages=None, columns={})
        for i, tokens_T in enumerate(tokens_P)
    ]


def engine_of(decoder, *, stop_token_ids=STOPS, **settings) -> PagedEngine:
    return PagedEngine(decoder, tokenizer(), EngineConfig(**settings), stop_token_ids=stop_token_ids)


def request_of(prompts_P, *, num_samples=3, seed=5, step=2, sampling=None, **parameters) -> GenerateRequest:
    sampling = sampling or Sampling(**({"max_tokens": 12} | parameters))
    return GenerateRequest(prompts_P, num_samples=num_samples, sampling=sampling, seed=seed, step=step)


def drawn(engine, prompts_P, **settings):
    """[(tokens, logprobs)] of all samples, prompt by prompt."""
    groups = engine.generate(request_of(prompts_P, **settings))
    assert [group.prompt for group in groups] == prompts_P
    return [s for group in groups for s in group.samples_G]


def pivots_in(groups):
    """In every other sample, at an early, a middle or the last place."""
    found = []
    for g, group in enumerate(groups):
        for s, sample in enumerate(group.samples_G):
            T = len(sample.tokens_T)
            if T > 1 and (group.prompt.index + s) % 2 == 0:
                place = (1, T // 2, T - 1)[group.prompt.index % 3]
                found.append(Pivot(group_index=g, sample_index=s, prefix_tokens=place))
    return found


def branched(engine, prompts_P, *, num_branches=3, pivots=pivots_in, **settings):
    """(the samples' groups, the branches' groups, the pivots, the number of batches)."""
    groups, branches, found, num_batches = [], [], [], 0
    for batch in engine.branch_batches(request_of(prompts_P, **settings)):
        drawn_P = batch.sample()
        pivots_here = pivots(drawn_P)
        groups += drawn_P
        branches += batch.branch(pivots_here, num_branches)
        found += [(drawn_P[p.group_index], p) for p in pivots_here]
        num_batches += 1
    return groups, branches, found, num_batches


def packed_logprobs(decoder, prompt, sample, temperature=1.0):
    """[sampled tokens, V] log-softmax of the forward that learning uses, over prompt and sample at once."""
    with torch.no_grad():
        logits_TV = logits_of(decoder, torch.tensor(prompt.tokens_T + sample.tokens_T[:-1]))
    return (logits_TV[len(prompt.tokens_T) - 1 :] / temperature).log_softmax(-1)


def fp32_copy(decoder):
    """The same weights, adapter and noise in float32."""
    copy = Decoder(decoder.architecture, compute=torch.float32, device=decoder.device)
    for (_, theirs), (_, ours) in zip(decoder.linears(), copy.linears(), strict=True):
        ours.load_weight(theirs.weight)
        if theirs.rank:  # what is multiplied, not the masters
            ours.add_adapter(theirs.a_work.float(), theirs.b_work.float(), theirs.scaling)
    if decoder.lm_head.packed is not None:
        copy.lm_head.load_packed(decoder.lm_head.packed)
    buffers = dict(decoder.named_buffers())
    for name, buffer in copy.named_buffers():
        buffer.copy_(buffers[name])
    return copy


def compared(decoder, prompts_P, samples, num_samples=1, temperature=1.0):
    """The sampled tokens' logprobs by the engine, the packed forward, and the packed forward in fp32."""
    copy, found = fp32_copy(decoder), ([], [], [])
    for i, sample in enumerate(samples):
        prompt = prompts_P[i // num_samples]
        found[0].append(torch.tensor(sample.logprobs_T))
        for logprobs, each in zip(found[1:], (decoder, copy), strict=True):
            logprobs_TV = packed_logprobs(each, prompt, sample, temperature).cpu()
            logprobs.append(logprobs_TV[torch.arange(len(sample.tokens_T)), torch.tensor(sample.tokens_T)])
    return tuple(torch.cat(logprobs) for logprobs in found)
