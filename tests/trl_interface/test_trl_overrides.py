"""A subclass of a trainer never trains with a method of its own ignored."""

import inspect
from pathlib import Path

import pytest
import transformers

import tiny_run
from qerl.errors import UserError
from qerl.trl import DPOTrainer, GRPOConfig, GRPOTrainer, KTOTrainer, SFTConfig, SFTTrainer
from qerl.trl.overrides import HONOURED, NAMES

ROWS = [{"prompt": f"{i} + {i} =", "completion": " 2"} for i in range(8)]


def reward_len(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def made(kind, folder, **more):
    if issubclass(kind, DPOTrainer | KTOTrainer):
        return kind("model", args=kind.config_class(str(folder), max_steps=1, **more), train_dataset=ROWS)
    if issubclass(kind, SFTTrainer):
        return kind("model", SFTConfig(str(folder), max_steps=1, **more), train_dataset=ROWS)
    return kind("model", reward_len, GRPOConfig(str(folder), max_steps=1, **more), ROWS)


def own(*arguments, **options):
    raise AssertionError


@pytest.mark.parametrize("name", sorted(NAMES - HONOURED))
def test_a_method_that_no_run_calls_is_refused_by_name(name, tmp_path):
    for base in (GRPOTrainer, SFTTrainer, DPOTrainer, KTOTrainer):
        kind = type("Mine", (base,), {name: own})
        with pytest.raises(UserError, match=rf"^Mine\.{name} is not supported: .*; \w+"):
            made(kind, tmp_path)
    assert not list(tmp_path.iterdir())


def test_mixins_properties_patches_and_attributes_of_the_object_are_noticed(tmp_path, monkeypatch):
    class Mixin:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return None

    class Between(Mixin, SFTTrainer):
        pass

    class Mine(Between):
        pass

    with pytest.raises(UserError, match=r"^Mine\.compute_loss is not supported"):
        made(Mine, tmp_path)
    with pytest.raises(UserError, match=r"^P\.get_train_dataloader is not supported"):
        made(type("P", (GRPOTrainer,), {"get_train_dataloader": property(own)}), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "_compute_loss", own, raising=False)
        with pytest.raises(UserError, match=r"^GRPOTrainer\._compute_loss is not supported"):
            made(GRPOTrainer, tmp_path)
    trainer = made(GRPOTrainer, tmp_path)
    trainer.training_step = own
    with pytest.raises(UserError, match=r"^GRPOTrainer\.training_step is not supported"):
        trainer.train()


def test_a_name_of_ours_is_not_replaced_by_chance(tmp_path):
    with pytest.raises(UserError, match=r"^Mine\._train replaces a method of qerl\.trl: rename it"):
        made(type("Mine", (GRPOTrainer,), {"_train": own}), tmp_path)


def test_what_trl_calls_in_a_run_is_refused_unless_only_the_script_calls_it(tmp_path):
    for name, field in (("evaluate", "eval_strategy"), ("save_model", "save_strategy")):
        kind = type("Mine", (GRPOTrainer,), {name: lambda self: "mine"})
        with pytest.raises(UserError, match=rf"^Mine\.{name} is not supported with {field}"):
            made(kind, tmp_path, **{field: "epoch"})
        assert getattr(made(kind, tmp_path, **{field: "no"}), name)() == "mine"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_run.write_model(tmp_path_factory.mktemp("model")))


def test_log_and_methods_of_ones_own_are_used(model, tmp_path):
    class Mine(SFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seen = []

        def log(self, logs, start_time=None):
            self.seen.append(sorted(logs))
            super().log(logs | {"mine": self.number()}, start_time)

        def number(self):
            return 7.0

    args = SFTConfig(str(tmp_path), max_steps=2, logging_steps=1, bf16=False)
    trainer = Mine(model, args, train_dataset=ROWS, eval_dataset=ROWS[:2])
    trainer.train()
    assert len(trainer.seen) == 2 and all("loss" in names for names in trainer.seen)
    trainer.evaluate()
    assert "eval_loss" in trainer.seen[2]
    assert [entry["mine"] for entry in trainer.state.log_history] == [7.0] * 3


def test_the_names_are_all_of_the_installed_trl():
    trl = pytest.importorskip("trl")
    for kind in (trl.GRPOTrainer, trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer):
        members = {
            name
            for base in kind.__mro__[:-1]
            for name, value in vars(base).items()
            if callable(value) or isinstance(value, property | classmethod | staticmethod)
        }
        assert {name for name in members if not name.startswith("__")} <= NAMES


@pytest.mark.parametrize("ours", [GRPOTrainer, SFTTrainer, DPOTrainer, KTOTrainer])
def test_the_trainer_takes_what_trls_takes(ours):
    trl = pytest.importorskip("trl")
    theirs = inspect.signature(getattr(trl, ours.__name__).__init__).parameters
    assert [*theirs] == [*inspect.signature(ours.__init__).parameters][:-1]


def test_events_of_the_optimizer_are_refused_and_others_that_no_run_calls_are_named(tmp_path, caplog):
    for event in ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"):
        kind = type("Mine", (transformers.TrainerCallback,), {event: own})
        for callback in (kind, kind()):
            with pytest.raises(UserError, match=rf"^Mine\.{event} is not supported"):
                GRPOTrainer("model", reward_len, GRPOConfig(str(tmp_path)), ROWS, callbacks=[callback])
    kind = type("Mine", (transformers.TrainerCallback,), {"on_predict": own})
    GRPOTrainer("model", reward_len, GRPOConfig(str(tmp_path)), ROWS, callbacks=[kind])
    assert caplog.messages == ["callbacks: no effect here: Mine.on_predict"]


def test_the_page_says_what_becomes_of_each_event_of_transformers():
    events = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text()
    assert [name for name in sorted(events) if f"`{name}`" not in page] == []


def test_an_attribute_of_trls_trainer_that_is_not_here_is_named(tmp_path):
    with pytest.raises(AttributeError, match=r"GRPOTrainer\.get_train_dataloader is not supported"):
        made(GRPOTrainer, tmp_path).get_train_dataloader()
    assert not hasattr(made(GRPOTrainer, tmp_path), "anything")
