"""The released client `tinker`, unmodified, against a server of a tiny model on a CPU."""

import asyncio
import logging
import math
import time
import urllib.error
import urllib.request

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file

import tiny_run
from tinker_server.tinker_parts import serving

tinker = pytest.importorskip("tinker")
types = tinker.types
holders = pytest.importorskip("tinker.lib.internal_client_holder")
# the client leaves connections to the collector
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
KEY = "tml-test"
TEXT = [5, 9, 7, 3, 8, 9, 7, 3, 5, 2]


@pytest.fixture(scope="module", autouse=True)
def ended_clients():
    """End what the client's thread still tries with servers that are gone: it draws from the process's
    `random` for it, which Hypothesis notices in other tests."""
    yield
    if (loop := holders._internal_client_holder_thread_singleton.loop_if_started()) is not None:
        asyncio.run_coroutine_threadsafe(cancelled(), loop).result(30)


async def cancelled():
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=20) if tasks else None
    assert not [task for task in tasks if not task.done()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_run.write_model(tmp_path_factory.mktemp("model"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] *= 6  # the head too: logits far from uniform can be learned
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def address(model, tmp_path_factory):
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with serving(model, tmp_path_factory.mktemp("checkpoints"), device_adapters=1) as address:
        yield address


@pytest.fixture
def service(address):
    client = tinker.ServiceClient(base_url=address, api_key=KEY)
    yield client
    client.close("success").result()


def trainer(service, *, rank=4, seed=1, **which):
    return service.create_lora_training_client("tiny", rank=rank, seed=seed, **which).result()


def datum(tokens=TEXT, **inputs):
    given = types.ModelInput.from_ints(tokens[:-1])
    named = {"target_tokens": tokens[1:], **inputs}
    arrays = {key: torch.as_tensor(value) for key, value in named.items()}
    return types.Datum(model_input=given, loss_fn_inputs=arrays)


def step(client, data, loss="cross_entropy", *, learning_rate=1e-2, **config):
    passed = client.forward_backward(data, loss, config or None)
    updated = client.optim_step(types.AdamParams(learning_rate=learning_rate))
    assert updated.result().metrics["grad_norm"] > 0
    return passed.result()


def logprobs_of(client, tokens=TEXT):
    return client.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()


def test_a_supervised_loop_lowers_its_loss(service):
    client, data = trainer(service), [datum(weights=[1.0] * 9), datum([4, 4, 6, 4], weights=[0.0, 1.0, 1.0])]
    losses = [step(client, data, learning_rate=2e-2).metrics["loss:sum"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    assert [len(each["logprobs"].data) for each in outputs] == [9, 3]


def test_an_rl_loop_with_importance_sampling_raises_its_reward(service):
    client, means = trainer(service, rank=8), []
    prompt = types.ModelInput.from_ints(TEXT[:3])
    how = types.SamplingParams(max_tokens=4, stop=[], temperature=1.0)
    for index in range(12):
        sampler = client.save_weights_and_get_sampling_client().result()
        how = how.model_copy(update={"seed": index})
        sequences = sampler.sample(prompt, 32, how).result().sequences
        rewards = [sum(token % 2 == 0 for token in each.tokens) / 4 for each in sequences]
        means.append(sum(rewards) / 32)
        if len(set(rewards)) == 1:
            break  # nothing is left to learn
        data = [
            datum(
                TEXT[:3] + each.tokens,
                logprobs=[0.0] * 2 + each.logprobs,
                advantages=[0.0] * 2 + [reward - means[-1]] * 4,
            )
            for each, reward in zip(sequences, rewards, strict=True)
        ]
        step(client, data, "importance_sampling", learning_rate=3e-2)
    assert means[-1] > means[0] + 0.2


def test_logprobs_of_samples_are_those_of_a_forward_pass(service):
    client = trainer(service)
    for _ in range(3):
        step(client, [datum()])
    sampler = client.save_weights_and_get_sampling_client().result()
    how = types.SamplingParams(max_tokens=8, seed=3, stop=[])
    prompt = types.ModelInput.from_ints(TEXT)
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3}
    result = sampler.sample(prompt, 2, how, **asked).result()
    for sequence in result.sequences:
        assert len(sequence.tokens) == 8 and sequence.stop_reason == "length"
        passed = logprobs_of(client, TEXT + sequence.tokens)
        assert result.prompt_logprobs[0] is None
        assert result.prompt_logprobs[1:] + sequence.logprobs == pytest.approx(passed, abs=1e-4)
        assert [len(each) for each in sequence.topk_logprobs] == [3] * 8
    assert [each and len(each) for each in result.topk_prompt_logprobs] == [None] + [2] * 9
    assert sampler.compute_logprobs(prompt).result() == result.prompt_logprobs
    assert sampler.sample(prompt, 2, how).result().sequences[1].tokens == result.sequences[1].tokens


def test_a_sample_ends_with_a_stop_token_or_text(service):
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt, how = types.ModelInput.from_ints(TEXT), types.SamplingParams(max_tokens=20, seed=5, stop=[])
    tokens = sampler.sample(prompt, 1, how).result().sequences[0].tokens
    assert len(tokens) == 20
    for stop in ([tokens[6]], trainer(service).get_tokenizer().decode(tokens[6])):
        first = tokens.index(tokens[6])
        (each,) = sampler.sample(prompt, 1, how.model_copy(update={"stop": stop})).result().sequences
        assert each.tokens == tokens[: first + 1] and each.stop_reason == "stop"


def test_two_clients_at_once_learn_what_each_learns_alone(service):
    data = [datum()], [datum([8, 6, 8, 6, 1])]
    alone = []
    for seed in (1, 2):
        client = trainer(service, seed=seed, rank=4 * seed)
        for _ in range(3):
            step(client, data[seed - 1])
        alone.append(logprobs_of(client))
    clients = [trainer(service, seed=seed, rank=4 * seed) for seed in (1, 2)]
    for _ in range(3):
        passed = [c.forward_backward(d, "cross_entropy") for c, d in zip(clients, data, strict=True)]
        updated = [c.optim_step(types.AdamParams(learning_rate=1e-2)) for c in clients]
        for future in passed + updated:
            future.result()
    assert [logprobs_of(client) for client in clients] == alone
    assert alone[0] != alone[1]


def test_a_saved_state_continues_bit_for_bit(service, address):
    client = trainer(service)
    for _ in range(2):
        step(client, [datum()])
    path = client.save_state("two").result().path
    sampler_path = client.save_weights_for_sampler("two").result().path
    before = logprobs_of(client)
    step(client, [datum()])
    after = logprobs_of(client)
    other = service.create_training_client_from_state_with_optimizer(path).result()
    assert logprobs_of(other) == before != after
    step(other, [datum()])
    assert logprobs_of(other) == after
    fresh = service.create_training_client_from_state(path).result()
    step(fresh, [datum()])
    assert logprobs_of(fresh) != after  # without its moments
    sampler = service.create_sampling_client(model_path=sampler_path).result()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    assert scored[1:] == pytest.approx(before, abs=1e-4)
    rest = tinker.RestClient(base_url=address, api_key=KEY)
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert {each.tinker_path for each in listed} == {path, sampler_path}
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="no checkpoint"):
        service.create_training_client_from_state(path).result()


def test_a_checkpoint_is_downloaded_as_a_peft_adapter(model, tmp_path):
    with serving(model, tmp_path / "server", key="tml-right") as address:
        service = tinker.ServiceClient(base_url=address, api_key="tml-right")
        client = trainer(service, user_metadata={"renderer_name": "plain"})
        step(client, [datum()])
        state = client.save_state("kept", ttl_seconds=3600).result().path
        path = client.save_weights_external("adapter").result().path
        rest = tinker.RestClient(base_url=address, api_key="tml-right")
        urls = rest.get_external_weights_urls(path).result().urls
        assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
        for name, url in urls.items():
            urllib.request.urlretrieve(url, tmp_path / name)
        for wrong in (url.replace("signature=", "signature=0"), url.partition("?")[0]):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(wrong)
        rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
        first, second = rest.list_user_checkpoints(limit=5).result().checkpoints
        assert (first.checkpoint_type, second.checkpoint_type) == ("external", "training")
        assert second.tinker_path == state and second.expires_at is None
        run = rest.get_training_run_by_tinker_path(state).result()
        assert run.user_metadata == {"renderer_name": "plain"} and run.last_checkpoint == second
        assert rest.list_training_runs().result().training_runs[0].training_run_id == client.model_id
        saved = client.save_weights_for_sampler("same").result().path
        service.close("success").result()
    expected = load_file(tmp_path / "server" / saved.removeprefix("tinker://") / "adapter_model.safetensors")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == expected.keys() and all(tensors[key].equal(expected[key]) for key in expected)
    assert PeftConfig.from_pretrained(tmp_path).r == 4


def test_samplers_of_several_adapters_at_once_give_what_each_gives_alone(service):
    prompt, how = types.ModelInput.from_ints(TEXT), types.SamplingParams(max_tokens=12, seed=3, stop=[])
    samplers = [service.create_sampling_client(base_model="tiny").result()]
    for seed, rank in ((1, 4), (2, 8)):
        client = trainer(service, seed=seed, rank=rank)
        for _ in range(2):
            step(client, [datum([4 + seed, 6, 4, 6, 4])], learning_rate=5e-2)
        samplers.append(client.save_weights_and_get_sampling_client().result())
    alone = [each.sample(prompt, 2, how).result().sequences for each in samplers]
    futures = [each.sample(prompt, 2, how) for each in samplers]
    together = [future.result().sequences for future in futures]
    for before, now in zip(alone, together, strict=True):
        for one, other in zip(before, now, strict=True):
            assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert len({str(each[0].tokens) for each in alone}) == 3


@pytest.mark.parametrize("shared_adapters", (0, 8))
def test_an_interrupted_sample_is_that_of_one_that_is_not(model, tmp_path, shared_adapters):
    with serving(model, tmp_path, shared_adapters=shared_adapters, max_turn_s=1e-3) as address:
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        client, prompt = trainer(service, seed=1), types.ModelInput.from_ints(TEXT)
        step(client, [datum()], learning_rate=5e-2)
        samplers = [client.save_weights_and_get_sampling_client().result()]
        samplers.append(service.create_sampling_client(base_model="tiny").result())
        how = types.SamplingParams(max_tokens=60, seed=3, stop=[])
        asked = {"include_prompt_logprobs": True, "topk_sample_logprobs": 2}
        alone = [each.sample(prompt, 2, how, **asked).result() for each in samplers]
        futures = [each.sample(prompt, 2, how, **asked) for each in samplers]
        for _ in range(6):
            step(client, [datum()])
        for before, future in zip(alone, futures, strict=True):
            now = future.result()
            assert now.prompt_logprobs[1:] == pytest.approx(before.prompt_logprobs[1:], abs=1e-4)
            for one, other in zip(before.sequences, now.sequences, strict=True):
                assert one.tokens == other.tokens and len(one.topk_logprobs) == len(other.topk_logprobs) == 60
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert alone[0].sequences[0].tokens != alone[1].sequences[0].tokens
        service.close("success").result()


def test_noise_of_samplers_is_asked_for_in_the_metadata_and_learning_has_none(service):
    with pytest.raises(Exception, match="aqn_sigma must be a number from 0 on, got 'much'"):
        trainer(service, user_metadata={"aqn_sigma": "much"})
    client, prompt = trainer(service, user_metadata={"aqn_sigma": "0.3"}), types.ModelInput.from_ints(TEXT)
    before = logprobs_of(client)
    samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(2)]
    noisy = [each.compute_logprobs(prompt).result()[1:] for each in samplers for _ in range(2)]
    assert noisy[0] == noisy[1] and noisy[2] == noisy[3]  # one noise as long as the sampler lives
    for one, other in ((noisy[0], before), (noisy[2], before), (noisy[0], noisy[2])):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.01
    assert logprobs_of(client) == before
    plain = trainer(service).save_weights_and_get_sampling_client().result()
    assert plain.compute_logprobs(prompt).result()[1:] == pytest.approx(before, abs=1e-4)


def test_several_targets_per_position_are_the_sum_of_single_ones(service):
    others = [1, *TEXT[2:]]
    several, single = trainer(service), trainer(service)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    both = [datum(target_tokens=[list(pair) for pair in zip(TEXT[1:], others, strict=True)], weights=weights)]
    result = step(several, both)
    parts = [datum(target_tokens=t, weights=weights[:, k]) for k, t in enumerate((TEXT[1:], others))]
    expected = step(single, parts)
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_torch()
    assert logprobs.shape == (9, 2)
    for k, each in enumerate(expected.loss_fn_outputs):
        assert logprobs[:, k].tolist() == pytest.approx(each["logprobs"].tolist(), abs=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert logprobs_of(several) == pytest.approx(logprobs_of(single), abs=1e-4)


def test_a_custom_loss_of_the_client_has_its_gradient(service):
    def loss(data, logprobs):
        total = sum((each**2).sum() for each in logprobs)
        return total, {"mean": total.item()}

    custom, plain = trainer(service), trainer(service)
    values = torch.tensor(logprobs_of(custom))
    result = custom.forward_backward_custom([datum()], loss).result()
    assert result.metrics["loss:sum"] == pytest.approx(float((values**2).sum()), rel=1e-5)
    custom.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    step(plain, [datum(weights=(-2 * values).tolist())])
    assert logprobs_of(custom) == logprobs_of(plain)


@pytest.mark.parametrize(
    ("inputs", "loss", "config", "message"),
    [
        ({}, "gspo", {}, "loss_fn must be one of cross_entropy, importance_sampling"),
        ({}, "ppo", {}, r"data\[0\]: ppo needs loss_fn_inputs\['logprobs'\]"),
        ({"weights": [1.0]}, "cross_entropy", {}, "weights has 1 elements, model_input has 9 tokens"),
        ({"weights": [math.nan] * 9}, "cross_entropy", {}, "weights must be finite"),
        ({"mask": [1.0] * 9}, "cross_entropy", {}, "has no loss_fn_inputs 'mask'"),
        ({"target_tokens": [9999] * 9}, "cross_entropy", {}, "target_tokens must lie in 0 to 271"),
        ({"target_tokens": [[[1], [2]]] * 9}, "cross_entropy", {}, r"must be \[T\] or \[T, targets\]"),
        (
            {"target_tokens": [[1, 2]] * 9, "weights": [1.0] * 9},
            "cross_entropy",
            {},
            r"weights has shape \(9,\), target_tokens \(9, 2\)",
        ),
        (
            {name: [[1, 2]] * 9 for name in ("target_tokens", "logprobs", "advantages")},
            "ppo",
            {},
            r"target_tokens \(9, 2\) for ppo",
        ),
        ({}, "cross_entropy", {"beta": 0.1}, "cross_entropy has no entry 'beta'"),
    ],
)
def test_a_wrong_request_names_its_field_and_changes_nothing(service, inputs, loss, config, message):
    client = trainer(service)
    before = logprobs_of(client)
    with pytest.raises(Exception, match=message):
        client.forward_backward([datum(**inputs)], loss, config or None).result()
    assert logprobs_of(trainer(service)) == before


def test_what_the_server_does_not_have_is_refused(service, address):
    for wrong, message in (
        ({"base_model": "other"}, "this server has the model tiny, not other"),
        ({"rank": 9}, "rank 9 is above 8"),
        ({"train_mlp": False, "train_attn": False}, "set train_mlp or train_attn"),
    ):
        with pytest.raises(Exception, match=message):
            service.create_lora_training_client(**{"base_model": "tiny", "rank": 4, **wrong}).result()
    assert trainer(service, train_mlp=False).get_info().lora_rank == 4
    rest = tinker.RestClient(base_url=address, api_key=KEY)
    (model, _) = rest.get_server_capabilities().result().supported_models
    assert model.model_name == "tiny" and model.max_context_length == 128


def test_a_silent_client_is_freed_and_its_checkpoints_stay(model, tmp_path):
    with serving(model, tmp_path, session_timeout_s=1.0, max_adapters=1) as address:
        gone = tinker.ServiceClient(base_url=address, api_key=KEY)
        client = trainer(gone)
        path = client.save_state("kept").result().path
        new = tinker.ServiceClient(base_url=address, api_key=KEY)
        with pytest.raises(Exception, match="has 1 training clients"):
            trainer(new)
        time.sleep(2)
        with pytest.raises(Exception, match="its session has ended"):
            client.forward([datum()], "cross_entropy").result()
        later = tinker.ServiceClient(base_url=address, api_key=KEY)
        assert later.create_training_client_from_state(path).result().get_info().lora_rank == 4


def test_a_server_with_a_key_refuses_others(model, tmp_path):
    with serving(model, tmp_path, key="tml-right") as address:
        with pytest.raises(tinker.AuthenticationError, match="API key"):
            tinker.RestClient(base_url=address, api_key="tml-wrong").get_server_capabilities().result()
        assert tinker.RestClient(base_url=address, api_key="tml-right").get_server_capabilities().result()
