"""The record of an agent's episode has the experts that the sampler's rows went to."""

import pytest
from agent_episodes import CHATML, playing
from transformers import AutoTokenizer

import tiny_run
from models.family_rows import load, oracle, save
from qerl.config import ModelConfig
from qerl.serve.loaded_model import load_model
from training.test_mixture_run import MANY, routes_of

pytest.importorskip("starlette")
pytest.importorskip("openai")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    tiny_run.write_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    save(oracle("Qwen3Moe", vocab_size=272, **sizes, **MANY), folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


async def turns_and_another_history(client, row):
    messages = [{"role": "user", "content": row["say"]}]
    for _ in range(3):
        got = await client.chat.completions.create(model="gpt-4o", messages=messages)
        messages += [got.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
    await client.chat.completions.create(model="gpt-4o", messages=messages[-1:])
    return 1.0


def test_joined_answers_have_the_routes_of_all_their_rows(folder):
    settings = ModelConfig(path=str(folder), dtype="fp32", format="bf16")
    model, decoder = load_model(str(folder), None, settings, with_adapter=True), load(folder)
    with playing(model, turns_and_another_history) as play:
        groups = play({"say": "hello"}, {"say": "good day"}, num_samples=1)
    for group in groups:
        parts = group.samples_G[0].episode.parts
        assert sorted(len(part.samples_G[0].environment_spans) for part in parts) == [0, 2]
        for part in parts:
            (sample,) = part.samples_G
            assert sample.routes == routes_of(decoder, part.prompt.tokens_T + sample.tokens_T[:-1])
