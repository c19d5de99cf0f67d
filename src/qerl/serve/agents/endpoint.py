"""The endpoint of a run's agents: a server on a loopback address, with a base URL and a key per episode.

    http://127.0.0.1:PORT/episodes/7/v1        requests need the key of episode 7

It runs in threads of this process, beside the one that waits for the episodes. Between two rollouts it is
paused: the engine then belongs to the learner, and no key is alive. The requests of all episodes are in one
running batch; an episode that waits for a tool has no row in it.
"""

import contextlib
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from qerl.config import AgentConfig
from qerl.config.options import ServeOptions
from qerl.errors import RunError
from qerl.serve.agents.parser import EpisodeParser, OpenEpisode
from qerl.serve.agents.record import EpisodeRecord
from qerl.serve.app import has_key, make_app
from qerl.serve.batcher import Batcher, PromptTokens
from qerl.serve.fields import ApiError
from qerl.serve.loaded_model import LoadedModel
from qerl.serve.request import RequestParser
from qerl.serve.server import make_server
from qerl.types import Sampling

MODEL_NAME = "policy"
_PREFIX = "/episodes/"
_MAX_REQUESTS = 64  # of one episode at the same time
_NUM_OTHER_CONNECTIONS = 256  # beyond those of requests: clients keep several
_START_TIMEOUT_S = 60.0


class Endpoint:
    def __init__(self, model: LoadedModel, config: AgentConfig):
        self._config, self._model = config, model
        max_episodes = config.max_concurrent
        options = ServeOptions(
            port=0,
            max_body_bytes=config.max_body_bytes,
            max_prompt_tokens=model.max_positions - 1,
            max_tokens=model.max_positions,  # more than the longest answer is cut, not refused
            max_waiting=_MAX_REQUESTS * max_episodes,
            max_connections=_MAX_REQUESTS * max_episodes + _NUM_OTHER_CONNECTIONS,
            keep_alive_timeout_s=config.episode_timeout_s,
        )
        self._parser = RequestParser(model=model, options=options, name=MODEL_NAME)
        self._batcher = Batcher(
            model.engine,
            max_waiting=options.max_waiting,
            max_positions=model.max_positions,
            is_paused=True,
            kept_fraction=config.kept_pages_fraction,
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self._episodes: dict[int, OpenEpisode] = {}
        self._next_number = 0
        app = make_app(self._parser, self._batcher, api_key=None, check=self._check)
        app.add_middleware(EpisodePath)
        self._server = make_server(app, options)
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)

    def _serve(self) -> None:
        with contextlib.suppress(SystemExit):
            self._server.run(sockets=[self._listener])

    def start(self) -> None:
        self._thread.start()
        end_s = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < end_s:
            time.sleep(0.01)
        if not self._server.started:
            raise RunError("the agents' endpoint could not be started; see the lines above")

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_START_TIMEOUT_S)
        self._listener.close()

    @property
    def prefilled(self) -> PromptTokens:
        """Tokens of prompts reused and computed so far."""
        return self._batcher.prefilled

    @contextlib.contextmanager
    def opened(
        self, records: Sequence[tuple[EpisodeRecord, int]], sampling: Sampling
    ) -> Iterator[list[OpenEpisode]]:
        """Open an episode for each (record, seed); sample for them until the block ends."""
        episodes = [self._open(record, seed, sampling) for record, seed in records]
        self._batcher.resume()
        try:
            yield episodes
        finally:
            for episode in episodes:
                self.close_episode(episode)
            self._batcher.pause()

    def _open(self, record: EpisodeRecord, seed: int, sampling: Sampling) -> OpenEpisode:
        number, self._next_number = self._next_number, self._next_number + 1
        episode = OpenEpisode(
            number=number,
            base_url=f"http://127.0.0.1:{self._port}{_PREFIX}{number}/v1",
            api_key=f"sk-episode-{secrets.token_urlsafe(24)}",
            record=record,
            seed=seed,
            sampling=sampling,
        )
        self._episodes[number] = episode
        return episode

    def close_episode(self, episode: OpenEpisode) -> None:
        """Refuse all later requests of the episode, and end those that are running."""
        episode.is_over = True
        for pending in list(episode.running):
            self._batcher.cancel(pending)
        self._batcher.forget(episode)
        self._episodes.pop(episode.number, None)

    async def _check(self, request: Request) -> None:
        """Raise ApiError unless the request has the key of the episode in its path."""
        number = request.scope.get("episode")
        if number is None:
            raise ApiError(404, "requests go to the base URL of an episode: /episodes/NUMBER/v1")
        episode = self._episodes.get(number)
        if episode is None and 0 <= number < self._next_number:
            raise ApiError(410, f"episode {number} is over: its key is invalid now", code="episode_over")
        key = secrets.token_urlsafe(24) if episode is None else episode.api_key
        if not has_key(request, hashlib.sha256(key.encode()).digest()):
            raise ApiError(401, f"this is not the key of episode {number}", code="invalid_api_key")
        assert episode is not None
        episode.num_requests += 1
        request.scope["opened"] = episode
        if episode.num_requests > _MAX_REQUESTS:
            raise ApiError(429, f"the episode has {_MAX_REQUESTS} requests running: wait for their answers")
        request.state.turn = episode.turn
        request.state.parser = EpisodeParser(
            model=self._model,
            options=self._parser.options,
            name=MODEL_NAME,
            shared=self._parser,
            episode=episode,
            max_calls=self._config.max_calls,
            timeout_s=self._config.call_timeout_s,
        )


class EpisodePath:
    """ASGI middleware: /episodes/7/v1/models -> /v1/models of episode 7, which has one request more until the
    response has ended."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path.startswith(_PREFIX):
            number, slash, rest = path.removeprefix(_PREFIX).partition("/")
            if number.isascii() and number.isdecimal() and len(number) < 16:
                scope = {**scope, "path": slash + rest, "raw_path": (slash + rest).encode()}
                scope["episode"] = int(number)
        try:
            await self._app(scope, receive, send)
        finally:
            if (episode := scope.get("opened")) is not None:
                episode.num_requests -= 1
