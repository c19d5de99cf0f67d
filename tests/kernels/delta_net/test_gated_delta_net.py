import pytest
import torch

from conftest import rms_error
from qerl.kernels.delta_net import gated_delta, short_conv
from qerl.kernels.delta_net import gated_delta_net as op
from qerl.kernels.delta_net.gated_delta import SequenceLayout
from qerl.types import Tree

SHAPE = op.DeltaShape(num_key_heads=2, num_value_heads=4, key_size=8, value_size=16, num_taps=4)


def _inputs(T, device, rng, dtype=torch.float32):
    qkv, decay, beta = (torch.randn(T, n, generator=rng) for n in (SHAPE.channels, 4, 4))
    weight = torch.randn(SHAPE.channels, SHAPE.num_taps, generator=rng)
    tensors = qkv, -decay.exp(), beta.sigmoid(), weight
    return op.DeltaInputs(*(x.to(device, dtype) for x in tensors), SHAPE)


def _definition(inputs, sequences):
    """In float64, each row from the sequence of rows that it belongs to."""
    o = torch.empty(len(inputs.qkv_TC), 4, 16, dtype=torch.float64, device=inputs.qkv_TC.device)
    for rows, num_own in sequences:
        own, lengths = inputs.rows(rows), (len(rows),)
        y, _ = short_conv.reference(own.qkv_TC, own.weight_CW, lengths, y_zeros(own))
        state = torch.zeros(1, *SHAPE.state_shape, device=y.device)
        found, _ = gated_delta.reference(*own.heads(y), own.log_decay_TN, own.beta_TN, lengths, state)
        o[rows[-num_own:]] = found[-num_own:]
    return o


def y_zeros(inputs):
    return torch.zeros(1, *SHAPE.conv_shape, device=inputs.qkv_TC.device)


def _trees(*shapes):
    trees = []
    for prompt_tokens, branch_tokens in shapes:
        start = trees[-1].start + trees[-1].num_tokens if trees else 0
        trees.append(Tree(start=start, prompt_tokens=prompt_tokens, branch_tokens=branch_tokens))
    return trees


def _sequences_of(trees, device):
    """(rows of the prompt and one branch, how many of them are the branch's)."""
    found = []
    for tree in trees:
        prompt = list(range(tree.start, tree.start + tree.prompt_tokens))
        found.append((torch.tensor(prompt, device=device), len(prompt)))
        row = tree.start + tree.prompt_tokens
        for length in tree.branch_tokens:
            if length:
                found.append((torch.tensor([*prompt, *range(row, row + length)], device=device), length))
            row += length
    return found


CASES = (((5, ()),), ((7, (3, 0, 9)), (1, (2,)), (70, (65, 1, 4))), ((2, (1,) * 5), (3, ())))


@pytest.mark.parametrize("shapes", CASES)
def test_a_branch_goes_on_from_its_prompt(shapes, device, rng):
    """Value and gradients are those of prompt and branch as one sequence."""
    trees = _trees(*shapes)
    inputs = _inputs(trees[-1].start + trees[-1].num_tokens, device, rng)
    tensors = [x.requires_grad_() for x in inputs[:3]]
    do = torch.randn(len(inputs.qkv_TC), 4, 16, generator=rng).to(device)
    o = op.mix_trees(inputs, op.TreeSequences.of(trees, device))
    truth = _definition(inputs, _sequences_of(trees, device))
    got = [o, *torch.autograd.grad(o, tensors, do)]
    for ours, exact in zip(got, [truth, *torch.autograd.grad(truth, tensors, do.double())], strict=True):
        assert rms_error(ours, exact) < 5e-6


def test_a_prompts_gradient_is_summed_in_fp32(device, rng):
    trees = op.TreeSequences.of(_trees((2, (1,) * 40), (1, (1, 1))), device)
    x = torch.randn(2, 3, generator=rng).to(device, torch.bfloat16).requires_grad_()
    d = torch.randn(42, 3, generator=rng).to(device, torch.bfloat16)
    exact = torch.stack((d[:40].double().sum(0), d[40:].double().sum(0)))
    (got,) = torch.autograd.grad(op._Branched.apply(x, trees), x, d)
    assert rms_error(got, exact) <= 1.1 * rms_error(exact.bfloat16(), exact)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_steps_go_on_where_a_prefill_in_pieces_ends(dtype, device, rng):
    inputs, tol = _inputs(12, device, rng, dtype), 1e-6 if dtype == torch.float32 else 2.0**-7
    whole, last = op.mix(inputs, SequenceLayout.of((12,), device), op.DeltaState.zeros(SHAPE, 1, inputs[0]))
    state, outputs = op.DeltaState.zeros(SHAPE, 1, inputs[0]), []
    for start, stop in ((0, 1), (1, 6), (6, 8)):
        some = inputs.rows(torch.arange(start, stop, device=device))
        o, state = op.mix(some, SequenceLayout.of((stop - start,), device), state)
        outputs.append(o)
    for t in range(8, 12):
        o, state = op.mix_step(inputs.rows(torch.tensor([t], device=device)), state)
        outputs.append(o)
    assert whole.dtype == dtype and state.state_SNHV.dtype == torch.float32
    assert rms_error(torch.cat(outputs), whole) < tol
    assert torch.equal(state.conv_SWC, last.conv_SWC)
    assert rms_error(state.state_SNHV, last.state_SNHV) < tol
