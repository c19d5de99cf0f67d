"""Conversations with an environment, from the engine's tokens to a whole run."""

import json

import pytest
import torch

import tiny_run
from engine.parts import packed_logprobs, request_of
from material import END, START, tokenizer
from models.tiny import tiny
from qerl.cli.main import main
from qerl.config import AlgoConfig, EngineConfig, EnvironmentConfig, NoiseConfig, RunConfig, TaskConfig
from qerl.engine import PagedEngine
from qerl.engine.stats import Stats
from qerl.errors import UserError
from qerl.learner.distributed import ALONE
from qerl.learner.minibatch import after_prefix
from qerl.tasks import RewardPool
from qerl.training.engines.multi_turn import MultiTurnEngine
from qerl.training.policy import check_supported
from qerl.types import Group, Pivot, Prompt, Sample, Turn
from training.test_session import assert_same_run, finish, kill_after, metrics

MAX_TOKENS = 200
TURN_TOKENS = 6


class Talk:
    """Gives a number of its seed's, and a reward of 1 a turn; is done in the row's number of turns."""

    async def reset(self, row, seed):
        self.row, self.seed, self.turns = row, seed, 0
        if row.get("reset") == "raise":
            raise ValueError("no world")
        return row.get("opening")

    async def step(self, completion):
        self.turns += 1
        if self.row.get("step") == "raise":
            raise ValueError("lost")
        if self.row.get("step") == "silent":
            return None, 1.0, False
        said = "x" * 300 if self.row.get("step") == "long" else str(self.seed % 1000 + self.turns)
        return said, 1.0, self.turns == self.row.get("turns", 3)


class Uneven(Talk):
    """Says something else to each sample of a prompt."""

    num = 0

    async def reset(self, row, seed):
        await super().reset(row, seed)
        Uneven.num += 1
        return str(Uneven.num)


@pytest.fixture(scope="module")
def decoder():
    return tiny(vocab_size=259, max_position_embeddings=512)


@pytest.fixture
def play(decoder):
    """play(*rows, ...) -> groups of three samples; rewards are scored as well."""
    pools = []

    def run(*rows, environment=Talk, functions=(), weights=(), seed=5, max_tokens=MAX_TOKENS, **settings):
        config = TaskConfig(
            environment=EnvironmentConfig(**({"turn_tokens": TURN_TOKENS} | settings)),
            reward_weights=weights,
            rewards=("numeric",) * (1 + len(functions)),
        )
        pools.append(RewardPool(config, [environment, *functions]))
        stop_ids = frozenset({END, *range(30)})
        engine = PagedEngine(decoder, tokenizer(), EngineConfig(), stop_token_ids=stop_ids)
        run.episodes = MultiTurnEngine(engine, pools[-1], config.environment, 100)
        prompts_P = [prompt_of(i, **row) for i, row in enumerate(rows)]
        groups = run.episodes.generate(request_of(prompts_P, max_tokens=max_tokens, seed=seed))
        run.engine, run.pool = engine, pools[-1]
        return groups

    yield run
    for pool in pools:
        pool.close()


def prompt_of(index, **columns):
    messages = [{"role": "user", "content": "hi"}]
    made = tokenizer()
    text = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens_T = made(text, add_special_tokens=False)["input_ids"]
    return Prompt(index=index, text=text, tokens_T=tokens_T, messages=messages, columns=columns)


