"""Sampling by Ray workers beside the learner, up to max_staleness versions behind it.

    step s is requested    with the newest version when the loop wants step s - max_staleness
    so it is sampled by    the version before update step s - max_staleness, on whichever worker
    staleness              versions between the one that sampled and the one that learns

The version is fixed at the request, the random numbers by (seed, step, prompt, sample): with the same number
of workers a run has the same result however fast they are and whether some die. A worker that dies is
replaced, and its outstanding requests are repeated; finished results are kept. `algo.importance` corrects for
staleness as for any difference of the policies. Tests: tests/training/test_ray_engine.py.
"""

import contextlib
import dataclasses
import importlib
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from qerl.aqn.aqn import AQN
from qerl.config import RunConfig
from qerl.engine.stats import Stats
from qerl.errors import RunError, UserError, require
from qerl.learner.distributed import Ranks
from qerl.training.engines.replayed_batch import HistoriesPG, Parent, ReplayingEngine
from qerl.training.ray_worker import MakeEpisodes, PublishedPolicy, Sampled, Worker
from qerl.training.rollouts.evaluation import EVALUATION_STEP
from qerl.types import GenerateRequest, Group, OnBurst, Prompt, Sample

_MAX_ATTEMPTS = 3
_REACHING_S = 5.0


class Cluster:
    """Ray and the workers that it starts for this run."""

    def __init__(self, ray: Any, config: RunConfig):
        self.ray, self._config = ray, config
        num_gpus = 1 if config.model.device == "cuda" else 0
        self._make = ray.remote(num_cpus=1, num_gpus=num_gpus, max_restarts=0)(Worker).remote
        self._arguments: tuple[Any, ...] = ()
        self.workers: list[Any] = []

    def start(self, make_episodes: MakeEpisodes | None) -> None:
        """Start the workers. make_episodes: see Worker; raise UserError if it cannot be sent."""
        try:
            self._arguments = self._config, self.ray.cloudpickle.dumps(make_episodes)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"--ray: the environment or agent cannot be sent to workers ({reason}): name it in the config"
                " as FILE.py:NAME, which they import"
            ) from None
        self.workers = [self._make(*self._arguments) for _ in range(self._config.ray.num_samplers)]

    def replace(self, index: int) -> None:
        self.workers[index] = self._make(*self._arguments)

    def places(self) -> list[str]:
        """Wait until all workers have loaded; return where each runs."""
        with self.unwrapped_errors():
            return self.ray.get([worker.place.remote() for worker in self.workers])

    @property
    def loss_errors(self) -> tuple[type[Exception], ...]:
        """Ray's errors for a worker, or its result, that is lost."""
        return self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError

    @contextlib.contextmanager
    def unwrapped_errors(self) -> Iterator[None]:
        """Raise a worker's own UserError or RunError instead of Ray's wrapper."""
        try:
            yield
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError | RunError):
                raise type(error.cause)(str(error.cause)) from None
            raise


@contextlib.contextmanager
def join_cluster(config: RunConfig, ranks: Ranks) -> Iterator[Cluster | None]:
    """Connect to the cluster of config.ray, or start it; yield None if there is no address."""
    if config.ray.address is None:
        yield None
        return
    if ranks.count > 1:
        raise UserError("ray.address works with a single learner process: start without torchrun")
    check_reachable(config.ray.address)
    is_local = config.ray.address == "local"
    if is_local:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry from a local cluster
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise UserError(f"ray.address needs Ray ({error}): pip install ray") from None
    try:
        more = {"include_dashboard": False} if is_local else {}
        ray.init(address=config.ray.address, log_to_driver=False, logging_level="ERROR", **more)
    except (ConnectionError, RuntimeError, ValueError) as error:
        hides_why = isinstance(error, ConnectionError) and "RAY_AUTH_MODE" not in os.environ
        hint = "; if the cluster requires a token, set RAY_AUTH_MODE=token" if hides_why else ""
        raise UserError(f"ray.address: {config.ray.address} cannot be reached ({error}){hint}") from None
    try:
        reservation = _reserve_gpu(ray) if config.model.device == "cuda" else None
        yield Cluster(ray, config)
        del reservation
    finally:
        ray.shutdown()


def check_reachable(address: str) -> None:
    """Raise UserError within seconds if nothing listens there: Ray itself retries for minutes."""
    target = (os.environ.get("RAY_ADDRESS") or "auto") if address == "auto" else address  # Ray's own rule
    if target in ("auto", "local"):
        return
    try:
        place = urlsplit(target if "://" in target else f"//{target}")
        host, port = place.hostname, place.port
        (host or "").encode("idna")  # the socket would raise an obscure error
    except ValueError:
        host = port = None
    require(bool(host and port), f"ray.address: {target} is neither HOST:PORT, auto nor local")
    try:
        socket.create_connection((host, port), timeout=_REACHING_S).close()
    except OSError as error:
        raise UserError(f"ray.address: {target} cannot be reached ({error.strerror or error})") from None


