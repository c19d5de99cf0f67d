"""An agent's episodes are recorded as the engine sampled them."""

import asyncio
import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from agent_episodes import load_tiny, noting_samples, playing, turns_of

from engine.parts import packed_logprobs
from qerl.training.rollouts.rollout import learned_parts

pytest.importorskip("starlette")
pytest.importorskip("openai")
TOKENS = {"logprobs": True, "extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"))


async def answer(client, messages, **options):
    return await client.chat.completions.create(model="gpt-4o", messages=messages, **options)


async def three_turns(client, row):
    """Notes what the client sees in the row's file."""
    messages = [{"role": "user", "content": row["say"]}]
    for _ in range(3):
        got = await answer(client, messages, **TOKENS)
        with Path(row["file"]).open("a") as file:
            choice = got.choices[0]
            seen = [
                got.prompt_token_ids,
                choice.token_ids,
                [each.logprob for each in choice.logprobs.content],
            ]
            file.write(json.dumps(seen) + "\n")
        messages += [got.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
    return 1.0


@pytest.fixture(scope="module")
def conversations(model, tmp_path_factory):
    """(groups, what each row's clients saw, all that the engine sampled)."""
    folder = tmp_path_factory.mktemp("seen")
    rows = [{"say": f"hello {i}", "file": str(folder / str(i))} for i in range(3)]
    with noting_samples() as sampled, playing(model, three_turns) as play:
        groups = play(*rows, num_samples=1)
    seen = [[json.loads(line) for line in Path(row["file"]).read_text().splitlines()] for row in rows]
    return groups, seen, sampled


def test_the_record_is_what_the_engine_sampled_and_what_the_client_saw(conversations):
    groups, seen, sampled = conversations
    recorded = []
    for group, lines in zip(groups, seen, strict=True):
        (part,) = group.samples_G[0].episode.parts
        turns = turns_of(part)
        assert [list(turn) for turn in turns] == lines and len(turns) == 3
        recorded += [turn[1:] for turn in turns]
    assert sorted(recorded) == sorted(sampled)


def test_logprobs_of_a_record_are_those_of_one_forward_over_its_tokens(conversations, model):
    for group in conversations[0]:
        (part,) = group.samples_G[0].episode.parts
        (s,) = part.samples_G
        truth_TV = packed_logprobs(model.engine._decoder, part.prompt, s)
        truth_T = truth_TV[s.sampled_indices, torch.tensor(s.tokens_T)[s.sampled_indices]]
        assert s.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-4)


def test_between_two_turns_stands_what_the_template_puts_there(conversations, model):
    for group in conversations[0]:
        (part,) = group.samples_G[0].episode.parts
        (s,) = part.samples_G
        for span in s.environment_spans:
            text = model.engine.tokenizer.decode(s.tokens_T[span.start : span.stop])
            end = "" if s.tokens_T[span.start - 1] in model.engine.stop_token_ids else "<|im_end|>"
            assert text == f"{end}<|im_start|>user more<|im_end|><|im_start|>assistant "


def test_an_episode_is_a_function_of_seed_step_and_row(model, tmp_path):
    row = {"say": "hi", "file": str(tmp_path / "seen")}
    with playing(model, three_turns) as play:
        first, again, other = play(row), play(row), play(row, step=1)
    tokens = [[s.tokens_T for s in groups[0].samples_G] for groups in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2] and tokens[0][0] != tokens[0][1]


async def compacting(client, row):
    """Three calls of which the last has a history of its own, and a sub-agent beside them."""
    messages = [{"role": "user", "content": "begin"}]
    got = await answer(client, messages)
    messages += [got.choices[0].message.to_dict(), {"role": "user", "content": "on"}]
    await asyncio.gather(
        answer(client, messages), answer(client, [{"role": "user", "content": "sub"}], max_tokens=3)
    )
    await answer(client, [{"role": "system", "content": "so far: nothing"}, messages[0]])
    return {"reward": 0.5, "depth": 2}


