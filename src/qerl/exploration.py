"""The noise of a run's policies: sigma by the config's rule, put into the norms, steered by what it did."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from qerl.algo.noise_control import RULES, restored, started, stored
from qerl.config import RunConfig
from qerl.errors import UserError
from qerl.model.decoder import Decoder
from qerl.model.noise import make_table, noised
from qerl.ranks import ALONE, Ranks


class Exploration:
    """AQN: the norms of one or both policies carry sigma * Z, Z drawn from (seed, step, layer), and by
    noise.per from the prompt's or the sample's index."""

    def __init__(self, decoder: Decoder, config: RunConfig, ranks: Ranks = ALONE):
        self.num_drawn = 0
        """Different Z of the latest `sampling`."""
        if config.noise.schedule != "none" and not decoder.noised_norms():
            raise UserError("noise.schedule asks for noise, but no norm of this model takes it")
        self._decoder, self._config, self._ranks = decoder, config, ranks
        if config.noise.per != "step":
            make_table(decoder, config.noise.per, config.num_noises)
        self._rule, self._state = RULES[config.noise.schedule], started(config.noise)

    @contextmanager
    def sampling(self, step: int) -> Iterator[float]:
        with self._noised(step) as sigma:
            yield sigma
            table = self._decoder.noise_table
            self.num_drawn = (table.num_drawn if table.is_open else 1) if sigma > 0 else 0

    def learning(self, step: int) -> AbstractContextManager[Any]:
        return self._noised(step) if self._config.noise.noise_in == "both" else nullcontext()

    @contextmanager
    def _noised(self, step: int) -> Iterator[float]:
        noise, config = self._config.noise, self._config
        sigma = self._rule.sigma(self._state, step, config.num_steps, noise)
        with noised(self._decoder, sigma=sigma, unit=noise.unit, seed=config.seed, step=step):
            yield sigma

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Takes the step's metrics in; gives what a steered run logs of it."""
        self._state = self._rule.after(self._state, step, metrics, self._config.noise)
        found = {"noise_draws": self.draws(self._ranks.gather(self.num_drawn))}
        return found | ({"noise_floor": self._state.floor} if self._config.noise.is_steered else {})

    def draws(self, parts: Sequence[float]) -> float:
        """Of a whole whose parts drew so many: each has prompts of its own, and all have the same indices of
        samples."""
        return sum(parts) if self._config.noise.per == "group" else max(parts)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return stored(self._state)

    def load(self, state: Mapping[str, Any]) -> None:
        self._state = restored(state)