def _reserve_gpu(ray: Any) -> Any:
    """Reserve the learner's GPU in Ray for as long as the returned actor lives."""
    node_id = ray.get_runtime_context().get_node_id()
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    keeper = ray.remote(num_cpus=0, num_gpus=1, scheduling_strategy=here)(_GpuReservation).remote()
    torch.cuda.set_device(_index_of(ray.get(keeper.gpu.remote()), os.environ.get("CUDA_VISIBLE_DEVICES")))
    return keeper


def _index_of(gpu: str, visible: str | None) -> int:
    """Return torch's index of a GPU that Ray names by its number, or as CUDA_VISIBLE_DEVICES does if set."""
    return int(gpu) if visible is None else [each.strip() for each in visible.split(",")].index(gpu)


class _GpuReservation:
    def gpu(self) -> str:
        return str(importlib.import_module("ray").get_gpu_ids()[0])


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """One worker's part of a request."""

    worker_index: int
    method: str
    policy: PublishedPolicy
    num_prompts: int
    """Prompts, or parents of branches."""
    arguments: tuple[Any, ...]
    """Those of the method after the policy."""
    worker: Any = None
    answer: Any = None
    attempts: int = 0


class RemoteEngine(ReplayingEngine):
    """Takes the engine's place in the loop; each worker samples every num_samplers-th prompt of a call."""

    def __init__(
        self,
        cluster: Cluster,
        config: RunConfig,
        *,
        prompts: Callable[[int, int], list[Prompt]],
        noise: AQN,
        adapter: Callable[[], Mapping[str, Tensor]],
        notice: Callable[[str], None],
    ):
        """prompts: (step, num_prompts) -> prompts of the first round. adapter: the current fp32 masters."""
        self._cluster, self._config = cluster, config
        self._prompts, self._noise, self._adapter, self._notice = prompts, noise, adapter, notice
        self._split, self.stats = Ranks(0, config.ray.num_samplers), Stats()
        self._version, self._published = 0, [None]
        self._ahead: dict[tuple[int, tuple[int, ...]], list[_Job]] = {}
        self._newest_step = -1
        self._pending: list[_Job] = []
        named = ("staleness", "replaced_samplers", "resampled_prompts", "noise_draws")
        self._metrics: dict[str, float] = dict.fromkeys(named, 0.0)
        self._of_workers: dict[str, float] = {}
        for index, place in enumerate(cluster.places()):
            notice(f"sampler {index} is {place}")

    def publish(self, version: int) -> None:
        masters = {name: master.cpu() for name, master in self._adapter().items()}
        self._version, self._published = version, [self._cluster.ray.put(masters)]

    def generate(self, request: GenerateRequest, *, on_burst: OnBurst | None = None) -> list[Group]:
        if request.step != EVALUATION_STEP:
            self._start_ahead(request, request.step + self._config.ray.max_staleness)
        return self._groups(request, self._results_of(request))

    def sample(self, request: GenerateRequest) -> tuple[list[Group], HistoriesPG]:
        """Later steps are started by `branch`: the branches of this one go first."""
        self._start_ahead(request, request.step)
        parts = self._results_of(request)
        return self._groups(request, parts), self._split.interleave([part.histories_P_G for part in parts])

    def branch(
        self, parents: list[Parent], num_branches: int, request: GenerateRequest
    ) -> list[list[Sample]]:
        shared = num_branches, request.with_prompts([])
        jobs = self._start("branch", request.step, parents, lambda share: (share, *shared)) if parents else []
        self._start_ahead(request, request.step + self._config.ray.max_staleness)
        parts = self._results(jobs, request.step)
        return [samples_G for _, samples_G in self._split.interleave([part.groups_P for part in parts])]

    def _groups(self, request: GenerateRequest, parts: list[Sampled]) -> list[Group]:
        samples_P = self._split.interleave([part.groups_P for part in parts])
        pairs = zip(request.prompts_P, samples_P, strict=True)
        return [Group(prompt=opened or prompt, samples_G=samples_G) for prompt, (opened, samples_G) in pairs]

    def _results_of(self, request: GenerateRequest) -> list[Sampled]:
        """Wait for the samples, which may have been started before."""
        jobs = self._ahead.pop(_key(request), None) or self._start_samples(request)
        return self._results(jobs, request.step)

    def _results(self, jobs: list[_Job], step: int) -> list[Sampled]:
        """Wait for the answers; count them in stats and metrics."""
        parts = [self._result(job) for job in jobs]
        self.stats = Stats(num_tokens=sum(part.num_tokens for part in parts))
        if step != EVALUATION_STEP and parts:
            staleness = float(self._version - jobs[0].policy.version)  # later rounds of the step are fresher
            self._metrics["staleness"] = max(self._metrics["staleness"], staleness)
            draws = [part.noise_draws for part in parts]
            self._metrics["noise_draws"] = self._noise.draws([self._metrics["noise_draws"], *draws])
            self._of_workers = with_round(self._of_workers, [part.metrics for part in parts])
        return parts

    def take_metrics(self) -> dict[str, float]:
        taken, self._metrics = self._metrics, dict.fromkeys(self._metrics, 0.0)
        of_workers, self._of_workers = self._of_workers, {}
        return taken | of_workers

    def _start_ahead(self, request: GenerateRequest, last: int) -> None:
        """Start the samples of all steps up to the last one that have not been started."""
        last = min(last, self._config.num_steps - 1)
        for step in range(max(request.step, self._newest_step + 1), last + 1):
            prompts_P = self._prompts(step, self._config.num_prompts)
            later = dataclasses.replace(request, prompts_P=prompts_P, step=step)
            self._ahead[_key(later)] = self._start_samples(later)
        self._newest_step = max(last, self._newest_step)

    def _start_samples(self, request: GenerateRequest) -> list[_Job]:
        return self._start(
            "sample", request.step, request.prompts_P, lambda share_P: (request.with_prompts(share_P),)
        )

    def _start(
        self, method: str, step: int, items: list[Any], arguments: Callable[[list[Any]], tuple[Any, ...]]
    ) -> list[_Job]:
        """Call the workers' method of this name, with the arguments for each worker's share of the items."""
        noise = None if step == EVALUATION_STEP else self._noise.state()
        policy, jobs = PublishedPolicy(self._version, self._published, noise), []
        for index in range(self._split.count):
            share = Ranks(index, self._split.count).share(items)
            jobs.append(_Job(index, method, policy, len(share), arguments(share)))
            self._send(jobs[-1])
        self._pending += jobs
        return jobs

    def _send(self, job: _Job) -> None:
        job.worker = self._cluster.workers[job.worker_index]
        job.answer = getattr(job.worker, job.method).remote(job.policy, *job.arguments)
        job.attempts += 1

    def _result(self, job: _Job) -> Sampled:
        while True:
            try:
                with self._cluster.unwrapped_errors():
                    answer = self._cluster.ray.get(job.answer)
            except self._cluster.loss_errors as error:
                if job.attempts == _MAX_ATTEMPTS:
                    died = f"sampler {job.worker_index} died {_MAX_ATTEMPTS} times"
                    raise RunError(f"{died}: {error}") from None
                self._replace(job)
                continue
            self._pending.remove(job)
            return answer

    def _replace(self, lost: _Job) -> None:
        """Replace the lost worker and repeat its outstanding requests."""
        lost_worker = lost.worker
        self._cluster.replace(lost.worker_index)
        of_worker = [job for job in self._pending if job.worker is lost_worker]
        outstanding = [job for job in of_worker if not self._has_result(job)]
        for job in outstanding:
            self._send(job)
        num_prompts = sum(job.num_prompts for job in outstanding)
        self._metrics["replaced_samplers"] += 1
        self._metrics["resampled_prompts"] += num_prompts
        self._notice(f"sampler {lost.worker_index} died; a new one samples its {num_prompts} prompts")

    def _has_result(self, job: _Job) -> bool:
        ray = self._cluster.ray
        if not ray.wait([job.answer], timeout=0)[0]:
            return False
        try:
            ray.get(job.answer)
        except self._cluster.loss_errors:
            return False
        except ray.exceptions.RayTaskError:
            pass  # raised again by _result
        return True


def _key(request: GenerateRequest) -> tuple[int, tuple[int, ...]]:
    return request.step, tuple(prompt.index for prompt in request.prompts_P)


def with_round(before: dict[str, float], of_workers: list[dict[str, float]]) -> dict[str, float]:
    """Add metrics of workers that ran at the same time: the longest of their seconds, the sum of all else."""
    merged = dict(before)
    for name in of_workers[0]:
        combine = max if name.endswith("_s") else sum
        merged[name] = before.get(name, 0.0) + combine(each[name] for each in of_workers)
    return merged