def test_histories_that_do_not_continue_are_samples_that_share_the_reward(model):
    with playing(model, compacting) as play:
        (group,) = play({})
    sample = group.samples_G[0]
    lengths = [len(part.samples_G[0].environment_spans) for part in sample.episode.parts]
    assert lengths == [1, 0, 0] and sample.episode.num_turns == 4 and sample.episode.metrics == {"depth": 2.0}
    assert sum(len(p.samples_G[0].logprobs_T) for p in sample.episode.parts) == len(sample.logprobs_T)
    learned = [s for part in learned_parts(group) for s in part.samples_G]
    assert len(learned) == 6 and {s.reward for s in learned} == {0.5}
    assert [each.num_sampled for each in learned_parts(group)] == [2, 2, 2]  # one for each prompt


CHATS_WITHOUT_ANSWERS = {
    "answer left out": [["user"], ["user", "user"]],
    "system alone": [["system"]],
    "result of a tool": [["user", "tool"], ["user", "tool", "tool"]],
    "no message": [["user"], []],
}


async def never_answered(client, row):
    """Sends chats in which nobody has answered yet."""
    for roles in row["chats"]:
        extra = {"tool": {"tool_call_id": "1"}}
        await answer(
            client,
            [{"role": r, "content": f"{r} {i}", **extra.get(r, {})} for i, r in enumerate(roles)],
            max_tokens=4,
        )
    return 0.25


def test_chats_without_an_assistants_turn_are_each_a_sample_with_the_reward(model):
    with playing(model, never_answered) as play:
        groups = play(*({"chats": chats} for chats in CHATS_WITHOUT_ANSWERS.values()), num_samples=1)
    left_out, system, tool, empty = (group.samples_G[0] for group in groups)
    assert [len(s.episode.parts) for s in (left_out, system, tool)] == [2, 1, 2]
    assert [s.episode.num_tool_calls for s in (left_out, system, tool)] == [0, 0, 2]
    for sample, chats in zip((left_out, system, tool), CHATS_WITHOUT_ANSWERS.values(), strict=False):
        assert sample.failure is None and sample.reward == 0.25
        for part, roles in zip(sample.episode.parts, chats, strict=True):
            said = "".join(f"<|im_start|>{r} {r} {i}<|im_end|>" for i, r in enumerate(roles))
            assert model.engine.tokenizer.decode(part.prompt.tokens_T) == f"{said}<|im_start|>assistant "
            assert not part.samples_G[0].environment_spans  # all of its tokens are learned
    cause, message = empty.failure
    assert cause == "raised BadRequestError" and "messages: " in message and empty.reward is None


async def echoing(client, row):
    """Sends the answer back in another form: changed, as parts, with blanks, twice."""
    messages = [{"role": "user", "content": "begin"}]
    got = (await answer(client, messages)).choices[0].message.content
    forms = {
        "parts": [{"role": "assistant", "content": [{"type": "text", "text": got}]}],
        "blanks": [{"role": "assistant", "content": f" {got}\n"}],
        "halves": [{"role": "assistant", "content": got[:2]}, {"role": "assistant", "content": got[2:]}],
        "changed": [{"role": "assistant", "content": f"{got}!"}],
    }
    await answer(client, [*messages, *forms[row["form"]], {"role": "user", "content": "on"}])
    return 1


def test_an_answer_sent_back_in_another_form_is_still_the_sampled_tokens(model):
    with playing(model, echoing) as play:
        groups = play(*({"form": form} for form in ("parts", "blanks", "halves", "changed")))
    parts = [[len(s.episode.parts) for s in group.samples_G] for group in groups]
    assert parts == [[1, 1], [1, 1], [1, 1], [2, 2]]


async def branching(client, row):
    """Two continuations of each of two answers to one request."""
    messages = [{"role": "user", "content": "begin"}]
    got = await answer(client, messages, n=2)
    for choice in got.choices:
        for said in ("a", "b"):
            await answer(client, [*messages, choice.message.to_dict(), {"role": "user", "content": said}])
    return 1


