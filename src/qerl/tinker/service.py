"""Sessions, training clients and samplers; what each request does. Called from the event loop only.

A request of a training client has a number, its seq_id. Requests may arrive in any order and twice: they run
in the order of their numbers, and one that is sent again gets the answer of the first.
"""

import collections
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qerl.config.options import TinkerOptions
from qerl.engine.local_engine import LocalEngine
from qerl.errors import UserError, require
from qerl.learner.checkpoint import adapter_description
from qerl.models.peft.peft_names import decoder_tensors, peft_tensors
from qerl.tinker.adapter import AdapterSlot, AdapterSpec, TrainedAdapter
from qerl.tinker.checkpoints import Checkpoints
from qerl.tinker.passes import Passes
from qerl.tinker.sampling import sample_all
from qerl.tinker.worker import DeviceWorker, Job, Lane

Result = bytes | dict[str, Any]
_MAX_AHEAD = 10_000  # requests that wait for one with a lower number
_KEPT_S = 60.0  # a result is kept so long after a client has taken it, whose connection may have failed


class NotFoundError(UserError):
    """Something that does not exist, or no longer."""


class FullError(UserError):
    """A limit on what may wait is reached; the client tries again."""


@dataclasses.dataclass(eq=False, slots=True)
class TinkerSession:
    heard_s: float
    """time.monotonic() of its newest request."""
    models: list[str] = dataclasses.field(default_factory=list)
    samplers: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True)
class TrainedModel:
    """A training client."""

    model_id: str
    session_id: str
    lane: Lane
    next_seq: int = 1
    waiting: dict[int, Job] = dataclasses.field(default_factory=dict)
    spec: AdapterSpec | None = None
    adapter: TrainedAdapter | None = None
    """None until the worker has made it."""
    user_metadata: dict[str, Any] | None = None

    @property
    def made(self) -> TrainedAdapter:
        if self.adapter is None:
            raise UserError(f"{self.model_id} was not created: see the error of its creation")
        return self.adapter


@dataclasses.dataclass(eq=False, slots=True)
class ServedSampler:
    session_id: str
    model_path: str | None
    lane: Lane
    has_adapter: bool
    num_requests: int = 0