def test_an_episodes_tokens_are_the_turns_and_the_templates_text_between_them(play):
    made = tokenizer()
    samples = [s for group in play({}, {"turns": 2}) for s in group.samples_G]
    assert [len(s.environment_spans) for s in samples] == [2, 2, 2, 1, 1, 1]
    for s in samples:
        bounds = [
            0,
            *(edge for places in s.environment_spans for edge in (places.start, places.stop)),
            len(s.tokens_T),
        ]
        turns = [s.tokens_T[a:b] for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
        said = [m["content"] for m in s.messages if m["role"] == "user"]
        assert [m["role"] for m in s.messages] == ["assistant", "user"] * len(turns)
        for n, places in enumerate(s.environment_spans):
            text = made.decode([s.tokens_T[place] for place in places])
            end = "" if turns[n][-1] == END else "<|im_end|>"
            assert text == f"{end}\n<|im_start|>user\n{said[n]}<|im_end|>\n<|im_start|>assistant\n"
        assert all(1 <= len(turn) <= TURN_TOKENS for turn in turns)
        assert len(s.logprobs_T) == sum(map(len, turns))
        assert s.reward == len(turns) and s.finish in ("stop", "length")


def letters(text):
    """The tokens of plain text, a character each."""
    return [tokenizer()(letter, add_special_tokens=False)["input_ids"][0] for letter in text]


class Scripted:
    """An engine whose policy says "A" three times: it ends its turn, is cut in it, and ends it."""

    tokenizer = tokenizer()
    stats = Stats()
    turns_T = ([*letters("A"), END], letters("A"), [*letters("A"), END])

    def generate(self, request, *, conversation):
        tokens_T, given = [], []
        for turn_T in self.turns_T:
            tokens_T += turn_T
            left = request.sampling.max_tokens - len(tokens_T)
            finish = "stop" if turn_T[-1] == END else "length"
            turn = Turn(index=0, sample_index=0, tokens_T=turn_T, text="A", finish=finish, num_left=left)
            (given_T,) = conversation.answer([turn])
            if given_T is None:
                break
            given.append(range(len(tokens_T), len(tokens_T) + len(given_T)))
            tokens_T += given_T
        one = Sample(
            tokens_T=tokens_T,
            logprobs_T=[],
            text="",
            finish="stop",
            version=0,
            environment_spans=tuple(given),
        )
        return [Group(prompt=request.prompts_P[0], samples_G=[one])]


def test_tokens_worked_out_by_hand_are_given_and_masked():
    with RewardPool(TaskConfig(), [Talk]) as pool:
        episodes = MultiTurnEngine(Scripted(), pool, EnvironmentConfig(), 100)
        request = request_of([prompt_of(0)], num_samples=1, max_tokens=100, seed=0, step=0)
        (group,) = episodes.generate(request)
    (s,) = group.samples_G
    first, second = [letters(m["content"]) for m in s.messages if m["role"] == "user"][:2]
    before, after = (
        [*letters("\n"), START, *letters("user\n")],
        [END, *letters("\n"), START, *letters("assistant\n")],
    )
    stopped, cut = [*before, *first, *after], [END, *before, *second, *after]
    (a,) = letters("A")
    assert s.tokens_T == [a, END, *stopped, a, *cut, a, END]
    assert s.sampled_indices == [
        0,
        1,
        2 + len(stopped),
        3 + len(stopped) + len(cut),
        4 + len(stopped) + len(cut),
    ]
    assert s.text.startswith(f"assistant: A\nuser: {s.messages[1]['content']}\nassistant: A")


def test_logprobs_of_an_episode_are_those_of_one_forward_over_its_tokens(play, decoder):
    for group in play({}, {"opening": "begin"}):
        for s in group.samples_G:
            truth_TV = packed_logprobs(decoder, group.prompt, s)
            truth_T = truth_TV[s.sampled_indices, torch.tensor(s.tokens_T)[s.sampled_indices]]
            assert s.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-4)


def test_siblings_meet_one_world_and_what_reset_says_is_in_their_prompt(play):
    groups = play({"opening": "begin"}, {})
    assert groups[0].prompt.messages == [{"role": "user", "content": t} for t in ("hi", "begin")]
    assert groups[0].prompt.text.endswith("begin<|im_end|>\n<|im_start|>assistant\n")
    first_said = [[s.messages[1]["content"] for s in group.samples_G] for group in groups]
    assert all(len(set(said)) == 1 for said in first_said) and first_said[0] != first_said[1]
    assert play({"opening": "begin"}, {}) == groups
    assert play({}, {}, seed=6)[1].samples_G[0].messages[1]["content"] != first_said[1][0]


