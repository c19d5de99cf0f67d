"""Pages kept between two calls of an episode: what is computed then, and that nothing else changes."""

import contextlib
from unittest import mock

import pytest
from agent_episodes import load_tiny, playing, turns_of

from qerl.engine.prefill.prefill import Prefill
from qerl.engine.schedule.kept_pages import KeptPages

pytest.importorskip("starlette")
pytest.importorskip("openai")
PAGE = 16


async def two_calls(client, row):
    messages = [{"role": "user", "content": f"row {row['index']} of some that are as long as this"}]
    got = await client.chat.completions.create(model="m", messages=messages, max_tokens=24)
    messages += [got.choices[0].message.to_dict(), {"role": "user", "content": "and then"}]
    await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
    return 1.0


async def an_echo(client, row):
    prompt = f"row {row['index']} of some that are as long as this"
    for _ in range(2):
        options = {"logprobs": 1, "echo": True} if row["echo"] else {}
        await client.completions.create(model="m", prompt=prompt, max_tokens=4, **options)
    return 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def noting_chunks():
    """A list that gets (first position, number of tokens) of each chunk that is computed."""
    chunks, call = [], Prefill.__call__

    def note(self, given):
        chunks.extend((chunk.first_position, len(chunk.tokens_T)) for chunk in given)
        return call(self, given)

    with mock.patch.object(Prefill, "__call__", note):
        yield chunks


def played(model, agent, *rows, fraction, **settings):
    """The samples, and what was computed for them."""
    with (
        noting_chunks() as chunks,
        playing(model, agent, kept_pages_fraction=fraction, **settings) as play,
    ):
        groups = play(*rows, num_samples=1, max_tokens=24)
        metrics = play.take_metrics()
    samples = [s for group in groups for s in group.samples_G]
    assert not [s.failure for s in samples if s.failure]
    return samples, chunks, metrics


def test_the_second_call_computes_the_new_tokens_alone_and_samples_the_same(model):
    row = {"index": 0}
    with_kept, chunks, metrics = played(model, two_calls, row, fraction=0.5)
    without, all_chunks, all_metrics = played(model, two_calls, row, fraction=0.0)
    (first, said, _), (second, _, _) = turns_of(with_kept[0].episode.parts[0])
    num_kept = (len(first) + len(said) - 1) // PAGE * PAGE
    assert num_kept > len(first), "pages of the answer are kept too"
    assert chunks == [(0, len(first)), (num_kept, len(second) - num_kept)]
    assert all_chunks == [(0, len(first)), (0, len(second))]
    assert [s.tokens_T for s in with_kept] == [s.tokens_T for s in without]
    assert with_kept[0].logprobs_T == pytest.approx(without[0].logprobs_T, abs=1e-4)
    total = len(first) + len(second)
    assert metrics == {"kept_tokens": num_kept, "prefill_tokens": total - num_kept}
    assert all_metrics == {"kept_tokens": 0, "prefill_tokens": total}


def test_a_call_that_asks_for_its_prompts_logprobs_computes_it_all(model):
    _, chunks, metrics = played(model, an_echo, {"index": 0, "echo": True}, fraction=0.5)
    assert [first for first, _ in chunks] == [0, 0] and metrics["kept_tokens"] == 0
    _, chunks, metrics = played(model, an_echo, {"index": 0, "echo": False}, fraction=0.5)
    assert [first for first, _ in chunks] == [0, metrics["kept_tokens"]] and metrics["kept_tokens"] > 0


def test_nothing_is_kept_for_another_episode_or_after_its_own(model):
    forgotten, forget = [], KeptPages.forget

    def note(self, episodes):
        before = self._pool.num_kept
        forget(self, episodes)
        forgotten.append(before - self._pool.num_kept)

    rows = [{"index": 0}] * 3
    with mock.patch.object(KeptPages, "forget", note):
        samples, chunks, _ = played(model, two_calls, *rows, fraction=0.5, max_concurrent=1)
    assert [first > 0 for first, _ in chunks] == [False, True] * 3
    assert sum(forgotten) > 0, "of the episodes before the last"
    assert len({s.sample_index for s in samples}) == 1


def test_nothing_is_kept_from_one_step_to_the_next_(model):
    with noting_chunks() as chunks, playing(model, two_calls) as play:
        before = play({"index": 0}, num_samples=1, max_tokens=24)[0].samples_G[0]
        same = play({"index": 0}, num_samples=1, max_tokens=24)[0].samples_G[0]
    assert [first > 0 for first, _ in chunks] == [False, True] * 2
    assert before.tokens_T == same.tokens_T and before.logprobs_T == pytest.approx(same.logprobs_T, abs=1e-4)
