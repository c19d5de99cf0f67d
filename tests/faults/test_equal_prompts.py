"""Prompts that are all the same, as the first message of an environment may be, or nearly so."""

import json

import pytest

import tiny_run
from faults import runs

ENV = """
class Env:
    async def reset(self, row, seed):
        self.k = row["k"]

    async def step(self, completion):
        return "no", float(len(completion) % 2 == self.k % 2), True
"""
PLAYED = "--task.environment.turn-tokens", "4", "--num-steps", "2"


def finished(folder, rows, *more):
    """What a run on these rows says."""
    files = tiny_run.write_files(folder)
    (files / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (files / "env.py").write_text(ENV)
    return runs.finish(files, folder / "run", *more)


def test_an_environment_with_one_first_message_holds_out_other_episodes(tmp_path):
    rows = [{"prompt": "Play the game.", "k": i % 20} for i in range(40)]
    said = finished(tmp_path, rows, *PLAYED, "--task.rewards", f"{tmp_path / 'env.py'}:Env")
    assert "top-1 agreement" in said
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    drawn = {json.loads(line)["prompt_index"] for line in lines}
    assert drawn and drawn.isdisjoint(range(32, 40))  # held out
    assert drawn.isdisjoint(range(12, 20))  # the same episodes as those


@pytest.mark.parametrize(
    ("prompts", "more"),
    [
        (["Play."], ("--num-prompts", "1")),
        (["Play."] * 4, ()),
        (["P"] * 8, ("--task.chat", "messages")),
        (["P", "PP", "PPP", "PPPP"], ("--task.chat", "messages")),
    ],
    ids=["one row", "equal", "one token", "each begins the next"],
)
def test_a_run_trains_on_prompts_that_hardly_differ(tmp_path, prompts, more):
    rows = [{"prompt": prompt} for prompt in prompts]
    options = "--task.num-held-out", "0", "--evaluate.num-prompts", "0", "--num-steps", "2"
    assert "top-1 agreement" in finished(tmp_path, rows, *options, *more)
