import warnings

import pytest
import torch

from learner.samples import prompt, random_groups, sample
from qerl.learner import packing
from qerl.learner.packing import pack
from qerl.types import Group, Tree

CPU = torch.device("cpu")


def packed(groups_P, max_tokens=1000, weights_P_G=None):
    weights_P_G = weights_P_G or [[1.0] * len(group.samples_G) for group in groups_P]
    return list(pack(list(zip(groups_P, weights_P_G, strict=True)), max_tokens=max_tokens, device=CPU))


def alone(groups_P):
    """Every sampled token with what it should be predicted from: (context before it, token, its marks)."""
    return [
        (group.prompt.tokens_T + s.tokens_T[:i], token, s.logprobs_T[i], s.advantage)
        for group in groups_P
        for s in group.samples_G
        for i, token in enumerate(s.tokens_T)
    ]


def seen(batch):
    """The same, read back from a packed batch: what a source row sees according to its tree."""
    rows = []
    for row, target, logprob, advantage in zip(
        batch.source_rows_C, batch.targets_C, batch.sampler_logprobs_C, batch.advantages_C, strict=True
    ):
        tree = next(t for t in batch.trees if t.start <= row < t.start + t.num_tokens)
        prompt_end = tree.start + tree.prompt_tokens
        visible = list(range(tree.start, min(int(row) + 1, prompt_end)))
        branch_start = prompt_end
        for length in tree.branch_tokens:
            if branch_start <= row < branch_start + length:
                visible += range(branch_start, int(row) + 1)
            branch_start += length
        assert batch.positions_T[visible].tolist() == list(range(len(visible)))
        rows.append((batch.tokens_T[visible].tolist(), target.item(), logprob.item(), advantage.item()))
    return rows


def test_a_group_becomes_one_tree_with_the_prompt_once():
    """The example of the module's docstring."""
    group = Group(
        prompt=prompt(0, [10, 11, 12]),
        samples_G=[sample([20, 21, 22], advantage=0.5), sample([30], advantage=-0.5)],
    )
    (batch,) = packed([group], weights_P_G=[[0.25, 0.75]])
    assert batch.tokens_T.tolist() == [10, 11, 12, 20, 21]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert batch.trees == [Tree(start=0, prompt_tokens=3, branch_tokens=(2, 0))]
    assert batch.source_rows_C.tolist() == [2, 3, 4, 2]
    assert batch.targets_C.tolist() == [20, 21, 22, 30]
    assert batch.sampler_logprobs_C.tolist() == [-1.0, -1.125, -1.25, -1.0]
    assert batch.advantages_C.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert batch.weights_C.tolist() == [0.25, 0.25, 0.25, 0.75]


@pytest.mark.parametrize("max_tokens", [1, 7, 12, 20, 45, 10_000])
def test_every_token_is_predicted_once_from_its_own_context_whatever_the_budget(max_tokens, rng):
    groups_P = random_groups(6, 4, vocab=50, rng=rng)
    batches = packed(groups_P, max_tokens)
    assert [row[:2] for batch in batches for row in seen(batch)] == [row[:2] for row in alone(groups_P)]
    got = torch.tensor([row[2:] for batch in batches for row in seen(batch)])
    torch.testing.assert_close(got, torch.tensor([row[2:] for row in alone(groups_P)]))


@pytest.mark.parametrize("max_tokens", [14, 20, 45])
def test_a_batch_keeps_to_its_budget(max_tokens, rng):
    """The longest prompt and sample together take 8 + 5 rows."""
    for batch in packed(random_groups(6, 4, vocab=50, rng=rng), max_tokens):
        assert len(batch.tokens_T) == len(batch.positions_T) <= max_tokens
        assert sum(tree.num_tokens for tree in batch.trees) == len(batch.tokens_T)


def test_a_sample_beyond_the_budget_has_a_batch_of_its_own():
    long, short = list(range(30)), [1, 2]
    group = Group(prompt=prompt(0, [7, 8]), samples_G=[sample(short), sample(long), sample(short)])
    sizes = [len(batch.tokens_T) for batch in packed([group], max_tokens=10)]
    assert sizes == [3, 31, 3]


@pytest.mark.parametrize(("max_tokens", "trees"), [(16, [1, 1, 1]), (19, [1, 1, 1]), (20, [2, 1]), (30, [3])])
def test_a_group_that_would_fit_whole_is_not_split(max_tokens, trees):
    """Splitting it would fill the first batch up, and compute the second prompt twice."""
    group = Group(prompt=prompt(0, [1, 2, 3, 4]), samples_G=[sample([5, 6, 7])] * 3)  # 10 rows
    assert [len(batch.trees) for batch in packed([group, group, group], max_tokens)] == trees


