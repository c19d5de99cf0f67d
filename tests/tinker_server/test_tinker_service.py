"""What the server keeps for its clients, and for how long; without a model."""

import contextlib
import shutil
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from qerl.config import ModelConfig
from qerl.config.options import TinkerOptions
from qerl.engine.stats import Stats
from qerl.errors import RunError, UserError
from qerl.tinker import checkpoints as checkpoints_module
from qerl.tinker.bodies import SaveForSampler
from qerl.tinker.checkpoints import Checkpoints
from qerl.tinker.requests import GoneError, Requests
from qerl.tinker.sampling import SampleWork, ServedSampler, sample_turn
from qerl.tinker.service import Service
from qerl.tinker.snapshots import Snapshots
from qerl.tinker.worker import DeviceWorker, Job, Lane
from qerl.types import Sample, Sampling, TokenLogprob


def finished(size, *, age_s=0.0):
    job = Job(None)
    job.future.set_result(bytes(size))
    job.done_s -= age_s
    return job


def requests_of(jobs, **limits):
    requests = Requests(**{"kept_s": 300.0, "max_bytes": 1000, **limits})
    for name, job in jobs.items():
        requests.add(name, job)
    return requests


def test_a_fetched_result_is_kept_for_a_minute_and_another_for_the_timeout(monkeypatch):
    requests = requests_of(
        {"a": finished(1), "b": finished(1), "old": finished(1, age_s=301), "c": Job(None)}
    )
    requests.fetched("a")
    requests.drop_old()
    assert [name for name in ("a", "b", "old", "c") if name in requests] == ["a", "b", "c"]
    monkeypatch.setattr("qerl.tinker.requests._FETCHED_KEPT_S", -1.0)
    requests.drop_old()
    assert [name for name in ("a", "b", "c") if name in requests] == ["b", "c"]
    with pytest.raises(GoneError, match="no longer kept"):
        requests.job("a")


def test_above_the_limit_fetched_results_go_first_and_then_the_oldest():
    jobs = {"new": finished(400), "old": finished(400, age_s=9), "fetched": finished(400), "runs": Job(None)}
    requests = requests_of(jobs)
    requests.fetched("fetched")
    requests.drop_old()
    assert [name for name in jobs if name in requests] == ["new", "old", "runs"]
    requests.add("newer", finished(500))
    requests.drop_old()
    assert [name for name in (*jobs, "newer") if name in requests] == ["new", "runs", "newer"]


def test_the_end_of_a_session_cancels_its_requests_only():
    mine, other = Job(None), Job(None)
    requests = requests_of({"s1:sample:0:1": mine, "s10:sample:0:1": other})
    requests.end("s1")
    assert mine.is_cancelled and not other.is_cancelled and len(requests) == 1


def test_snapshots_beyond_the_limit_are_read_back_from_files(tmp_path):
    snapshots = Snapshots(tmp_path, 2)
    numbers = [snapshots.add({"a": torch.full((2,), float(value))}) for value in range(4)]
    files = [file.name for file in tmp_path.rglob("*.safetensors")]
    assert sorted(files) == ["1.safetensors", "2.safetensors"]
    assert [snapshots.tensors(number)["a"][0].item() for number in numbers] == [0, 1, 2, 3]
    for number in numbers:
        snapshots.drop(number)
    assert not list(tmp_path.rglob("*.safetensors"))
    snapshots.close()
    assert not list(tmp_path.iterdir())


def test_a_snapshot_that_is_not_kept_in_memory_is_read_from_its_file(tmp_path):
    snapshots = Snapshots(tmp_path, 0)
    number = snapshots.add({"a": torch.ones(2)})
    for _ in range(2):
        assert snapshots.tensors(number)["a"].tolist() == [1, 1] and not snapshots._held
    snapshots.close()


class Adapter:
    def move(self, device):
        pass