def test_a_turn_limit_and_a_token_limit_end_an_episode(play):
    (limited,) = play({"turns": 9}, max_turns=2)
    assert [(len(s.environment_spans), s.reward) for s in limited.samples_G] == [(1, 2.0)] * 3
    (cut,) = play({"step": "long"})
    assert [(s.environment_spans, s.finish, s.reward) for s in cut.samples_G] == [((), "length", 1.0)] * 3
    (short,) = play({"turns": 99}, max_tokens=90, max_turns=99)
    assert all(s.finish == "length" and 30 < len(s.tokens_T) <= 90 for s in short.samples_G)


def test_a_turn_that_was_cut_is_no_cut_sample_if_its_episode_was_over(play):
    """algo.overlong would leave it out."""
    (over,) = play({"turns": 1}, {"turns": 1})[:1]
    assert max(len(s.tokens_T) for s in over.samples_G) == TURN_TOKENS
    assert [s.finish for s in over.samples_G] == ["stop"] * 3
    (limited,) = play({"turns": 9}, max_turns=1)
    assert [s.finish for s in limited.samples_G] == ["stop"] * 3
    (cut,) = play({"turns": 1}, max_tokens=TURN_TOKENS)
    assert "length" in {s.finish for s in cut.samples_G}


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"reset": "raise"}, "raised ValueError"),
        ({"step": "raise"}, "raised ValueError"),
        ({"step": "silent"}, "not messages"),
        ({"opening": "x" * 100}, "too long"),
    ],
)
def test_failures_cost_the_samples_of_their_prompt_and_are_counted(play, row, cause):
    groups = play({"turns": 1}, row)
    assert [s.failure for s in groups[0].samples_G] == [None] * 3
    assert {s.failure[0] for s in groups[1].samples_G} == {cause}
    assert play.pool.score(groups) == [[1.0] * 3, [None] * 3]
    assert play.pool.failures == {cause: 3}


def test_resets_that_disagree_are_failures_but_for_the_first(play):
    (group,) = play({}, environment=Uneven)
    assert [s.failure and s.failure[0] for s in group.samples_G] == [
        None,
        "different messages",
        "different messages",
    ]


def test_if_every_episode_fails_the_run_ends_with_a_line_on_why(play):
    groups = play({"step": "raise"})
    with pytest.raises(
        UserError, match=r"no sample of the step has a reward; 3 of 3 failed: raised ValueError: Talk"
    ):
        play.pool.score(groups)


def length(completions, **columns):
    """Functions see the whole conversation."""
    return [float(len(completions[0]))]


def test_functions_beside_an_environment_see_the_conversation_and_weigh_in(play):
    groups = play({}, {"step": "raise"}, functions=[length], weights=(1.0, 0.5))
    assert play.pool.score(groups) == [[3.0 + 0.5 * 6] * 3, [None] * 3]


def test_pages_of_an_episode_are_continued(play):
    groups = play({}, {})
    given = sum(len(places) for group in groups for s in group.samples_G for places in s.environment_spans)
    prompts = sum(len(group.prompt.tokens_T) for group in groups)
    assert play.engine.stats.prefill_tokens == prompts + given
    waited_s = play.episodes.waited_s
    assert waited_s > 0
    play.episodes.generate(request_of([], max_tokens=5, step=2))
    assert play.episodes.waited_s >= waited_s
    play.episodes.generate(request_of([], max_tokens=5, step=3))
    assert play.episodes.waited_s < waited_s


class Told(Talk):
    deterministic = True


class Counting(Talk):
    """Says something else whenever it is asked."""

    num = 0

    async def step(self, completion):
        said, reward, is_done = await super().step(completion)
        Counting.num += 1
        return f"{said} {Counting.num}", reward, is_done


