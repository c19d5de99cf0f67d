"""The head's passes take what the plan says, on a GPU: one slice of a large vocabulary at a time."""

import dataclasses

import pytest
import torch

from learner.test_plan import CONFIG, head_bytes
from qerl.config import ModelConfig
from qerl.kernels.head.logprob import chunked_logprob
from qerl.models.lm_head import LMHead
from qerl.models.random_weights import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, CHUNK = 1279, 512


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_the_heads_passes_of_gpt_oss_take_the_planned_memory(format, rng):
    """Beside the plan's there are cuBLAS's workspace, a chunk of hidden states and vectors of rows."""
    a = SHAPES["gpt-oss-20b"]
    learn = dataclasses.replace(CONFIG.learn, logprob_chunk_tokens=CHUNK)
    config = dataclasses.replace(CONFIG, learn=learn, model=ModelConfig(head_format=format))
    head = LMHead(torch.randn(a.vocab_size, a.width, device="cuda", dtype=torch.bfloat16).mul_(0.02))
    head.pack(format)
    hidden_TD = torch.randn(ROWS, a.width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets_T = torch.randint(a.vocab_size, (ROWS,), generator=rng).cuda()
    for _ in range(2):  # the first compiles and makes workspaces
        hidden_TD.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        operand, settings = head.sliced_operand(), {"temperature": 1.0 / head.alpha, "chunk_tokens": CHUNK}
        logprob_T, _ = chunked_logprob(hidden_TD, operand, targets_T, **settings)
        logprob_T.sum().backward()
        taken = torch.cuda.max_memory_allocated() - before
    planned = head_bytes(a, config, ROWS)
    assert 0.7 * planned < taken < planned + 20e6
    assert taken < 0.4e9  # all logits of a chunk took 0.6, an unpacked head 1.2 more