class Batch:
    """A batch of an engine whose samples are the numbers of their tokens."""

    def __init__(self, on_step):
        self.requests, self.on_step = [], on_step
        self.generation = types.SimpleNamespace(stats=Stats())

    def add(self, request):
        request.samples_G = request.samples_G or [
            types.SimpleNamespace(tokens_T=[]) for _ in range(request.num_samples)
        ]
        self.requests.append(request)

    def step(self):
        self.on_step()
        for request in list(self.requests):
            for index, sample in enumerate(request.samples_G):
                tokens = sample.tokens_T
                tokens.append(len(tokens))
                finish = {"text": "", "finish": "length", "version": 0}
                is_last = len(tokens) == request.sampling.max_tokens
                ended = (
                    Sample(tokens_T=tokens, logprobs_T=[-1.0] * len(tokens), **finish) if is_last else None
                )
                if is_last or request.is_streamed:
                    request.on_token(index, TokenLogprob(tokens[-1], -1.0), ended)
                if is_last and request in self.requests:
                    self.requests.remove(request)

    def abort(self, requests):
        self.requests = [each for each in self.requests if each not in requests]


def sampling_lane(order, on_step, row_of=lambda work: 0):
    """Return a lane that samples with a Batch; order: gets what ends."""
    engine = types.SimpleNamespace(live_batch=lambda _: contextlib.nullcontext(Batch(on_step)))

    def run(turn):
        order.append("turn")
        sample_turn(engine, turn, max_positions=100, row_of=row_of)

    return Lane(run, takes_all=True)


def sampling_job(max_tokens, token=1):
    limits = {"num_samples": 1, "stop_token_ids": frozenset(), "seed": 1, "num_top_prompt": 0, "num_top": 0}
    sampling = Sampling(max_tokens=max_tokens, temperature=1.0)
    return Job(
        SampleWork(sampler=None, tokens_T=[token], sampling=sampling, has_prompt_logprobs=False, **limits)
    )


def test_a_long_sample_is_interrupted_for_learning_and_goes_on_from_its_tokens():
    worker, order, steps, long = DeviceWorker(0.0), [], [], sampling_job(50)
    short = sampling_job(2)
    learning = Lane(lambda turn: [job.future.set_result(order.append("step")) for job in turn.jobs], False)

    def on_step():
        steps.append(len(steps))
        if len(steps) == 3:
            worker.submit(learning, Job(None))
        if len(steps) == 10:
            worker.submit(lane, short)

    lane = sampling_lane(order, on_step)
    long.future.add_done_callback(lambda _: order.append("long"))
    short.future.add_done_callback(lambda _: order.append("short"))
    worker.submit(lane, long)
    worker.start()
    long.future.result(10)
    worker.close()
    assert order == ["turn", "step", "turn", "short", "long"]
    assert len(steps) == 50  # none again


def test_nobody_joins_before_a_request_that_cannot():
    worker, order, steps = DeviceWorker(1e9), [], []
    jobs = {name: sampling_job(9, token) for name, token in (("first", 1), ("other", 2), ("third", 1))}

    def on_step():
        steps.append(1)
        if len(steps) in (3, 5):
            worker.submit(lane, jobs["other" if len(steps) == 3 else "third"])

    lane = sampling_lane(
        order, on_step, lambda work: 0 if order.count("turn") > 1 or work.tokens_T == [1] else None
    )
    for name, job in jobs.items():
        job.future.add_done_callback(lambda _, name=name: order.append(name))
    worker.submit(lane, jobs["first"])
    worker.start()
    jobs["third"].future.result(10)
    worker.close()
    assert order == ["turn", "first", "turn", "other", "third"]


def test_a_failure_fails_those_that_joined_too():
    worker, order = DeviceWorker(1.0), []
    first, joined, steps = sampling_job(9), sampling_job(9), []

    def on_step():
        steps.append(1)
        if len(steps) == 2:
            worker.submit(lane, joined)
        if len(steps) == 4:
            raise RuntimeError("the device is gone")

    lane = sampling_lane(order, on_step)
    worker.submit(lane, first)
    worker.start()
    for job in (first, joined):
        with pytest.raises(RuntimeError, match="is gone"):
            job.future.result(10)
    worker.close()


