"""What the server keeps for its clients, and for how long; without a model."""

import threading
import types
import weakref

import pytest
import torch

from qerl.config import ModelConfig
from qerl.config.options import TinkerOptions
from qerl.errors import UserError
from qerl.tinker.requests import GoneError, Requests
from qerl.tinker.service import Service
from qerl.tinker.snapshots import Snapshots
from qerl.tinker.worker import Job


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


class Adapter:
    def move(self, device):
        pass


@pytest.fixture
def service(tmp_path):
    slot = types.SimpleNamespace(decoder=types.SimpleNamespace(device=torch.device("cpu")))
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
