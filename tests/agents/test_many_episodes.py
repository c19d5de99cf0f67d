"""Hundreds of episodes at once: none waits for another's tool, in a cache that holds a few of them."""

import asyncio
import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
from agent_episodes import CHATML, playing, turns_of

import tiny_run
from engine.parts import packed_logprobs
from qerl.config import EngineConfig, ModelConfig, NoiseConfig, RunConfig
from qerl.cost.cache import page_bytes
from qerl.engine.schedule.page_pool import PagePool
from qerl.engine.schedule.scheduler import Scheduler
from qerl.serve.loaded_model import LoadedModel
from qerl.training.policy import load_sampler, load_tokenizer_and_limit
from qerl.training.rollouts.rollout import agent_metrics

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
NUM_PAGES = 40
NUM_LONG = 10
SLEEP_S = 0.4
WAITING = []  # in the agents' process


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose cache has 40 pages of 16 tokens: about ten requests of this file."""
    folder = tmp_path_factory.mktemp("model")
    tiny_run.write_model(folder, max_positions=256)
    (folder / "chat_template.jinja").write_text(CHATML)
    config = RunConfig(
        model=ModelConfig(path=str(folder), dtype="fp32", device="cpu"),
        noise=NoiseConfig(schedule="none"),
    )
    tokenizer, _ = load_tokenizer_and_limit(config)
    decoder, _ = load_sampler(config, tokenizer)
    gb = NUM_PAGES * page_bytes(decoder.architecture, 16, decoder.compute) / 1e9
    engine = EngineConfig(block_size=16, kv_cache_gb=gb, max_num_seqs=64)
    _, engine = load_sampler(dataclasses.replace(config, engine=engine), tokenizer)
    return LoadedModel(engine, engine.max_positions)


async def ask(client, messages, **options):
    got = await client.chat.completions.create(model="m", messages=messages, **options)
    return got.choices[0].message.to_dict()


async def with_tools(client, row):
    """An answer, a tool that takes its time and may fail, and a second answer. The first answers are long:
    those that run together need more pages than there are."""
    messages = [{"role": "user", "content": f"row {row['index']}"}]
    said = await ask(client, messages, max_tokens=64 if row["index"] < NUM_LONG else 6)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    WAITING.append(row["index"])
    num_waiting = len(WAITING)
    await asyncio.sleep(SLEEP_S)
    WAITING.pop()
    if row["index"] == 3:
        raise RuntimeError("the tool is gone")
    result = "Error: nothing there" if row["index"] == 7 else "found"
    messages += [{**said, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": result}]
    await ask(client, messages, max_tokens=6)
    return {"reward": 1.0, "beside": num_waiting}


class Counted:
    """The pages that samples got, the fewest that were free, the kept ones that were given up, and
    the samples that lost theirs."""

    def __init__(self):
        self.num_allocated, self.fewest_free = 0, NUM_PAGES
        self.most_kept = self.num_given_up = 0
        self.preempted: list[list[int]] = []
        """The tokens that they had."""

    @contextlib.contextmanager
    def counting(self):
        allocate, preempt = PagePool.allocate, Scheduler._preempt

        def counted_allocate(pool, num):
            num_kept = pool.num_kept
            pages = allocate(pool, num)
            self.most_kept = max(self.most_kept, num_kept)
            self.num_given_up += num_kept - pool.num_kept
            if pool.num_pages == NUM_PAGES:  # others have no pages: the model has no windows
                self.num_allocated += num
                self.fewest_free = min(self.fewest_free, pool.num_free)
            return pages

        def counted_preempt(scheduler, sample):
            self.preempted.append(list(sample.tokens_T))
            preempt(scheduler, sample)

        with (
            mock.patch.object(PagePool, "allocate", counted_allocate),
            mock.patch.object(Scheduler, "_preempt", counted_preempt),
        ):
            yield


@pytest.fixture(scope="module")
def counted():
    return Counted()


@pytest.fixture(scope="module")
def played(model, counted):
    """The samples of 200 episodes."""
    rows = [{"index": i} for i in range(50)]
    with playing(model, with_tools, max_concurrent=256) as play, counted.counting():
        groups = play(*rows, num_samples=4, max_tokens=64)
    return [s for group in groups for s in group.samples_G]


def test_pages_run_out_are_given_up_and_are_used_again(played, counted):
    num_tokens = [
        len(part.prompt.tokens_T) + len(part.samples_G[0].tokens_T)
        for sample in played
        for part in sample.episode.parts
    ]
    assert sum(num_tokens) / 16 > 20 * NUM_PAGES  # all conversations together have no place
    assert counted.num_allocated > 20 * NUM_PAGES and counted.fewest_free <= 1
    assert len(counted.preempted) > 4


def test_kept_pages_are_given_up_and_no_request_waits_for_them(played, counted):
    """Those that were admitted left as few pages free as they do without kept pages."""
    assert counted.num_given_up > 20
    assert 0 < counted.most_kept <= NUM_PAGES // 2 and counted.fewest_free <= 1


def test_no_episode_waits_for_the_tools_of_others(played):
    samples = played
    beside = [s.episode.metrics["beside"] for s in samples if s.failure is None]
    assert len(samples) == 200 and max(beside) > 4
    assert {s.failure and s.failure[0] for s in samples} == {None, "raised RuntimeError"}
    assert sum(s.failure is not None for s in samples) == 4  # its own episodes only


def test_what_is_recorded_under_page_pressure_is_whole(played, counted, model):
    """A request that lost its pages goes on with the tokens that it had, as if it had kept them."""
    for sample in played:
        for part in sample.episode.parts:
            (own,) = part.samples_G
            assert len(own.logprobs_T) == len(own.sampled_indices) and all(x <= 0 for x in own.logprobs_T)
    parts = [part for sample in played for part in sample.episode.parts]
    told = [tokens_T for tokens_T in counted.preempted if len(tokens_T) >= 4]  # enough to know it again
    assert told
    for tokens_T in told:
        (part,) = (p for p in parts if any(t[1][: len(tokens_T)] == tokens_T for t in turns_of(p)))
        (own,) = part.samples_G
        truth_TV = packed_logprobs(model.engine._decoder, part.prompt, own)
        truth_T = truth_TV[own.sampled_indices, torch.tensor(own.tokens_T)[own.sampled_indices]]
        assert own.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-4)


def test_metrics_tell_of_turns_tools_and_waiting(played):
    samples = [dataclasses.replace(s, reward=None if s.failure else 1.0) for s in played]
    metrics = agent_metrics(samples)
    assert metrics["turns"] == (2 * 196 + 4) / 200 and metrics["num_failed_episodes"] == 4
    assert (metrics["tool_calls"], metrics["tool_failures"]) == (196, 4)
    assert metrics["learned_tokens"] == sum(len(s.logprobs_T) for s in samples if s.reward is not None) > 0
    assert 0 < metrics["waiting_share"] < 1


def test_an_answer_does_not_depend_on_how_many_pages_there_are(played, model):
    """The same episodes one after the other, where no request loses its pages."""
    with playing(model, with_tools, max_concurrent=1) as play:
        (group,) = play({"index": 0}, num_samples=2, max_tokens=64)
    alone, beside = group.samples_G, played[:2]
    assert [s.tokens_T for s in alone] == [s.tokens_T for s in beside]
