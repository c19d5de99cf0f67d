"""Learning from preferences: DPO, KTO and their relatives, on the learner of every other run.

    reference    logprob of each completion under the policy that the run begins with, read once by the same
                 model with its adapter off (or with adapter.init_from's) and kept in reference.json
    a step       read the policy's logprobs of the batch; a_i = -d loss / d logprob of completion i, by
                 algo/preference.py; then the learner's step with the advantages a_i and the loss `nll`

The gradient is the exact one of the loss over the whole batch, however it is packed: the completions of a
prompt share its rows, and nothing is padded. It costs one forward pass more than the completions' own.

    loss, rewards/..., logps/..., kl     before the step's update, by TRL's names
    eval_...                             the same of the evaluation rows, in batches of the same size
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qerl.algo.preference import Completions, advantages, preference_loss, preference_metrics, with_margin
from qerl.errors import UserError, quantity
from qerl.models.checkpoint.source import locate
from qerl.models.peft.adapter import adapter_off, load_adapter
from qerl.models.peft.peft_reader import ADAPTER, ADAPTER_CONFIG, read_adapter
from qerl.tasks.rows.preferences import Preference, mismatched
from qerl.tasks.sources import file_digest
from qerl.tracking.atomic_file import encode, read_object, write_atomic
from qerl.tracking.provenance import files_stamp
from qerl.training.sft import StoredTraining
from qerl.types import Group

REFERENCE = "reference.json"
_CHUNK = 64  # groups that are read together: the logprobs' last bits depend on what is
Batch = dict[int, Preference]
Logps = dict[tuple[int, int], float]
"""{(index of a prompt, of its sample): sum of the sample's logprobs}."""


class PreferenceTuning(StoredTraining[Preference]):
    headlines = ("loss", "rewards/accuracies", "rewards/margins")

    def learn(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        batch = self._rows.items(step, self.config.num_prompts)
        groups = [each.group(index) for index, each in batch.items()]
        completions = self._completions(batch, groups)
        loss, advantage_S = advantages(completions, self.config.dpo)
        num_tokens = sum(len(sample.logprobs_T) for group in groups for sample in group.samples_G)
        values = iter(advantage_S)
        weighted = [  # the loss nll divides by the tokens of the step
            replace(g, samples_G=[replace(s, advantage=num_tokens * next(values)) for s in g.samples_G])
            for g in groups
        ]
        metrics = self.learner.step(weighted)
        figures = preference_metrics(completions, self.config.dpo)
        return metrics, ({"loss": loss} if "loss" in metrics else {}) | figures

    def held_out(self) -> dict[str, float]:
        """Return the mean over the evaluation rows, each with those of its batch; what is measured of chosen
        or rejected completions is their mean."""
        totals, counts = defaultdict[str, float](float), defaultdict[str, int](int)
        for batch in self._evaluation_batches():
            groups = [each.group(index) for index, each in batch.items()]
            completions = self._completions(batch, groups)
            figures = preference_metrics(completions, self.config.dpo)
            figures["loss"] = preference_loss(completions, self.config.dpo).item()
            num_chosen = int(completions.is_chosen_S.sum())
            weights = {"chosen": num_chosen, "rejected": len(completions.is_chosen_S) - num_chosen}
            for name, value in figures.items():
                weight = weights.get(name.rpartition("/")[2], len(batch))
                totals[name] += weight * value
                counts[name] += weight
        return with_margin({name: total / counts[name] for name, total in totals.items()})

    def described(self, figures: dict[str, float]) -> str:
        shown = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
        others = [f", {label} {figures[name]:.4f}" for name, label in shown.items() if name in figures]
        return f"{figures['loss']:.4f}{''.join(others)}"

    def _evaluation_batches(self) -> Iterator[Batch]:
        """Yield the evaluation rows in batches; their indices follow those of the training rows."""
        size, rows = self.config.num_prompts, self._rows
        for start in range(0, len(rows.evaluated), size):
            part = rows.evaluated[start : start + size]
            yield {len(rows.learned) + start + i: each for i, each in enumerate(part)}

    def _completions(self, batch: Batch, groups: list[Group]) -> Completions:
        """Return what policy and reference give the completions of a batch, and KTO's KL."""
        others = self._mismatched(batch)
        policy, reference = self._logps([*groups, *others]), self._reference()
        keys = [(group.prompt.index, s.sample_index) for group in groups for s in group.samples_G]
        ratios = [policy[key] - reference[key] for key in _keys(others)]
        return Completions(
            policy_S=_vector(policy[key] for key in keys),
            reference_S=_vector(reference[key] for key in keys),
            tokens_S=_vector(len(s.logprobs_T) for group in groups for s in group.samples_G),
            is_chosen_S=torch.tensor([flag for each in batch.values() for flag in each.is_chosen]),
            kl=max(0.0, sum(ratios) / max(1, len(ratios))) if self.config.dpo.has_kl else None,
        )

    def _mismatched(self, batch: Batch) -> list[Group]:
        if not self.config.dpo.has_kl:
            return []
        return mismatched(batch, len(self._rows.learned) + len(self._rows.evaluated))

    def _logps(self, groups: list[Group]) -> Logps:
        """Return the logprob of each completion, on every rank."""
        of_rank = {
            key: value
            for reading in self.learner.read(groups)
            for key, value in zip(
                [(prompt, index) for prompt, samples in reading.batch.members for index in samples],
                reading.batch.spans.total(reading.logprob_C.double()).tolist(),
                strict=True,
            )
        }
        return {key: value for part in self._ranks.gather(of_rank) for key, value in part.items()}

    def _reference(self) -> Mapping[tuple[int, int], float]:
        """Return the reference's logprobs of all completions: those in the run's folder, or computed once."""
        if self._reference_logps is None:
            key, stored = self._ranks.from_first(lambda: (self._reference_key(), self._stored_reference()))
            if stored.get("key") != key:
                values = self._compute_reference()
                stored = {"key": key, "logps": [[*place, value] for place, value in values.items()]}
                if self._ranks.is_first and self._rows.learned:
                    write_atomic(self._folder / REFERENCE, encode(stored))
            self._reference_logps = {(prompt, i): value for prompt, i, value in stored["logps"]}
        return self._reference_logps

    _reference_logps: Logps | None = None

    def _stored_reference(self) -> dict[str, Any]:
        """Return what the run's folder has; nothing if that is damaged."""
        path = self._folder / REFERENCE
        try:
            return read_object(path) if path.exists() else {}
        except UserError:
            return {}

    def _reference_key(self) -> str:
        """Return what the reference's values depend on: tokens, batches, model and its first adapter, both as
        their files are, since another model may lie at the same path."""
        config, rows, digest = self.config, self._rows, hashlib.sha256()
        model, size, folder = config.model, config.num_prompts, config.adapter.init_from
        names = () if folder is None else (ADAPTER, ADAPTER_CONFIG)
        digests = [file_digest(Path(folder or "").expanduser() / name) for name in names]
        facts = files_stamp(locate(model.path).path), model.format, model.dtype, digests
        order = config.dpo.order, config.seed, size, config.dpo.has_kl, len(rows.learned)
        digest.update(json.dumps([*facts, *order]).encode())
        for each in [*rows.learned, *rows.evaluated]:
            digest.update(each.key)
        return digest.hexdigest()

    def _compute_reference(self) -> Logps:
        groups, values = self._all_groups(), dict[tuple[int, int], float]()
        what = f"reading the reference's logprobs of {quantity(len(groups), 'prompt')}"
        with self._journal.work(what) as report, self._reference_policy():
            for start in range(0, len(groups), _CHUNK):
                values |= self._logps(groups[start : start + _CHUNK])
                report(min(start + _CHUNK, len(groups)), len(groups), "prompts")
        return values

    def _all_groups(self) -> list[Group]:
        """Return every group that a step or an evaluation reads."""
        rows, size = self._rows, self.config.num_prompts
        batches = [*self._evaluation_batches()]
        if rows.learned and self.config.dpo.has_kl:  # the batches of all epochs are the same
            batches += [rows.items(step, size) for step in range(rows.steps_per_epoch(size))]
        groups = [each.group(index) for index, each in enumerate([*rows.learned, *rows.evaluated])]
        return groups + [group for batch in batches for group in self._mismatched(batch)]

    @contextmanager
    def _reference_policy(self) -> Iterator[None]:
        """Compute with the policy that the run begins with."""
        adapter = self.config.adapter
        if adapter.init_from is None:
            with adapter_off(self.decoder):
                yield
            return
        present = {name: master.clone() for name, master in self.learner.adapter_state().items()}
        load_adapter(self.decoder, read_adapter(adapter.init_from, adapter))
        try:
            yield
        finally:
            load_adapter(self.decoder, present)


def _keys(groups: list[Group]) -> list[tuple[int, int]]:
    return [(group.prompt.index, s.sample_index) for group in groups for s in group.samples_G]


def _vector(values: Iterator[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