def test_every_sampled_token_is_learned_from_once(model):
    with playing(model, branching) as play:
        (group,) = play({}, num_samples=1)
    (sample,) = group.samples_G
    assert [len(p.samples_G[0].environment_spans) for p in sample.episode.parts] == [1, 1, 0, 0]
    assert sample.episode.num_turns == 6
    turns = [turn for part in sample.episode.parts for turn in turns_of(part)]
    assert sum(len(logprobs) for *_, logprobs in turns) == len(sample.logprobs_T)


async def other_routes(client, row):
    """The responses API in a stream, and a plain completion that continues by its tokens."""
    items = [{"role": "user", "content": "begin"}]
    async for event in await client.responses.create(model="policy", input=items, stream=True):
        last = event
    items += [*(each.to_dict() for each in last.response.output), {"role": "user", "content": "on"}]
    await client.responses.create(model="policy", input=items)
    first = await client.completions.create(model="policy", prompt=[5, 6], extra_body=TOKENS["extra_body"])
    tokens = [5, 6, *first.choices[0].token_ids, 7]
    await client.completions.create(model="policy", prompt=tokens)
    return 1


def test_responses_streams_and_plain_completions_are_recorded_and_joined(model):
    with playing(model, other_routes) as play:
        (group,) = play({})
    for sample in group.samples_G:
        assert sample.failure is None
        assert [len(p.samples_G[0].environment_spans) for p in sample.episode.parts] == [1, 1]
        assert turns_of(sample.episode.parts[1])[1][0][-1] == 7


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"is_big": {"type": "boolean"}},
            "required": ["is_big"],
            "additionalProperties": False,
        },
    },
}


async def calling(client, row):
    """A forced call of a function, and its result."""
    messages = [{"role": "user", "content": "add"}]
    got = await answer(client, messages, tools=[TOOL], tool_choice="required", max_tokens=80)
    message = got.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": row["result"]}
    await answer(client, [*messages, message.to_dict(), result], tools=[TOOL])
    return 1


def test_tool_calls_are_joined_and_their_results_counted(model):
    pytest.importorskip("llguidance")
    with playing(model, calling) as play:
        groups = play({"result": "3"}, {"result": "Error: no such number"}, num_samples=1, max_tokens=80)
    episodes = [group.samples_G[0].episode for group in groups]
    assert [len(each.parts) for each in episodes] == [1, 1]
    assert [(each.num_tool_calls, each.num_tool_failures) for each in episodes] == [(1, 0), (1, 1)]
    assert "tool: 3" in groups[0].samples_G[0].text


async def stubborn(client, row):
    for _ in range(2):  # one prompt twice is two samples
        await answer(client, [{"role": "user", "content": "again"}], temperature=0, seed=1)
    return 1


def test_sampling_is_the_runs_whatever_the_agent_asks_for(model):
    with playing(model, stubborn) as play:
        (group,) = play({}, num_samples=3)
        (best,) = play({}, num_samples=2, temperature=0.0)
    texts = {tuple(p.samples_G[0].tokens_T) for s in group.samples_G for p in s.episode.parts}
    assert len(texts) == 6
    assert len({tuple(p.samples_G[0].tokens_T) for s in best.samples_G for p in s.episode.parts}) == 1


def test_a_closed_endpoint_keeps_neither_engine_nor_cache(tmp_path):
    """The caches of FastAPI kept an application, and with it each engine, as long as the process."""
    loaded = load_tiny(tmp_path)
    with playing(loaded, hello) as play:
        (group,) = play({}, num_samples=1)
    assert group.samples_G[0].failure is None
    engine = weakref.ref(loaded.engine)
    del loaded, play, group
    gc.collect()
    assert engine() is None


def hello(client):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=2)
    return 1.0
