import pytest
import torch
import torch.nn.functional as F

from models.tiny import forest, packed, tiny
from qerl.aqn.norm_noise import noised

SETTINGS = {"sigma": 0.1, "unit": "absolute", "seed": 0, "step": 3}
FOUR = range(4)


def decoder_per(per, num_keys=4):
    decoder = tiny()
    decoder.noise_table.open(per, num_keys)
    return decoder


def logits_of(decoder, tokens_T, lengths, noise_rows_T=None):
    """Return the logits of packed sequences."""
    positions_T, attend = packed(forest(*((length, ()) for length in lengths)))
    return decoder.logits(decoder(tokens_T, positions_T, attend, noise_rows_T=noise_rows_T))


def noises(decoder, members, **settings):
    """{(prompt index, sample index): every norm's noise}, the prompt's own under (prompt index, None)."""
    with noised(decoder.noise_table, **(SETTINGS | settings)) as num_norms:
        assert num_norms == 6
        found = {}
        for (prompt, samples), (row, rows) in zip(members, decoder.noise_table.rows(members), strict=True):
            for sample, each in [(None, row), *zip(samples, rows, strict=True)]:
                found[prompt, sample] = torch.stack(
                    [n.noise[each].clone() for n in decoder.noise_table.norms]
                )
        return found


def test_by_group_samples_share_a_draw_and_two_groups_do_not():
    found = noises(decoder_per("group"), [(7, FOUR), (2, FOUR)])
    assert all(torch.equal(found[p, s], found[p, None]) for p in (7, 2) for s in FOUR)
    assert (found[7, 0] != found[2, 0]).all() and found[7, 0].std() == pytest.approx(0.1, rel=0.2)


def test_by_sample_each_has_a_draw_and_prompts_have_none():
    found = noises(decoder_per("sample"), [(7, FOUR), (2, FOUR)])
    draws = [found[7, s] for s in FOUR]
    assert all((draws[i] != draws[j]).all() for i in FOUR for j in range(i))
    assert all(torch.equal(found[2, s], draws[s]) for s in FOUR)
    assert not found[7, None].any() and not found[2, None].any()


@pytest.mark.parametrize("per", ["group", "sample"])
def test_a_draw_follows_from_its_coordinates_whoever_else_asks(per):
    decoder = decoder_per(per)
    whole = noises(decoder, [(p, FOUR) for p in (9, 4, 6)])
    for members in ([(6, [2])], [(4, [3, 0]), (9, [1])], [(p, [1]) for p in (1, 0, 4, 6)]):
        for place, draw in noises(decoder, members).items():
            assert place not in whole or torch.equal(draw, whole[place])
    for settings in ({"seed": 1}, {"step": 4}):
        assert (noises(decoder, [(9, [0])], **settings)[9, 0] != whole[9, 0]).all()


def test_more_prompts_than_rows_take_turns():
    """As rounds of dynamic sampling do, each of which asks for its own prompts alone."""
    decoder = decoder_per("group", num_keys=2)
    with noised(decoder.noise_table, **SETTINGS):
        firsts = []
        for prompts in ((0, 1), (1, 2), (2, 0)):
            ((row, _), _) = decoder.noise_table.rows([(p, [0]) for p in prompts])
            firsts.append(decoder.noise_table.norms[0].noise[row].clone())
        assert decoder.noise_table.num_drawn == 6
    want = noises(decoder_per("group"), [(p, [0]) for p in range(4)])
    assert [torch.equal(f, want[p, 0][0]) for f, p in zip(firsts, (0, 1, 2), strict=True)] == [True] * 3


@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_without_noise_and_after_it_every_row_is_zero(sigma):
    decoder = decoder_per("sample")
    with noised(decoder.noise_table, **(SETTINGS | {"sigma": sigma})):
        ((_, rows),) = decoder.noise_table.rows([(0, FOUR)])
        assert len(set(rows)) == (4 if sigma else 1)
    assert decoder.noise_table.rows([(0, FOUR)]) == [(0, [0] * 4)]
    assert not any(norm.noise.any() for norm in decoder.noise_table.norms)


def test_relative_noise_is_in_units_of_each_norm():
    decoder = decoder_per("sample")
    plain = noises(decoder, [(0, FOUR)])[0, 2]
    for index, norm in enumerate(decoder.noise_table.norms):
        norm.weight.mul_(0.1 * (index + 1))
    sizes = torch.stack([norm.weight.square().mean().sqrt() for norm in decoder.noise_table.norms])
    torch.testing.assert_close(noises(decoder, [(0, FOUR)], unit="relative")[0, 2], plain * sizes[:, None])


def test_a_packed_forward_is_each_rows_forward_under_its_own_noise():
    """Two sequences of one batch, each as if the step's noise were its row; and a plain norm in float64."""
    decoder, tokens_T = decoder_per("sample", 2), torch.arange(24) * 11 % 61
    with noised(decoder.noise_table, **SETTINGS):
        ((_, rows),) = decoder.noise_table.rows([(0, range(2))])
        noise_rows_T = torch.tensor(rows, dtype=torch.int32).repeat_interleave(12)
        both = logits_of(decoder, tokens_T, (12, 12), noise_rows_T)
        norm = decoder.noise_table.norms[3]
        x = torch.randn(24, 48, dtype=torch.float64)
        want = F.rms_norm(x, (48,), None, norm.eps) * (norm.weight + norm.noise[noise_rows_T.long()]).double()
        torch.testing.assert_close(norm(x.float(), noise_rows_T)[0].double(), want, atol=1e-6, rtol=1e-6)
        vectors = [[n.noise[row].clone() for n in decoder.noise_table.norms] for row in rows]
    for half, (part, vector) in enumerate(zip(both.split(12), vectors, strict=True)):
        alone = tiny()
        for norm, noise in zip(alone.noise_table.norms, vector, strict=True):
            norm.noise.copy_(noise)
        tokens = tokens_T[12 * half : 12 * half + 12]
        torch.testing.assert_close(part, logits_of(alone, tokens, (12,)), atol=1e-5, rtol=1e-5)
    assert (both[:12] - both[12:]).abs().max() > 0.1