class Service:
    def __init__(
        self,
        slot: AdapterSlot,
        engine: LocalEngine,
        passes: Passes,
        options: TinkerOptions,
        names: tuple[str, ...],
    ):
        """names: those of the model that clients may use, the first is the one that they see."""
        self.worker, self.checkpoints, self.names, self.options = (
            DeviceWorker(),
            Checkpoints(options.checkpoints),
            names,
            options,
        )
        self.slot, self.engine, self.passes = slot, engine, passes
        self.sessions: dict[str, TinkerSession] = {}
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, ServedSampler] = {}
        self.jobs: dict[str, Job] = {}
        self._snapshots = 0
        self._on_device: collections.OrderedDict[str, TrainedAdapter] = collections.OrderedDict()

    @property
    def max_context_tokens(self) -> int:
        return min(self.options.max_context_tokens, self.engine.max_positions)

    def create_session(self) -> str:
        self.end_silent_sessions()
        session_id = secrets.token_hex(8)
        self.sessions[session_id] = TinkerSession(time.monotonic())
        return session_id

    def session(self, session_id: str) -> TinkerSession:
        if session_id not in self.sessions:
            raise NotFoundError(
                f"there is no session {session_id[:80]}: it has ended, or the server was restarted"
            )
        session = self.sessions[session_id]
        session.heard_s = time.monotonic()
        return session

    def end_silent_sessions(self) -> None:
        limit_s = time.monotonic() - self.options.session_timeout_s
        for session_id in [key for key, each in self.sessions.items() if each.heard_s < limit_s]:
            self.end_session(session_id)

    def forget_results(self) -> None:
        """Free results that clients have taken: a run of weeks has millions."""
        limit_s = time.monotonic() - _KEPT_S
        taken = [key for key, job in self.jobs.items() if job.taken_s is not None and job.taken_s < limit_s]
        for key in taken:
            del self.jobs[key]

    def end_session(self, session_id: str) -> None:
        """Free all that the session has; its checkpoints stay."""
        session = self.sessions.pop(session_id, TinkerSession(0.0))
        for model_id in session.models:
            model = self.models.pop(model_id)
            self.worker.drop(model.lane)
            for job in model.waiting.values():
                job.fail(UserError("the session has ended"))
            self._on_device.pop(model_id, None)
        for sampler_id in session.samplers:
            self.worker.drop(self.samplers.pop(sampler_id).lane)
        ended = tuple(f"{session_id}:{kind}:" for kind in ("train", "sample"))
        self.jobs = {key: job for key, job in self.jobs.items() if not key.startswith(ended)}

    def model(self, model_id: str) -> TrainedModel:
        if model_id not in self.models:
            raise NotFoundError(f"there is no model {model_id[:80]}: its session has ended")
        self.session(self.models[model_id].session_id)
        return self.models[model_id]

    def sampler(self, sampler_id: str) -> ServedSampler:
        if sampler_id not in self.samplers:
            reason = "its session has ended, or newer ones have its place (--max-samplers)"
            raise NotFoundError(f"there is no sampler {sampler_id[:80]}: {reason}")
        sampler = self.samplers[sampler_id] = self.samplers.pop(sampler_id)  # the last used is the last
        self.session(sampler.session_id)
        return sampler

    def check_base(self, base_model: str | None) -> None:
        known = base_model is None or base_model in self.names
        require(known, f"this server has the model {self.names[0]}, not {str(base_model)[:200]}")

    def create_model(
        self,
        session_id: str,
        seq: int,
        make: Callable[[TrainedModel], Result],
        metadata: dict[str, Any] | None,
    ) -> str:
        """Enter a training client, which `make` then makes in the worker; return the request's id."""
        session, model_id = self.session(session_id), f"{session_id}:train:{seq}"
        request_id = f"{model_id}:0"
        if model_id in self.models:
            return request_id
        limit = self.options.max_adapters
        require(
            len(self.models) < limit,
            f"the server has {limit} training clients: end one, or wait until it is freed",
        )
        model = TrainedModel(model_id, session_id, Lane(_run_first, takes_all=False), user_metadata=metadata)
        self.models[model_id] = model
        session.models.append(model_id)
        self.jobs[request_id] = job = Job(lambda: make(model))
        self.worker.submit(model.lane, job)
        return request_id

    def submit(self, model: TrainedModel, seq: int | None, work: Callable[[], Result]) -> str:
        """Run the work after the model's requests of lower numbers; return its id. seq None: the next."""
        seq = model.next_seq + len(model.waiting) if seq is None else seq
        request_id = f"{model.model_id}:{seq}"
        if request_id in self.jobs:
            return request_id
        require(seq >= model.next_seq, f"seq_id {seq} has passed: the next one is {model.next_seq}")
        require(len(model.waiting) < _MAX_AHEAD, f"{_MAX_AHEAD} requests wait for seq_id {model.next_seq}")
        self.jobs[request_id] = model.waiting[seq] = Job(work)
        while model.next_seq in model.waiting:
            self.worker.submit(model.lane, model.waiting.pop(model.next_seq))
            model.next_seq += 1
        return request_id

    def make_adapter(self, model: TrainedModel, spec: AdapterSpec) -> TrainedAdapter:
        """In the worker: make the model's adapter."""
        limit = self.slot.max_rank
        require(
            spec.rank <= limit, f"lora_config: rank {spec.rank} is above {limit}, the server's --max-rank"
        )
        model.spec, model.adapter = spec, TrainedAdapter(self.slot.decoder, spec)
        self._bring(model)
        return model.adapter

    def hold(self, model: TrainedModel) -> TrainedAdapter:
        """In the worker: let the decoder compute with the model's adapter."""
        adapter = self._bring(model)
        key = model.model_id, adapter.version
        self.slot.hold(key, dict(adapter.parameters), adapter.spec.rank)
        return adapter

    def _bring(self, model: TrainedModel) -> TrainedAdapter:
        """Move the adapter to the device, and those used longest ago from there if there are too many."""
        adapter, device = model.made, self.slot.decoder.device
        if model.model_id not in self._on_device:
            adapter.move(device)
        self._on_device[model.model_id] = adapter
        self._on_device.move_to_end(model.model_id)
        while len(self._on_device) > self.options.device_adapters:
            self._on_device.popitem(last=False)[1].move(torch.device("cpu"))
        return adapter

    def adapter(self, model: TrainedModel) -> TrainedAdapter:
        return self._bring(model)

    def add_sampler(
        self,
        session_id: str,
        sampler_id: str,
        tensors: Mapping[str, Tensor],
        rank: int,
        model_path: str | None,
    ) -> str:
        """Enter a sampler of these masters, which do not change; none are the base model."""
        self._snapshots += 1
        key = ("sampler", self._snapshots) if tensors else "base"

        def run(jobs: list[Job]) -> None:
            self.slot.hold(key, tensors, rank)
            sample_all(self.engine, jobs, max_positions=self.max_context_tokens)

        self.session(session_id).samplers.append(sampler_id)
        lane = Lane(run, takes_all=True)
        self.samplers[sampler_id] = ServedSampler(session_id, model_path, lane, has_adapter=bool(tensors))
        others = [key for key, each in self.samplers.items() if each.has_adapter and key != sampler_id]
        if tensors and len(others) >= self.options.max_samplers:
            of_session = [key for key in others if self.samplers[key].session_id == session_id]
            self._end_sampler((of_session or others)[0])
        return sampler_id

    def _end_sampler(self, sampler_id: str) -> None:
        sampler = self.samplers.pop(sampler_id)
        self.sessions[sampler.session_id].samplers.remove(sampler_id)
        self.worker.drop(sampler.lane)

    def sample(self, sampler_id: str, seq: int | None, work: Any) -> tuple[str, Job]:
        sampler = self.sampler(sampler_id)
        request_id = f"{sampler_id}:{sampler.num_requests if seq is None else seq}"
        if request_id not in self.jobs:
            limit, lanes = self.options.max_waiting, [each.lane for each in self.samplers.values()]
            if sum(len(lane.jobs) for lane in lanes) >= limit:
                raise FullError(f"{limit} sampling requests are waiting")
            sampler.num_requests += 1
            self.jobs[request_id] = Job(work)
            self.worker.submit(sampler.lane, self.jobs[request_id])
        return request_id, self.jobs[request_id]

    def job(self, request_id: str) -> Job:
        if request_id not in self.jobs:
            reason = "its session has ended, or its result was taken"
            raise NotFoundError(f"there is no request {request_id[:100]}: {reason}")
        self.session(request_id.partition(":")[0])
        return self.jobs[request_id]

    def save(self, model: TrainedModel, kind: str, name: str, *, has_moments: bool, **how: Any) -> str:
        """In the worker: write a checkpoint of the model as it is; return its path."""
        adapter, decoder = model.made, self.slot.decoder
        description = adapter_description(adapter.config, self.options.model, decoder)
        info = {"base_model": self.names[0], **dataclasses.asdict(adapter.spec)}
        info["user_metadata"] = how.pop("user_metadata", None)
        moments = adapter.moments() if has_moments else None
        tensors = peft_tensors(decoder.architecture, adapter.snapshot())
        place = model.model_id, kind, name
        return self.checkpoints.save(*place, tensors, description, info, moments=moments, **how)

    def stored(self, path: str) -> tuple[AdapterSpec, dict[str, Tensor], dict[str, Tensor] | None]:
        """Return a checkpoint's adapter, its masters under the decoder's names, and its moments."""
        saved = self.checkpoints.load(path)
        fields = {field.name: saved.info[field.name] for field in dataclasses.fields(AdapterSpec)}
        spec, limit = AdapterSpec(**fields), self.slot.max_rank
        require(
            spec.rank <= limit, f"the adapter's rank {spec.rank} is above {limit}, the server's --max-rank"
        )
        self.check_base(saved.info["base_model"])
        names = TrainedAdapter(self.slot.decoder, spec).parameters
        return spec, decoder_tensors(self.slot.decoder.architecture, saved.tensors, names), saved.moments


def _run_first(jobs: list[Job]) -> None:
    (job,) = jobs
    result = job.work()
    if not job.future.done():
        job.future.set_result(result)
