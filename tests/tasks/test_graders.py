from fractions import Fraction

import pytest

from material import SUMS
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks.graders import BUILT_IN, last_number
from qerl.tasks.rows.table import gym_rows


def graded(name, completion, answer=None, **fields):
    return BUILT_IN[name](TaskConfig(**fields))(completions=[completion], answer=[answer])[0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("3 + 4 = 7", 7),
        ("1,234,567", 1234567),
        ("$1,234.50", Fraction("1234.5")),
        ("first 1,2,3", 3),
        ("1,2345", 2345),
        ("-5", -5),
        ("+5", 5),
        ("\N{MINUS SIGN}5", -5),
        ("x = -0.25", Fraction(-1, 4)),
        (".5", Fraction(1, 2)),
        ("10-3", 3),
        ("(2)-3", 3),
        ("10 - 3", 3),
        ("it is 3/4", Fraction(3, 4)),
        ("-3 / 4.", Fraction(-3, 4)),
        ("1/0", None),
        ("1.5e3", 1500),
        ("5 apples", 5),
        ("007", 7),
        ("50%", 50),
        ("none", None),
        ("", None),
        ("9" * 5000, None),
        ("1e999999999999", 999999999999),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so it is 7", "7", 1.0),
        ("7 or 8", "7", 0.0),
        ("1,000", "1000", 1.0),
        ("0.5", "1/2", 1.0),
        ("7.0", 7, 1.0),
        ("0.1", 0.1, 1.0),
        ("I do not know", "7", 0.0),
        ("<think>2</think><answer>7</answer>", "#### 7", 1.0),
        ([{"role": "assistant", "content": "7"}], "7", 1.0),
    ],
)
def test_numeric_compares_numbers(completion, answer, reward):
    assert graded("numeric", completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("Paris", "Paris", 1.0),
        (" Paris\n", "Paris ", 1.0),
        ("paris", "Paris", 0.0),
        ("Paris.", "Paris", 0.0),
        ("7", 7, 1.0),
        ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "Paris"}], "Paris", 1.0),
    ],
)
def test_exact_compares_stripped_strings(completion, answer, reward):
    assert graded("exact", completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>a\nb</think>\n\n<answer>\nb</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("Well: <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> done", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_must_come_once_each_and_in_order(completion, reward):
    assert graded("tags", completion) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"The answer is $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
        ("It is 1/2", "0.5", 1.0),
        ("$1234$", "1,234", 1.0),
        (r"$2\sqrt{2}$", r"$\sqrt{8}$", 1.0),
        (r"\boxed{2\sqrt2}", r"\sqrt{8}", 1.0),
        ("$(x-1)(x+1)$", "x^2-1", 1.0),
        (r"$\{2,1\}$", r"\{1,2\}", 1.0),
        ("$(1,2)$", "(1,2)", 1.0),
        ("$(2,1)$", "(1,2)", 0.0),
        (r"$10\%$", "10%", 1.0),
        ("It is -7.", "-7", 1.0),
        ("$5$", "$x=5$", 1.0),
        ("4", "3", 0.0),
        ("$x^2+1$", "x^2-1", 0.0),
        ("no idea", "5", 0.0),
        ([{"role": "assistant", "content": "$3$"}], 3, 1.0),
    ],
)
def test_math_finds_equal_what_is_equal(completion, answer, reward):
    assert graded("math", completion, answer) == reward


@pytest.mark.parametrize(
    ("name", "answer"), [("numeric", "none"), ("numeric", None), ("exact", None), ("math", "")]
)
def test_a_row_without_a_usable_answer_is_an_error_and_not_a_wrong_sample(name, answer):
    with pytest.raises(ValueError, match="answer"):
        graded(name, "5", answer)


def test_the_answer_column_is_the_configs():
    reward = BUILT_IN["numeric"](TaskConfig(answer_column="gold"))
    assert reward(completions=["7", "8"], gold=["7", "7"], answer=["8", "8"]) == [1.0, 0.0]


def test_gym_scores_with_the_tasks_own_scorer():
    config = TaskConfig(gym="chain_sum", rewards=("gym",))
    row, reward = gym_rows(config).get(3), BUILT_IN["gym"](config)
    assert reward is not BUILT_IN["gym"]

    def scored(text):
        return reward(completions=[text], **{name: [value] for name, value in row.items()})[0]

    assert (
        scored(f" {row['answer']}\n") == scored(f"<think>1</think><answer>{row['answer']}.0</answer>") == 1.0
    )
    assert scored("I cannot say") < 0.5


def test_gym_scores_a_task_that_has_many_right_answers():
    config = TaskConfig(gym="propositional_logic", rewards=("gym",))
    row = gym_rows(config).get(0)
    assert row["answer"] is None
    columns = {name: [value] for name, value in row.items()}
    right = row["metadata"]["example_answer"]
    assert BUILT_IN["gym"](config)(completions=[right], **columns) == [1.0]


def test_gym_is_refused_where_there_is_no_gym():
    with pytest.raises(UserError, match=r"task\.name is gsm8k"):
        BUILT_IN["gym"](TaskConfig(name="gsm8k", gym_options=SUMS))
