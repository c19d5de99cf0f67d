"""AQN in a run: sigma by the config's rule, noise in the norms, control by what the noise did."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from qerl.aqn.control import RULES, NoiseState, restored
from qerl.aqn.noise_table import NoiseTable
from qerl.aqn.norm_noise import noised
from qerl.config import RunConfig
from qerl.errors import UserError


class AQN:
    """The norms of one or both policies carry sigma * Z. Z follows from (seed, step, layer), and with
    noise.scope group or sample also from the prompt's or the sample's index."""

    def __init__(
        self,
        table: NoiseTable,
        config: RunConfig,
        gather: Callable[[int], list[int]] = lambda value: [value],
    ):
        """gather: returns every rank's value on every rank."""
        self.num_drawn = 0
        """Number of different Z in the latest `sampling`."""
        if config.noise.schedule != "none" and not table.norms:
            raise UserError("this model has no RMSNorm that noise can be added to: set --noise.schedule none")
        self._table, self._config, self._gather = table, config, gather
        if config.noise.scope != "step":
            table.open(config.noise.scope, config.num_noises)
        self._rule, self._state = RULES[config.noise.schedule], NoiseState(sigma=config.noise.sigma_start)

    @contextmanager
    def sampling(self, step: int) -> Iterator[float]:
        with self._noised(step) as sigma:
            yield sigma
            drawn = self._table.num_drawn if self._table.is_open else 1
            self.num_drawn = drawn if sigma > 0 else 0

    def learning(self, step: int) -> AbstractContextManager[Any]:
        return self._noised(step) if self._config.noise.noise_in == "both" else nullcontext()

    @contextmanager
    def _noised(self, step: int) -> Iterator[float]:
        noise, config = self._config.noise, self._config
        sigma = self._rule.sigma(self._state, step, config.num_steps, noise)
        with noised(self._table, sigma=sigma, unit=noise.unit, seed=config.seed, step=step):
            yield sigma

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the controller with the step's metrics; return what AQN logs."""
        self._state = self._rule.after(self._state, step, metrics, self._config.noise)
        draws = {"noise_draws": self.draws(self._gather(self.num_drawn))}
        return draws | ({"noise_floor": self._state.floor} if self._config.noise.is_controlled else {})

    def draws(self, parts: Sequence[float]) -> float:
        """Combine the numbers of draws of several parts of a call: each part has its own prompts, and all
        have the same sample indices."""
        return sum(parts) if self._config.noise.scope == "group" else max(parts)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as JSON values."""
        return dataclasses.asdict(self._state)

    def load(self, state: Mapping[str, Any]) -> None:
        self._state = restored(state)
