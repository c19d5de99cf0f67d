import gc
import weakref
from dataclasses import replace

import pytest
import torch

from learner.samples import random_groups
from learner.tiny import VOCAB, run_config, tiny_decoder, tiny_learner
from qerl.formats import BF16, NVFP4
from qerl.kernels.linear.lora_linear import lora_linear
from qerl.kernels.runtime.host_memory import usable_host_bytes
from qerl.learner import Learner, kept_on_host
from qerl.learner.activation_checkpointing import RECOMPUTE, OnDevice, checkpoint_layers
from qerl.learner.kept_on_host import OnHost
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.random_weights import random_decoder, shape

MODES = pytest.mark.parametrize("recompute", ["layer", "offload"])
CPU = torch.device("cpu")


@pytest.fixture
def groups(rng):
    return random_groups(4, 3, vocab=VOCAB, rng=rng)


def state(learner):
    return learner.adapter_state() | learner.optimizer_state()


def attend(layer, q_TNH, k_TKH, v_TKH, options):
    return q_TNH + (k_TKH + v_TKH).repeat_interleave(q_TNH.shape[1] // k_TKH.shape[1], 1)


def pass_over(decoder, run_layer):
    return decoder(torch.arange(9) % VOCAB, torch.arange(9), attend, run_layer)


@MODES
@pytest.mark.parametrize("algo", [{}, {"beta": 0.3}])
def test_recomputation_changes_no_bit_of_what_is_learned(recompute, algo, groups):
    """Two updates of two micro-batches: moments and masters hold every gradient."""
    learn = {"max_tokens_per_microbatch": 40, "updates_per_step": 2}
    plain, ours = tiny_learner(algo, learn), tiny_learner(algo, learn | {"gradient_checkpointing": recompute})
    assert plain.step(groups) == ours.step(groups)
    a, b = state(plain), state(ours)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@MODES
def test_of_a_layer_only_its_input_is_kept(recompute):
    """Autograd saves the masters' names and the last norm's input of a whole pass."""
    decoder, sizes = tiny_decoder(), {"none": 0, recompute: 0}
    for mode in sizes:

        def count(tensor, mode=mode):
            sizes[mode] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            pass_over(decoder, RECOMPUTE[mode](CPU)())
    assert sizes[recompute] <= 2 * 9 * 32 < sizes["none"] / 20


@MODES
def test_nothing_is_kept_once_it_was_used(recompute):
    decoder, seen = tiny_decoder(), []
    kept = OnDevice() if recompute == "layer" else OnHost(CPU, None)
    run = checkpoint_layers(kept)

    def watched(layer, h_TD, *rest):
        seen.append(weakref.ref(h_TD))
        return run(layer, h_TD, *rest)

    pass_over(decoder, watched).sum().backward()
    assert not any(value for value in vars(kept).values() if isinstance(value, dict))
    assert all(reference() is None for reference in seen)


def test_a_pass_given_up_is_freed_without_the_garbage_collector():
    kept = OnDevice()
    hidden_TD = pass_over(tiny_decoder(), checkpoint_layers(kept))
    reference = weakref.ref(kept)
    del hidden_TD, kept
    assert reference() is None


def test_without_a_gradient_nothing_is_kept():
    kept = OnDevice()
    with torch.no_grad():
        pass_over(tiny_decoder(), checkpoint_layers(kept))
    assert vars(kept) == {"_inputs": {}}


def test_inputs_come_back_from_the_host_as_they_were_and_one_ahead():
    inputs = [torch.randn(3, 4) for _ in range(6)]
    kept = OnHost(CPU, None)
    for index, h_TD in enumerate(inputs):
        kept.put(index, h_TD)
        assert sorted(kept._leaving) == list(range(max(0, index - 1), index + 1))
    for index in reversed(range(6)):
        assert torch.equal(kept.take(index), inputs[index])
        assert sorted(kept._coming) == ([index - 1] if 0 < index < 5 else [])


def test_inputs_that_the_host_has_no_room_for_stay_on_the_device(monkeypatch):
    """They are the last layers'; pieces of three elements hold what does not divide evenly too."""
    monkeypatch.setattr(kept_on_host, "_PIECE_BYTES", 12)
    inputs = [torch.randn(4, 2) for _ in range(5)]
    kept = OnHost(CPU, None, 3 * inputs[0].nbytes + 1)
    for index, h_TD in enumerate(inputs):
        kept.put(index, h_TD.clone())
    assert sorted(kept._staying) == [3, 4] and sorted(kept._hosted) == [0, 1, 2]
    assert [len(piece) for _, piece in kept._hosted[0].pairs(inputs[0])] == [3, 3, 2]
    assert all(torch.equal(kept.take(index), inputs[index]) for index in reversed(range(5)))
    assert not any(value for value in vars(kept).values() if isinstance(value, dict))


def test_host_memory_counts_as_it_is_pinned(monkeypatch):
    """In powers of two: 24 bytes, in pieces of at most 16, take 16 and 8, and 20 take 16 and 4."""
    monkeypatch.setattr(kept_on_host, "_PIECE_BYTES", 16)
    for numbers, most_bytes, num_hosted in ((6, 48, 2), (6, 47, 1), (5, 40, 2), (7, 63, 1)):
        kept = OnHost(CPU, None, most_bytes)
        for index in range(3):
            kept.put(index, torch.randn(numbers))
        assert len(kept._hosted) == num_hosted


def test_the_hosts_room_is_the_containers_where_that_is_less(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert usable_host_bytes(tmp_path) == float("inf")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2000 kB\n")
    assert usable_host_bytes(tmp_path) == pytest.approx(0.85 * 2_048_000)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in {"max": "1000\n", "current": "700\n", "stat": "anon 5\ninactive_file 100\n"}.items():
        (group / f"memory.{name}").write_text(text)
    assert usable_host_bytes(tmp_path) == pytest.approx(0.85 * 400)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert usable_host_bytes(tmp_path) == pytest.approx(0.85 * 100)
    (group / "memory.max").write_text("max\n")
    assert usable_host_bytes(tmp_path) == pytest.approx(0.85 * 2_048_000 / 4)


@MODES
def test_a_weight_is_unpacked_as_often_as_without(recompute, monkeypatch):
    """Once forwards, once for the second forward and the input's gradient, which layer 0's q|k|v lacks."""
    counts = {}
    for mode in ("none", recompute):
        decoder, calls = tiny_decoder(), []
        for _, linear in decoder.linears():
            weight = NVFP4.encode(linear.weight.decode())
            linear.load_weight(weight)
        operand = NVFP4.operand
        with monkeypatch.context() as patch:
            patch.setattr(
                NVFP4, "operand", lambda self, dtype, c=calls, f=operand: c.append(1) or f(self, dtype)
            )
            pass_over(decoder, RECOMPUTE[mode](CPU)()).sum().backward()
        counts[mode] = len(calls)
    assert counts == {"none": 14 + 14 - 3, recompute: 14 + 14}


def test_an_operand_is_held_from_its_first_use_to_its_second():
    up = tiny_decoder().layers[0].mlp.up_proj
    up.load_weight(NVFP4.encode(BF16.decode(up.weight)))
    with PLAIN.repeating() as again:
        first, second, third = (up.operand(again.operands) for _ in range(3))
        assert first is second and third is not first and torch.equal(third, first)
    assert up.operand(again.operands) is not third


def test_a_result_that_nobody_reads_is_left_out_and_its_gradients_are_not(rng):
    down = tiny_decoder().layers[0].mlp.down_proj
    x_TK, dy_TN = (torch.randn(5, width, generator=rng) for width in (down.in_width, down.out_width))

    def result_and_gradients(linear_pass: LinearPass):
        inputs = [x_TK.clone().requires_grad_(), down.lora_A, down.lora_B]
        y_TN = down(inputs[0], linear_pass)
        return y_TN.detach(), torch.autograd.grad(y_TN, inputs, dy_TN)

    y_TN, gradients = result_and_gradients(PLAIN.without_output)
    with PLAIN.repeating() as again:
        none_TN, same = result_and_gradients(again.without_output)
    assert y_TN.any() and not none_TN.any()
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    assert torch.equal(result_and_gradients(again)[0], y_TN)


@MODES
def test_of_a_repeated_layer_the_last_product_alone_is_left_out(recompute, monkeypatch):
    decoder, left_out = tiny_decoder(), []

    def watched(x_TK, operand, *rest, needs_output):
        if not needs_output:
            left_out.append(operand.func.__self__)
        return lora_linear(x_TK, operand, *rest, needs_output=needs_output)

    monkeypatch.setattr("qerl.models.linear.lora_linear", watched)
    hidden_TD = pass_over(decoder, RECOMPUTE[recompute](CPU)())
    assert not left_out
    hidden_TD.sum().backward()
    assert left_out == [layer.mlp.down_proj for layer in reversed(decoder.layers)]


@pytest.mark.parametrize("recompute", ["none", "layer", "offload"])
def test_steps_leave_nothing_behind(recompute, groups):
    """After 8 as many tensors live as after 2, with no help from the garbage collector."""
    learner = tiny_learner({"beta": 0.1}, {"gradient_checkpointing": recompute, "num_iterations": 2})
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(8):
            learner.step(groups)
            counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[1] == counts[-1]


@pytest.mark.gpu
@MODES
def test_on_a_gpu_weights_in_tiles_give_the_same_bits_too(recompute, groups, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    arch, states = replace(shape("smollm2-135m"), num_layers=4, vocab_size=VOCAB), []
    for mode in ("none", recompute):
        decoder = random_decoder(arch, format="nvfp4", rank=16, device=device, seed=0)
        learner = Learner(
            decoder, run_config(learn={"max_tokens_per_microbatch": 40, "gradient_checkpointing": mode})
        )
        learner.step(groups)
        states.append(state(learner))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
