"""A judge that compares the samples of a group: its requests, and the rewards in its replies."""

import dataclasses
import re

import pytest
from test_judge import endpoint, groups_of, task  # noqa: F401  a fixture

from qerl.config import JudgeConfig, TaskConfig
from qerl.errors import UserError
from qerl.tasks import RewardPool
from qerl.tasks.judges.own_judge import OwnJudge
from qerl.tasks.judges.rubric import JudgeFailed, pairs_of, rubric_of
from qerl.tasks.scoring import Failure


def arguments(*texts):
    return {"prompts": ["Which?"] * len(texts), "completions": list(texts), "key": ["k"] * len(texts)}


def by_length(message):
    """The reply of a judge that scores answers of a pair, or of a list, by their lengths."""
    answers = re.findall(r"<(?:answer \d+|first|second)>\n(.*?)\n</", message)
    lines = [f"Answer {k}, Score: {len(text)}" for k, text in enumerate(answers, 1)]
    return "\n".join(["Score: 9, at first.", *lines])


def rewards(compare, *texts, reply=by_length, **settings):
    rubric = rubric_of(JudgeConfig(compare=compare, **settings))
    scores = []
    for request in rubric.requests(arguments(*texts)):
        try:
            scores.append(rubric.scores(reply(request.message), request))
        except JudgeFailed as error:
            scores.append(Failure("judge", str(error)))
    return rubric.rewards(arguments(*texts), scores)


def test_one_request_shows_all_samples_of_a_group_and_equal_ones_once():
    rubric = rubric_of(JudgeConfig(compare="list"))
    (request,) = rubric.requests(arguments("aa", "b", "aa"))
    assert request.texts == ("aa", "b") and "a question and 2 answers" in request.message
    assert "<answer 1>\naa\n</answer 1>\n\n<answer 2>\nb\n</answer 2>" in request.message
    assert rewards("list", "aa", "b", "aa", "cccc") == [0.2, 0.1, 0.2, 0.4]


def test_a_reply_without_a_score_for_each_costs_the_group():
    outcomes = rewards("list", "a", "b", reply=lambda message: "Score: 3")
    assert [each.message for each in outcomes] == ["fewer than 2 scores in the reply 'Score: 3'"] * 2


def test_pairs_go_round_in_a_circle_and_meet_once():
    assert pairs_of(3, None) == [(0, 1), (1, 2), (2, 0)]
    assert pairs_of(4, 1) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert pairs_of(2, 5) == [(0, 1)] and pairs_of(1, None) == pairs_of(0, None) == []
    for num in range(2, 9):
        pairs = pairs_of(num, None)
        assert len({frozenset(pair) for pair in pairs}) == len(pairs) == num * (num - 1) // 2


def test_the_reward_of_pairs_is_the_share_of_wins():
    assert rewards("pairs", "a", "bbb", "cc", rounds=None) == [0, 1, 0.5]
    assert rewards("pairs", "aa", "bb", "c", "c", rounds=None) == [0.75, 0.75, 0, 0]
    assert rewards("pairs", "alone", "alone") == [0.5, 0.5]


def test_which_of_two_answers_that_meet_once_is_first_depends_on_the_texts_alone():
    rubric = rubric_of(JudgeConfig(compare="pairs"))
    places = []
    for k in range(200):
        (request,) = rubric.requests(arguments(f"a {k}", f"b {k}"))
        assert rubric.requests(arguments(f"b {k}", f"a {k}")) == [request]
        places.append(request.texts[0][0])
    assert 70 < places.count("a") < 130
    several = (rubric.requests(arguments(*(f"{letter} {k}" for letter in "abcd"))) for k in range(50))
    pairs = [each.texts[0][0] + each.texts[1][0] for requests in several for each in requests]
    assert {"ac", "ca", "bd", "db"} < set(pairs)  # opposite in the circle
    assert {"ab", "bc", "cd", "da"} == set(pairs) - {"ac", "ca", "bd", "db"}


@pytest.mark.parametrize(("compare", "num"), [("none", 8), ("list", 1), ("pairs", 16)])
def test_no_samples_need_more_requests_than_those_that_differ(compare, num):
    rubric = rubric_of(JudgeConfig(compare=compare))
    assert rubric.max_requests(8) == num == len(rubric.requests(arguments(*"abcdefgh")))
    assert len(rubric.requests(arguments(*"abcdefff"))) < num or compare != "pairs"


def test_pairs_are_asked_for_four_at_a_time_with_a_deadline_for_each_four(endpoint, tmp_path):  # noqa: F811
    config = task(endpoint, tmp_path, compare="pairs", rounds=None, rubric="{first} {second} draw")
    with RewardPool(dataclasses.replace(config, reward_timeout_s=1.5)) as pool:
        assert pool.score(groups_of("a", "b", "c", "d")) == [[0.5] * 4]  # 6 requests of 0.8 s
    assert len(endpoint.asked) == 6 and endpoint.max_open == 4


def test_a_pair_without_a_reply_is_left_out():
    reply = lambda message: "?" if "zz" in message and "bbb" in message else by_length(message)  # noqa: E731
    assert rewards("pairs", "a", "bbb", "zz", rounds=None, reply=reply) == [0, 1, 1]
    none = rewards("pairs", "a", "bbb", reply=lambda message: "?")
    assert all(isinstance(each, Failure) for each in none)


@pytest.mark.parametrize("compare", ["list", "pairs"])
def test_a_rubric_that_does_not_show_the_samples_is_refused(compare):
    needed = {"list": "{completions}", "pairs": "{first} and {second}"}[compare]
    with pytest.raises(UserError, match=f"must contain {needed} where task.judge.compare is {compare}"):
        JudgeConfig(compare=compare, rubric="Rate {completion}")


def test_an_endpoint_compares_the_samples_of_a_group(endpoint, tmp_path):  # noqa: F811
    config = task(endpoint, tmp_path, compare="list", rubric="{answer} {completions} good")
    with RewardPool(config) as pool:
        with pytest.raises(UserError, match="fewer than 2 scores in the reply"):
            pool.score(groups_of("one", "two"))
        assert pool.score(groups_of("one", "one")) == [[0.8, 0.8]]
        assert pool.take_means() == {"num_failed_reward_groups": 1}
    assert len(endpoint.asked) == 2


def test_the_base_model_compares_the_samples_of_a_group(tmp_path):
    settings = JudgeConfig(url="base", compare="pairs", rounds=None, cache=str(tmp_path))
    judge, asked = OwnJudge(TaskConfig(judge=settings)), []

    def answer(messages):
        asked.append(len(messages))
        return list(map(by_length, messages))

    judge.answer_by(answer, "tiny")
    call = [{"prompts": ["?"], "completions": [text]} for text in ("a", "bbb", "cc")]
    assert judge.score_groups([call, [], [call[1], call[2], call[0]]]) == [[0, 1, 0.5], [], [1, 0.5, 0]]
    assert asked == [3]  # the second group's pairs are the first one's