def branches_of(play, environment):
    """The samples of two rows, and two branches from the second and the third turn of their first samples."""
    play(environment=environment, seed=5)
    prompts_P = [prompt_of(0, turns=4), prompt_of(1, opening="begin")]
    (batch,) = play.episodes.branch_batches(request_of(prompts_P, max_tokens=MAX_TOKENS))
    groups = batch.sample()
    starts = [
        groups[0].samples_G[0].environment_spans[1].stop,
        groups[1].samples_G[0].environment_spans[0].stop,
    ]
    pivots = [Pivot(group_index=i, sample_index=0, prefix_tokens=n) for i, n in enumerate(starts)]
    return groups, pivots, batch.branch(pivots, 2)


def test_a_branch_goes_on_where_a_turn_began_in_the_world_of_its_sample(play, decoder):
    groups, pivots, branches = branches_of(play, Talk)
    assert branches_of(play, Talk)[2] == branches
    assert [s.reward for g in branches for s in g.samples_G] == [4.0, 4.0, 3.0, 3.0]
    for group, pivot, branch in zip(groups, pivots, branches, strict=True):
        parent, n = group.samples_G[0], pivot.prefix_tokens
        num_messages = 2 * (2 - pivot.group_index)
        assert branch.prompt == group.prompt and branch.prefix_tokens == n
        assert len({tuple(s.tokens_T) for s in (parent, *branch.samples_G)}) == 3
        for s in branch.samples_G:
            assert s.tokens_T[:n] == parent.tokens_T[:n] and len(s.tokens_T) <= MAX_TOKENS
            said = [[m["content"] for m in each.messages if m["role"] == "user"] for each in (s, parent)]
            assert s.messages[:num_messages] == parent.messages[:num_messages] and said[0] == said[1]
            truth_TV = packed_logprobs(decoder, branch.prompt, s)
            truth_T = truth_TV[s.sampled_indices, torch.tensor(s.tokens_T)[s.sampled_indices]]
            assert s.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-4)
        for s, whole in zip(after_prefix(branch).samples_G, branch.samples_G, strict=True):
            assert s.logprobs_T == whole.logprobs_T[-len(s.logprobs_T) :]
            assert [n + i for i in s.sampled_indices] == [i for i in whole.sampled_indices if i >= n]
            assert len(s.logprobs_T) == len(s.sampled_indices)


def test_a_branch_has_the_rest_of_its_samples_tokens(play):
    """As an uninterrupted one: its turns and replies together are at most sample.max_tokens."""
    play(environment=Talk)
    request = request_of([prompt_of(0, turns=99)], num_samples=1, max_tokens=70)
    (batch,) = play.episodes.branch_batches(request)
    (group,) = batch.sample()
    start = group.samples_G[0].environment_spans[0].stop
    (branch,) = batch.branch([Pivot(group_index=0, sample_index=0, prefix_tokens=start)], 4)
    assert all(start < len(s.tokens_T) <= 70 and s.finish == "length" for s in branch.samples_G)


def test_a_branch_whose_environment_answers_otherwise_has_no_reward(play):
    _, _, branches = branches_of(play, Counting)
    assert {s.failure[0] for g in branches for s in g.samples_G} == {"not deterministic"}
    assert {s.reward for g in branches for s in g.samples_G} == {None}


