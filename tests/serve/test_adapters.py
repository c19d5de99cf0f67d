"""Adapters that requests name: several at once, loaded and unloaded by endpoint."""

import concurrent.futures
import errno
import json

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl.config.options import ServeOptions
from qerl.errors import UserError
from qerl.serve.adapters import ServedAdapters
from qerl.serve.app import make_app
from qerl.serve.request import RequestParser
from qerl.serve.server import make_adapters
from serve import parts

KEY = "sk-tiny-0123456789"


def write_adapter(folder, seed, *, rank=4, width=64, **fields):
    """A PEFT adapter of q_proj and down_proj of the tiny model."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, shape in (("self_attn.q_proj", (64, width)), ("mlp.down_proj", (64, 96))):
            place = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(rank, shape[1], generator=rng)
            tensors[f"{place}.lora_B.weight"] = torch.randn(shape[0], rank, generator=rng)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(folder / name, seed)
    write_adapter(folder / "wide", 1, width=32)
    return folder


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """(address, adapters)"""
    model = parts.load_tiny(tmp_path_factory.mktemp("tiny"))
    options = ServeOptions(**parts.LIMITS, adapter_folder=folder, max_adapters=2)
    adapters = make_adapters(model, options)
    parser = RequestParser(model=model, options=options, name="tiny", adapters=adapters)
    app = make_app(parser, parts.batcher_of(model), api_key=KEY)
    with parts.serving(app) as address:
        yield address, adapters


def post(served, route, **body):
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{served[0]}/{route}_lora_adapter", json=body, headers=headers)


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served[0], api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def loaded(served):
    for name in ("one", "two"):
        assert post(served, "load", lora_name=name, lora_path=name).status_code == 200
    yield
    for name in served[1].names:
        assert post(served, "unload", lora_name=name).status_code == 200


def answer(client, name, tokens=20):
    return client.completions.create(model=name, prompt="hello", max_tokens=tokens, seed=1)


def test_requests_of_several_adapters_at_once_get_what_each_gets_alone(client, loaded):
    names = "tiny", "one", "two"
    alone = [answer(client, name) for name in names]
    assert [each.model for each in alone] == list(names)
    assert len({each.choices[0].text for each in alone}) == 3
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda name: answer(client, name), names * 2))
    assert [each.choices[0].text for each in together] == [each.choices[0].text for each in alone] * 2
    assert [model.id for model in client.models.list()] == list(names)


def test_an_unloaded_adapter_is_unknown_and_answers_what_it_has(client, served, loaded):
    whole = answer(client, "one", 300).choices[0].text
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        client.completions.create(model="one", prompt="hello", max_tokens=300, seed=1, stream=True) as stream,
    ):
        pieces = [next(stream).choices[0].text]
        assert pool.submit(post, served, "unload", lora_name="one").result().status_code == 200
        with pytest.raises(openai.NotFoundError, match="this server has tiny, two"):
            answer(client, "one")
        pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole
    assert post(served, "load", lora_name="other", lora_path="one").status_code == 200
    assert answer(client, "other", 300).choices[0].text == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_grammar_cannot_begin_is_over_for_its_adapter(served, loaded, monkeypatch, stream):
    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("qerl.serve.grammar.Pipe", fail)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
    body = {"model": "one", "messages": [{"role": "user", "content": "?"}], "response_format": schema}
    headers = {"authorization": f"Bearer {KEY}"}
    reply = httpx.post(f"{served[0]}/chat/completions", json=body | {"stream": stream}, headers=headers)
    assert reply.status_code == 500
    assert served[1]._adapters["one"].num_requests == 0


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        ("load", {"lora_name": "three", "lora_path": "three"}, 400, "2 adapters are loaded"),
        ("load", {"lora_name": "one", "lora_path": "one"}, 400, "one is loaded: unload it first"),
        ("load", {"lora_name": "x", "lora_path": "../.."}, 400, "must lie below"),
        ("load", {"lora_name": "x", "lora_path": "/etc"}, 400, "must lie below"),
        ("load", {"lora_name": "x", "lora_path": "none"}, 400, "no such folder"),
        ("load", {"lora_name": "x", "lora_path": "wide"}, 400, "the model's are"),
        ("load", {"lora_name": "x y", "lora_path": "one"}, 400, "letters, digits"),
        ("load", {"lora_name": "x"}, 400, "lora_path must be given"),
        ("load", {"lora_name": "tiny", "lora_path": "one"}, 400, "tiny is the model"),
        ("unload", {"lora_name": "x"}, 404, "there is no adapter 'x'"),
    ],
)
def test_a_wrong_request_changes_nothing(served, loaded, route, body, status, message):
    response = post(served, route, **body)
    assert response.status_code == status and message in response.json()["error"]["message"]
    assert served[1].names == ("one", "two")


def test_without_a_folder_no_adapter_is_loaded(tmp_path):
    model = parts.load_tiny(tmp_path)
    app, _ = parts.app_of(model, key=KEY)
    with parts.serving(app) as address:
        assert post((address,), "load", lora_name="one", lora_path="one").status_code == 403
    with pytest.raises(UserError, match=r"adapter_folder .*none: no such folder"):
        make_adapters(model, ServeOptions(adapter_folder=tmp_path / "none"))
    with pytest.raises(UserError, match="own decoder"):
        ServedAdapters(torch.nn.Identity(), tmp_path, 2)


def test_an_adapter_above_the_largest_rank_or_with_numbers_not_finite_is_refused(tmp_path):
    write_adapter(tmp_path / "wide", 0, rank=8)
    write_adapter(tmp_path / "broken", 0)
    tensors = load_file(tmp_path / "broken" / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.inf
    save_file(tensors, tmp_path / "broken" / "adapter_model.safetensors", {"format": "pt"})
    model = parts.load_tiny(tmp_path / "tiny")
    adapters = make_adapters(model, ServeOptions(adapter_folder=tmp_path, max_lora_rank=4))
    for name, message in (("wide", "rank is above 4"), ("broken", "not finite")):
        with pytest.raises(UserError, match=message):
            adapters.load(name, name)
    assert adapters.names == () and adapters.bank.num_free == 8


def test_linears_of_an_adapter_have_their_own_names_ranks_and_scalings(tmp_path):
    names = [
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    ]
    write_adapter(tmp_path / "named", 0, target_modules=names, alpha_pattern={"layers.1.mlp.down_proj": 24})
    decoder = parts.load_tiny(tmp_path / "tiny").engine.model
    ServedAdapters(decoder, tmp_path, 2).load("named", "named")
    tables = decoder.adapter_bank.at(torch.tensor([1])).tables
    stored = load_file(tmp_path / "named" / "adapter_model.safetensors")
    assert len(tables) == 4
    for name, linear in decoder.linears():
        if f"model.{name}" in names:
            a_RK, b_NR = (stored[f"base_model.model.model.{name}.lora_{side}.weight"] for side in "AB")
            a_SK, b_NS, _, scaling_S = tables[linear]
            scaling = 6.0 if name == "layers.1.mlp.down_proj" else 2.0
            torch.testing.assert_close(b_NS * scaling_S @ a_SK, scaling * b_NR @ a_RK)