def test_a_cancelled_sample_whose_weights_are_gone_fails_no_other():
    worker, gone, other = DeviceWorker(1.0), sampling_job(9, 1), sampling_job(9, 2)
    weights = {2: 0}
    lane = sampling_lane([], lambda: None, lambda work: weights[work.tokens_T[0]])
    gone.is_cancelled = True
    for job in (gone, other):
        worker.submit(lane, job)
    worker.start()
    assert other.future.result(10)
    with pytest.raises(UserError, match="was cancelled"):
        gone.future.result(10)
    worker.close()


@pytest.fixture
def service(tmp_path):
    slot = types.SimpleNamespace(decoder=types.SimpleNamespace(device=torch.device("cpu")), shares_steps=True)
    options = TinkerOptions(model=ModelConfig(), checkpoints=tmp_path, max_adapters=1)
    service = Service(slot, None, None, options, ("tiny",))
    service.worker.start()
    yield service
    service.worker.close()


def create(service):
    """Return a new session, its training client and a weak reference to the adapter."""

    def make(model):
        model.adapter = Adapter()
        return {}

    session_id = service.create_session()
    request_id = service.create_model(session_id, 0, make, None)
    service.job(request_id).future.result(10)
    (model,) = service.models.values()
    return session_id, model, weakref.ref(model.adapter)


def wait_for_worker(service):
    done = threading.Event()
    service.worker.run_later(done.set)
    assert done.wait(10)


def test_a_session_that_ends_beside_its_running_request_leaves_no_adapter(service):
    session_id, model, adapter = create(service)
    begun, goes_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert goes_on.wait(10)
        service.adapter(model)  # brings it to the device, after the session's end
        return {}

    running = service.job(service.submit(model, 1, work))
    waiting = service.job(service.submit(model, 2, work))
    early = service.job(service.submit(model, 9, work))
    assert begun.wait(10)
    service.end_session(session_id)
    for job in (waiting, early):
        with pytest.raises(UserError, match="has ended"):
            job.future.result(10)
    goes_on.set()
    assert running.future.result(10) == {}
    wait_for_worker(service)
    assert adapter() is None and not service.models and not len(service.requests)


def test_an_unloaded_model_leaves_room_for_another(service):
    session_id, model, adapter = create(service)
    with pytest.raises(UserError, match="has 1 training clients"):
        service.create_model(session_id, 1, lambda model: {}, None)
    service.unload(model.model_id)
    service.unload(model.model_id)
    wait_for_worker(service)
    assert adapter() is None
    create(service)


def test_a_creation_that_failed_leaves_room_for_another_and_keeps_its_error(service):
    def make(model):
        model.adapter = Adapter()
        raise UserError("the checkpoint is of another rank")

    session_id = service.create_session()
    failed = service.create_model(session_id, 0, make, None)
    with pytest.raises(UserError, match="another rank"):
        service.job(failed).future.result(10)
    assert service.create_model(session_id, 0, make, None) == failed  # it was sent again
    made = service.create_model(session_id, 1, lambda model: {"made": 1}, None)
    assert service.job(made).future.result(10) == {"made": 1}
    assert [model.model_id for model in service.models.values()] == service.session(session_id).models
    with pytest.raises(UserError, match="another rank"):
        service.job(failed).future.result(0)


def test_a_request_that_was_numbered_zero_is_not_the_creation(service):
    _, model, _ = create(service)
    with pytest.raises(UserError, match="seq_id 0 has passed: the next one is 1"):
        service.submit(model, 0, lambda: {})


def test_a_sample_without_a_number_is_not_one_with_a_number(service):
    sampler = ServedSampler(session_id="s", model_path=None, snapshot=None, rank=1, sigma=0.0, noise_seed=0)
    sampler.session_id = service.create_session()
    sampler_id = service.add_sampler(f"{sampler.session_id}:sample:0:x", sampler)
    work = sampling_job(1).work
    ids = [service.sample(sampler_id, seq, work) for seq in (1, None, 1, None)]
    assert len(set(ids)) == 3 and ids[0] == ids[2]