ENVIRONMENT = """
import random

class Game:
    deterministic = True

    async def reset(self, row, seed):
        self.random, self.turns = random.Random(seed), 0

    async def step(self, completion):
        self.turns += 1
        number = self.random.randrange(10)
        if number == 0 and self.turns > 1:
            raise RuntimeError("the game broke")
        is_done = self.turns == 3
        result = str(number) if number < 7 else f"Error: {number}"
        return [{"role": "tool", "content": result}], float(len(completion) > number), is_done
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("episode"), max_positions=256)
    (folder / "game.py").write_text(ENVIRONMENT)
    return folder


def more(files):
    given = {
        "task.rewards": f"{files / 'game.py'}:Game",
        "sample.max-tokens": 60,
        "task.environment.turn-tokens": 8,
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def unbroken(files):
    finish(files, files / "whole", *more(files))
    return files / "whole"


def test_a_run_tells_of_its_episodes(unbroken):
    steps = metrics(unbroken)
    samples = [json.loads(line) for line in (unbroken / "samples.jsonl").read_text().splitlines()]
    for step in steps:
        own = [s for s in samples if s["step"] == step["step"]]
        roles = [[m["role"] for m in s["turns"]] for s in own]
        assert step["turns"] == sum(r.count("assistant") for r in roles) / len(own)
        assert step["tool_calls"] == sum(r.count("tool") for r in roles) > 0
        assert step["tool_failures"] == sum(m["content"].startswith("Error") for s in own for m in s["turns"])
        assert 0 < step["learned_tokens"] <= step["sampled_tokens"] and step["environment_tokens"] > 0
        assert (step["learned_tokens"] == step["sampled_tokens"]) == (step["num_failed_episodes"] == 0)
        assert step["num_failed_episodes"] == sum(s["reward"] is None for s in own)
    assert sum(step["num_failed_episodes"] for step in steps) > 0 < sum(s["tool_failures"] for s in steps)
    events = (unbroken / "events.jsonl").read_text()
    assert "raised RuntimeError: Game.step: the game broke" in events
    lines = (unbroken / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["environment_s"] > 0 for line in lines)
    assert steps[0]["mismatch_abs"] < 1e-4, "the learner sees the very tokens that were sampled"


def test_a_run_branches_episodes_that_failed(files):
    deep = ("--algo.branching", "deep", "--algo.deep.failure-reward", "1", "--algo.deep.num-branches", "2")
    finish(files, files / "deep", *more(files), *deep, "--num-steps", "2", "--evaluate.num-prompts", "0")
    steps = metrics(files / "deep")
    assert all(step["pivots"] > 0 and step["branches"] == 2 * step["pivots"] for step in steps)
    assert all(step["sampled_tokens"] > step["mean_tokens"] * 16 and step["grad_norm"] > 0 for step in steps)
    assert steps[0]["mismatch_abs"] < 1e-4
    samples = [json.loads(line) for line in (files / "deep" / "samples.jsonl").read_text().splitlines()]
    branches = [s for s in samples if "prefix_tokens" in s]
    assert len(branches) == sum(step["branches"] for step in steps) and all(
        len(s["turns"]) > 2 for s in branches
    )


@pytest.mark.parametrize(
    ("kind", "scope", "line"), [(Counting, "step", "deterministic = True"), (Told, "group", "noise")]
)
def test_environments_that_cannot_be_branched_are_refused_in_one_line(kind, scope, line):
    algo, noise = AlgoConfig(branching="deep"), NoiseConfig(scope=scope)
    with RewardPool(TaskConfig(), [kind]) as pool, pytest.raises(UserError, match=line):
        check_supported(RunConfig(algo=algo, noise=noise), pool, ALONE)


def test_a_run_that_was_killed_meets_the_same_episodes(files, unbroken):
    out = files / "killed"
    kill_after(3, files, out, *more(files))
    finish(files, out, *more(files))
    assert_same_run(out, unbroken)


def test_environment_tokens_are_no_part_of_lengths(unbroken):
    for step in metrics(unbroken):
        assert step["mean_tokens"] <= 3 * 8


def test_eval_meets_the_environment_too(unbroken, monkeypatch, capsys):
    argv = ["qerl", "eval", str(unbroken), "--num-prompts", "4", "--num-samples", "2", "--max-tokens", "60"]
    monkeypatch.setattr("sys.argv", argv)
    main()
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["num_prompts"] == 4 and 0 < summary["mean_tokens"] <= 3 * 8
    assert 0 < summary["pass@1"] <= 1
