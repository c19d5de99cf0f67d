"""The engine here is a table: the text of every sample is fixed by prompt and place."""

import math
import statistics

import pytest

from qerl.training.rollouts.evaluation import (
    EVALUATION_STEP,
    held_out_text,
    sample_and_score,
    sampled_tokens,
    summarize,
)
from qerl.types import GenerateRequest, Group, Prompt, Sample, Sampling

SAMPLED = Sampling(max_tokens=8, temperature=0.6, top_p=0.95)
GREEDY = Sampling(max_tokens=8, temperature=0.0)


class Table:
    """An engine that samples what it was given, sample g of prompt p being texts_P_G[p][g]."""

    def __init__(self, texts_P_G):
        self.texts_P_G, self.calls = texts_P_G, []

    def generate(self, request, *, on_burst=None):
        self.calls.append(request)
        texts_P_G = [self.texts_P_G[prompt.index][: request.num_samples] for prompt in request.prompts_P]
        groups = [
            Group(prompt=prompt, samples_G=list(map(sample, texts_G)))
            for prompt, texts_G in zip(request.prompts_P, texts_P_G, strict=True)
        ]
        for burst in ([], list(enumerate(groups[:1])), list(enumerate(groups[1:], start=1))):
            if on_burst is not None:
                on_burst(burst)
        return groups

    def publish(self, version):
        raise AssertionError("evaluation changes no weights")


def score(groups):
    """The number that each text is; None for anything else."""
    return [[number(s.text) for s in group.samples_G] for group in groups]


def sample(text):
    length = len(text)
    return Sample(tokens_T=[7] * length, logprobs_T=[-0.5] * length, text=text, finish="stop", version=0)


def number(text):
    try:
        return float(text)
    except ValueError:
        return None


def prompts(num):
    return [Prompt(index=i, text="", tokens_T=[1], messages=None, columns={}) for i in range(num)]


TEXTS = [["1", "no", "1", "no"], ["0", "0", "0", "0"], ["1", "1", "1.5", "0.9"]]


def request(num_samples=2, sampling=SAMPLED):
    return GenerateRequest(
        prompts(3), num_samples=num_samples, sampling=sampling, seed=5, step=EVALUATION_STEP
    )


def evaluated(num_samples=4, sampling=SAMPLED, threshold=1.0):
    groups, rewards_P_G = sample_and_score(Table(TEXTS), score, request(num_samples, sampling))
    return summarize(rewards_P_G, list(map(sampled_tokens, groups)), threshold)


def test_accuracy_is_the_mean_over_prompts_with_its_error():
    # fractions 1/2, 0, 3/4: mean 5/12, variance ((1/12)^2 + (5/12)^2 + (4/12)^2) / 2 = 42/288
    result = evaluated()
    assert result.accuracy == pytest.approx(5 / 12, rel=1e-12)
    assert result.accuracy_error == pytest.approx(math.sqrt(42 / 288 / 3), rel=1e-12)
    assert result.num_prompts == 3


def test_pass_at_k_for_the_powers_of_two():
    # c = 2, 0, 3 of n = 4: pass@2 = 5/6, 0, 1
    assert evaluated().pass_at_k == pytest.approx({1: 5 / 12, 2: 11 / 18, 4: 2 / 3}, rel=1e-12)


def test_pass_at_k_stops_at_the_samples_there_are():
    assert set(evaluated(num_samples=3).pass_at_k) == {1, 2}


def test_a_failed_reward_counts_as_wrong_and_is_counted():
    result = evaluated()
    assert result.num_failed == 2
    assert evaluated(num_samples=1).num_failed == 0


def test_the_threshold_decides_what_is_correct():
    assert evaluated(threshold=1.2).accuracy == pytest.approx(1 / 12, rel=1e-12)
    assert evaluated(threshold=0.9).accuracy == pytest.approx(1 / 2, rel=1e-12)


def test_the_mean_reward_is_over_the_samples_that_have_one_and_needs_no_threshold():
    # 1, 0 and 4.4 / 4: the two failed samples of the first prompt have none
    for threshold in (1.0, None):
        result = evaluated(threshold=threshold)
        assert result.reward == pytest.approx(2.1 / 3, rel=1e-12)
        assert result.reward_error == pytest.approx(statistics.stdev((1, 0, 1.1)) / math.sqrt(3))
    assert result.accuracy is None and result.accuracy_error is None and result.pass_at_k == {}


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"accuracy": 0.5, "greedy": 0.25, "reward": 0.5, "greedy_reward": 0.25},
         "held-out accuracy after training: 0.500 at temperature 1, 0.250 greedy (8 problems)"),
        ({"reward": -46.64, "greedy_reward": -30},
         "held-out reward after training: -46.640 at temperature 1, -30.000 greedy (8 problems)"),
        ({"accuracy": 0.5, "greedy": 0.25, "reward": 0.75, "greedy_reward": 0.5},
         "held-out accuracy after training: 0.500 at temperature 1, 0.250 greedy;"
         " held-out reward after training: 0.750 at temperature 1, 0.500 greedy (8 problems)"),
    ],
)  # fmt: skip
def test_the_console_says_what_there_is(figures, said):
    assert held_out_text(figures, "after training", temperature=1.0, num_prompts=8) == said
    one = held_out_text(figures, "after training", temperature=1.0, num_prompts=1)
    assert one == said.replace("8 problems", "1 problem")


def test_mean_tokens_is_over_samples():
    # 6 + 4 + 8 characters over 12 samples
    assert evaluated().mean_tokens == 1.5


def test_the_engine_is_asked_once_with_a_step_that_no_training_has():
    engine = Table(TEXTS)
    sample_and_score(engine, score, request())
    assert engine.calls == [request()]
    assert EVALUATION_STEP < 0


def test_the_samples_that_have_ended_are_reported_after_each_burst():
    told = []
    sample_and_score(Table(TEXTS), score, request(), lambda *each: told.append(each))
    assert told == [(done, 6, "samples") for done in (0, 2, 6)]


def test_greedy_is_one_sample_a_prompt():
    result = evaluated(num_samples=1, sampling=GREEDY)
    assert result.accuracy == pytest.approx(2 / 3, rel=1e-12)
    assert result.pass_at_k == {1: pytest.approx(2 / 3)}