def test_checkpoints_that_disappear_while_they_are_listed_are_left_out(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    about = {"rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "base_model": "tiny"}
    kept, gone = (checkpoints.save("run", "weights", name, {}, {}, about) for name in ("kept", "gone"))
    for name in "listed", "files", "set_ttl", "delete":
        with monkeypatch.context() as patch:
            checkpoints.save("run", "weights", "gone", {}, {}, about, overwrite=True)
            checked = checkpoints_module._checked

            def remove(info, checked=checked):
                shutil.rmtree(tmp_path / "run" / "weights" / "gone", ignore_errors=True)
                return checked(info)

            patch.setattr(checkpoints_module, "_checked", remove)
            if name == "listed":
                assert [each["tinker_path"] for each in checkpoints.listed()] == [kept]
                continue
            more = (5,) if name == "set_ttl" else ()
            with pytest.raises(UserError, match=f"there is no checkpoint {gone}"):
                getattr(checkpoints, name)(gone, *more)


ABOUT = {"rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "base_model": "tiny"}


def test_a_time_to_live_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save("run", "weights", "kept", {}, {}, ABOUT, ttl_s=1000)
    before = checkpoints.info(path)

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qerl.tracking.atomic_file.os.fsync", fail)
    with pytest.raises(RunError, match=r"kept: its time cannot be set: .*No space left"):
        checkpoints.set_ttl(path, None)
    monkeypatch.undo()
    assert checkpoints.info(path) == before and set(checkpoints.files(path)) == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    checkpoints.set_ttl(path, None)
    assert checkpoints.info(path) == before | {"expires_at": None}


def test_a_time_to_live_is_not_set_with_what_an_overwritten_checkpoint_said(tmp_path, monkeypatch):
    checkpoints, read = Checkpoints(tmp_path), Checkpoints.info
    path = checkpoints.save("run", "weights", "one", {}, {}, ABOUT)
    how = {"info": ABOUT | {"rank": 8}, "overwrite": True}
    thread = threading.Thread(target=checkpoints.save, args=("run", "weights", "one", {}, {}), kwargs=how)

    def info(self, path):
        found = read(self, path)
        if threading.current_thread() is threading.main_thread() and thread.ident is None:
            thread.start()
            thread.join(1)
        return found

    monkeypatch.setattr(Checkpoints, "info", info)
    checkpoints.set_ttl(path, 1000)
    thread.join(30)
    assert checkpoints.info(path)["rank"] == 8


def test_a_checkpoint_is_listed_while_its_time_to_live_is_set(tmp_path, monkeypatch):
    checkpoints, iterdir = Checkpoints(tmp_path), Path.iterdir
    path = checkpoints.save("run", "weights", "one", {}, {}, ABOUT)
    (before,) = checkpoints.listed()
    part = tmp_path / "run" / "weights" / "one" / "checkpoint.json.1.part"

    def names(self):  # set_ttl replaces the file between this and what is read of each
        part.touch()
        found = list(iterdir(self))
        part.unlink()
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", names)
    assert checkpoints.listed() == [before] and before["tinker_path"] == path


def test_folders_of_killed_servers_are_removed_and_those_of_others_are_not(tmp_path):
    living = Snapshots(tmp_path, 1)
    number, _ = (living.add({"a": torch.ones(2)}) for _ in range(2))
    program = (
        "import os, sys, torch; from pathlib import Path; from qerl.tinker.snapshots import Snapshots;"
        "held = Snapshots(Path(sys.argv[1]), 1); held.add({'a': torch.zeros(2)});"
        "held.add({}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=120)
    assert len(list(tmp_path.glob(".samplers-*/1.safetensors"))) == 2
    other = Snapshots(tmp_path, 1)
    (left,) = tmp_path.iterdir()
    assert living.tensors(number)["a"].tolist() == [1, 1]
    living.close()
    other.close()
    assert not left.exists()


def test_a_request_without_a_number_runs_after_those_with_numbers(service):
    _, model, _ = create(service)
    order = []
    ids = [service.submit(model, seq, lambda seq=seq: order.append(seq) or {}) for seq in (3, None, 1, 2)]
    assert len(set(ids)) == 4
    for each in ids:
        service.job(each).future.result(10)
    assert order == [1, 2, 3, None]


def test_a_sampler_does_not_overwrite_a_checkpoint():
    with pytest.raises(ValidationError, match="overwrite"):
        SaveForSampler(model_id="m", path="p", overwrite=True)
