"""Sessions, training clients and samplers; what each request does. Called from the event loop only.

A request of a training client has a number, its seq_id. Requests may arrive in any order and twice: they run
in the order of their numbers, and one that is sent again gets the answer of the first.
"""

import collections
import contextlib
import dataclasses
import datetime
import math
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl.aqn.norm_noise import noised
from qerl.config.options import TinkerOptions
from qerl.engine.local_engine import LocalEngine
from qerl.errors import UserError, require
from qerl.learner.checkpoint import adapter_description
from qerl.models.peft.peft_names import decoder_tensors, peft_tensors
from qerl.tinker.adapter import AdapterSlot, AdapterSpec, TrainedAdapter
from qerl.tinker.checkpoints import Checkpoints
from qerl.tinker.passes import Passes
from qerl.tinker.requests import GoneError, Requests
from qerl.tinker.sampling import SampleWork, ServedSampler, sample_turn
from qerl.tinker.snapshots import Snapshots
from qerl.tinker.worker import DeviceWorker, Job, Lane, LaneTurn

Result = bytes | dict[str, Any]
_MAX_AHEAD = 10_000  # requests that wait for one with a lower number


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
    creation: Future = dataclasses.field(default_factory=Future)
    next_seq: int = 1
    waiting: dict[int, Job] = dataclasses.field(default_factory=dict)
    spec: AdapterSpec | None = None
    adapter: TrainedAdapter | None = None
    """None until the worker has made it."""
    user_metadata: dict[str, Any] | None = None

    @property
    def has_failed(self) -> bool:
        return self.creation.done() and self.creation.exception() is not None

    @property
    def made(self) -> TrainedAdapter:
        if self.adapter is None:
            raise UserError(f"{self.model_id} was not created: see the error of its creation")
        return self.adapter


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
            DeviceWorker(options.max_turn_s),
            Checkpoints(options.checkpoints),
            names,
            options,
        )
        self.slot, self.engine, self.passes = slot, engine, passes
        self.sessions: dict[str, TinkerSession] = {}
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, ServedSampler] = {}
        self.shares_steps = slot.shares_steps
        """True if rows of a decode step may have different adapters; else samplers take turns."""
        self._together, self._lanes = Lane(self._sample_together, takes_all=True), dict[str, Lane]()
        self.requests = Requests(kept_s=options.session_timeout_s, max_bytes=options.max_result_bytes)
        self.snapshots = Snapshots(options.checkpoints, options.host_samplers)
        self._on_device: collections.OrderedDict[str, TrainedAdapter] = collections.OrderedDict()

    @property
    def max_context_tokens(self) -> int:
        return min(self.options.max_context_tokens, self.engine.max_positions)

    def create_session(self) -> str:
        self.drop_old()
        session_id = secrets.token_hex(8)
        self.sessions[session_id] = TinkerSession(time.monotonic())
        return session_id

    def session(self, session_id: str) -> TinkerSession:
        if session_id not in self.sessions:
            raise GoneError(
                f"there is no session {session_id[:80]}: it has ended, or the server was restarted"
            )
        session = self.sessions[session_id]
        session.heard_s = time.monotonic()
        return session

    def drop_old(self) -> None:
        """End silent sessions, and drop old results."""
        limit_s = time.monotonic() - self.options.session_timeout_s
        for session_id in [key for key, each in self.sessions.items() if each.heard_s < limit_s]:
            self.end_session(session_id)
        self._drop_failed()
        self.requests.drop_old()

    def end_session(self, session_id: str) -> None:
        """Free all that the session has; its checkpoints stay."""
        session = self.sessions.pop(session_id, TinkerSession(0.0))
        self.requests.end(session_id)  # before the worker drops what they read
        for model_id in session.models:
            self._end_model(model_id)
        for sampler_id in session.samplers:
            sampler = self.samplers.pop(sampler_id)
            if (lane := self._lanes.pop(sampler_id, None)) is not None:
                self.worker.drop(lane)
            if sampler.snapshot is not None:
                self.worker.run_later(partial(self.snapshots.drop, sampler.snapshot))

    def unload(self, model_id: str) -> None:
        """Free a training client; its samplers and checkpoints stay."""
        if model_id in self.models:  # its session may have ended meanwhile
            self.sessions[self.models[model_id].session_id].models.remove(model_id)
            self._end_model(model_id)

    def _end_model(self, model_id: str) -> None:
        model = self.models.pop(model_id)
        self.worker.drop(model.lane)
        for job in model.waiting.values():
            job.fail(UserError("the session has ended, or the model was unloaded"))

        def free() -> None:  # in the worker, where a request of the model may be running now
            self._on_device.pop(model_id, None)
            model.adapter = None

        self.worker.run_later(free)

    def model(self, model_id: str) -> TrainedModel:
        if model_id not in self.models:
            raise NotFoundError(
                f"there is no model {model_id[:80]}: its creation failed, or its session has ended"
            )
        self.session(self.models[model_id].session_id)
        return self.models[model_id]

    def sampler(self, sampler_id: str) -> ServedSampler:
        if sampler_id not in self.samplers:
            raise NotFoundError(f"there is no sampler {sampler_id[:80]}: its session has ended")
        sampler = self.samplers[sampler_id]
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
        request_id = f"{model_id}:create"
        if request_id in self.requests or model_id in self.models:
            return request_id
        self._drop_failed()
        limit = self.options.max_adapters
        require(
            len(self.models) < limit,
            f"the server has {limit} training clients: end one, or wait until it is freed",
        )
        model = TrainedModel(model_id, session_id, Lane(_run_first, takes_all=False), user_metadata=metadata)
        self.models[model_id] = model
        session.models.append(model_id)
        job = Job(lambda: make(model))
        model.creation = job.future
        self.requests.add(request_id, job)
        self.worker.submit(model.lane, job)
        return request_id

    def _drop_failed(self) -> None:
        """Free the places of training clients whose creation failed."""
        for model_id in [key for key, each in self.models.items() if each.has_failed]:
            self.unload(model_id)

    def submit(self, model: TrainedModel, seq: int | None, work: Callable[[], Result]) -> str:
        """Run the work after the model's requests of lower numbers; return its id. seq None: after all."""
        seq = max([model.next_seq - 1, *model.waiting]) + 1 if seq is None else seq
        request_id = f"{model.model_id}:{seq}"
        if request_id in self.requests:
            return request_id
        require(seq >= model.next_seq, f"seq_id {seq} has passed: the next one is {model.next_seq}")
        require(len(model.waiting) < _MAX_AHEAD, f"{_MAX_AHEAD} requests wait for seq_id {model.next_seq}")
        model.waiting[seq] = Job(work)
        self.requests.add(request_id, model.waiting[seq])
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

    def sigma_of(self, metadata: Mapping[str, Any] | None) -> float:
        """Return the noise of a training client's samplers: its user metadata's aqn_sigma, or the option."""
        text = (metadata or {}).get("aqn_sigma", self.options.aqn_sigma)
        try:
            sigma = float(text)
        except (TypeError, ValueError):
            sigma = math.nan
        require(
            0 <= sigma < math.inf, f"user_metadata: aqn_sigma must be a number from 0 on, got {text!r}"[:200]
        )
        return sigma

    def add_sampler(self, sampler_id: str, sampler: ServedSampler) -> str:
        self.session(sampler.session_id).samplers.append(sampler_id)
        self.samplers[sampler_id] = sampler
        if not self.shares_steps:
            self._lanes[sampler_id] = Lane(partial(self._sample_alone, sampler), takes_all=True)
        return sampler_id

    def _sample_alone(self, sampler: ServedSampler, turn: LaneTurn) -> None:
        """In the worker: sample for one sampler, with the decoder's own adapter."""
        tensors = {} if sampler.snapshot is None else self.snapshots.tensors(sampler.snapshot)
        key = "base" if sampler.snapshot is None else ("sampler", sampler.snapshot)
        self.slot.hold(key, tensors, sampler.rank)
        with self._noise(sampler):
            self._sample_turn(turn, row_of=lambda work: 0 if work.sampler is sampler else None)

    def _sample_together(self, turn: LaneTurn) -> None:
        """In the worker: sample for several samplers in the same steps; one with noise is alone, and on a GPU
        one for which alone requests wait, whose steps are faster with the decoder's own adapter."""
        first, rows = turn.jobs[0].work.sampler, dict[int | None, int]({None: 0})
        samplers = {job.work.sampler for job in turn.jobs}
        if len(samplers) == 1 and self.slot.decoder.device.type != "cpu":
            self._sample_alone(first, turn)
            return
        with self.slot.banked() as bank, self._noise(first):

            def row_of(work: SampleWork) -> int | None:
                sampler, snapshot = work.sampler, work.sampler.snapshot
                if sampler is not first and (first.sigma > 0 or sampler.sigma > 0):
                    return None
                if snapshot is not None and snapshot not in rows:
                    if bank.num_free == 0:
                        return None
                    rows[snapshot] = self.slot.add_to(bank, self.snapshots.tensors(snapshot), sampler.rank)
                return rows[snapshot]

            self._sample_turn(turn, row_of)

    def _sample_turn(self, turn: LaneTurn, row_of: Callable[[SampleWork], int | None]) -> None:
        sample_turn(self.engine, turn, max_positions=self.max_context_tokens, row_of=row_of)

    def _noise(self, sampler: ServedSampler) -> contextlib.AbstractContextManager[int]:
        how = {"sigma": sampler.sigma, "unit": "relative", "seed": sampler.noise_seed, "step": 0}
        return noised(self.slot.decoder.noise_table, **how)

    def sample(self, sampler_id: str, seq: int | None, work: SampleWork) -> str:
        sampler = self.sampler(sampler_id)
        number = f"unnumbered-{sampler.num_requests}" if seq is None else seq
        request_id = f"{sampler_id}:{number}"
        if request_id not in self.requests:
            limit, lanes = self.options.max_waiting, [self._together, *self._lanes.values()]
            if sum(len(lane.jobs) for lane in lanes) >= limit:
                raise FullError(f"{limit} sampling requests are waiting")
            sampler.num_requests += 1
            job = Job(work)
            self.requests.add(request_id, job)
            self.worker.submit(self._lanes.get(sampler_id, self._together), job)
        return request_id

    def job(self, request_id: str) -> Job:
        """Return a request of a session, which has given a sign of life."""
        self.session(request_id.partition(":")[0])
        return self.requests.job(request_id)

    def save(self, model: TrainedModel, kind: str, name: str, *, has_moments: bool, **how: Any) -> str:
        """In the worker: write a checkpoint of the model as it is; return its path."""
        adapter, decoder = model.made, self.slot.decoder
        description = adapter_description(adapter.config, self.options.model, decoder)
        info = {"base_model": self.names[0], **dataclasses.asdict(adapter.spec)}
        info |= {"user_metadata": how.pop("user_metadata", None), "run_metadata": model.user_metadata}
        moments = adapter.moments() if has_moments else None
        tensors = peft_tensors(decoder.architecture, adapter.snapshot())
        place = model.model_id, kind, name
        return self.checkpoints.save(*place, tensors, description, info, moments=moments, **how)

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return the training runs that live or have checkpoints, by name, as the API describes them."""
        always = {"model_owner": "local", "is_lora": True, "base_model": self.names[0]}
        result: dict[str, dict[str, Any]] = {}
        for name, entry, info in self.checkpoints.all():
            about = {"training_run_id": name, "lora_rank": info["rank"], "last_request_time": entry["time"]}
            run = result.setdefault(name, always | about | {"user_metadata": info.get("run_metadata")})
            kind = {"training": "last_checkpoint", "sampler": "last_sampler_checkpoint"}
            run.setdefault(kind.get(entry["checkpoint_type"], "external"), entry)
            run.pop("external", None)
        now, now_s = datetime.datetime.now(datetime.UTC), time.monotonic()
        for name, model in self.models.items():
            heard = now - datetime.timedelta(seconds=now_s - self.sessions[model.session_id].heard_s)
            about = {"training_run_id": name, "user_metadata": model.user_metadata}
            about |= {"lora_rank": None if model.spec is None else model.spec.rank}
            result[name] = always | result.get(name, {}) | about | {"last_request_time": heard.isoformat()}
        return result

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


def _run_first(turn: LaneTurn) -> None:
    (job,) = turn.jobs
    result = job.work()
    if not job.future.done():
        job.future.set_result(result)