@pytest.mark.parametrize(("max_tokens", "rows"), [(10, [10]), (9, [8, 6]), (8, [8, 6]), (7, [6, 6, 6])])
def test_a_group_that_does_not_fit_is_split_into_as_few_parts_as_can_be(max_tokens, rows):
    group = Group(prompt=prompt(0, [1, 2, 3, 4]), samples_G=[sample([5, 6, 7])] * 3)
    assert [len(batch.tokens_T) for batch in packed([group], max_tokens)] == rows


def test_the_first_part_of_a_split_group_fills_the_batch_before():
    """Eight samples of 3 rows behind a prompt of 2, at most 25 rows: 7 and 1, then 6 beside that one."""
    groups = [Group(prompt=prompt(0, [1, 2]), samples_G=[sample([5, 6, 7, 8])] * 8)] * 3
    batches = packed(groups, max_tokens=25)
    assert [[len(tree.branch_tokens) for tree in batch.trees] for batch in batches] == [
        [7],
        [1, 5],
        [3, 2],
        [6],
    ]
    assert [len(batch.tokens_T) for batch in packed(groups, max_tokens=9)] == [
        8
    ] * 12  # no room for a prompt more


def test_batches_are_of_about_one_size():
    """Filled one after the other the last would have 1,279 rows, and its GPU would wait for the host."""
    groups = [Group(prompt=prompt(i, [1] * 256), samples_G=[sample([2] * 1024)] * 8) for i in range(8)]
    sizes = [len(batch.tokens_T) for batch in packed(groups, max_tokens=8192)]
    assert len(sizes) == 10 and min(sizes) == 6650 and max(sizes) == 7417


def test_where_even_batches_would_be_more_they_are_filled():
    """Of mean size the samples of 1 and 6 tokens would not go together, and make one batch more."""
    groups = [
        Group(prompt=prompt(0, [1] * 4), samples_G=[sample([2] * n) for n in (1, 6, 2)]),
        Group(prompt=prompt(1, [1]), samples_G=[sample([2] * 5)]),
    ]
    assert [len(batch.tokens_T) for batch in packed(groups, max_tokens=9)] == [9, 5, 5]


def test_batches_of_one_size_are_no_more_than_filled_ones(rng):
    for max_tokens in range(8, 200, 3):
        weighted = [(group, [1.0] * 4) for group in random_groups(6, 4, vocab=50, rng=rng)]
        filled = packing._Filler(max_tokens, weighted).batches
        batches = list(pack(weighted, max_tokens=max_tokens, device=CPU))
        assert len(batches) <= len(filled)
        most = max(sum(branches.num_tokens for branches in batch) for batch in filled)
        assert max(len(batch.tokens_T) for batch in batches) <= max(most, max_tokens)


def test_a_batch_is_laid_out_when_it_is_first_read(monkeypatch):
    """So a GPU that computes the first one does not wait for the second."""
    made, lay_out = [], packing._lay_out
    monkeypatch.setattr(packing, "_lay_out", lambda *given: made.append(1) or lay_out(*given))
    groups = [Group(prompt=prompt(i, [1, 2]), samples_G=[sample([3, 4])]) for i in range(3)]
    batches = pack([(group, [1.0]) for group in groups], max_tokens=3, device=CPU)
    assert len(batches) == 3 and not made
    assert batches[1] is batches[-2] and len(made) == 1
    assert len(list(batches)) == 3 and len(made) == 3


@pytest.mark.gpu
def test_on_a_gpu_a_batch_is_laid_out_without_waiting_for_it(rng, device):
    """What is laid out while a GPU computes the batch before must not end its queue."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    groups = [(group, [1.0] * len(group.samples_G)) for group in random_groups(6, 4, vocab=50, rng=rng)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a prototype, as it says once in a process
            torch.cuda.set_sync_debug_mode("error")
        batches = list(pack(groups, max_tokens=64, device=device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(batches) > 1 and batches[0].spans.places_T.is_cuda


def test_weight_zero_leaves_a_sample_out():
    group = Group(prompt=prompt(0, [1, 2]), samples_G=[sample([3, 4]), sample([5, 6]), sample([7])])
    (batch,) = packed([group], weights_P_G=[[1.0, 0.0, 1.0]])
    assert batch.targets_C.tolist() == [3, 4, 7]
    assert packed([group], weights_P_G=[[0.0, 0.0, 0.0]]) == []


def test_no_groups_make_no_batches():
    assert packed([]) == []
