"""The reward `calls`: compare a sample's function calls with those of the row, by structure, not by text.

    answer     [{"f": {"base": [10], "unit": ["cm", ""]}}], as in BFCL's possible_answer files: the calls, and
               for each argument the values that are right; "" among them: it may be left out; []: no call
    reward     2 m / (a + b)     m: parts that sample and answer share; a, b: parts of each; those of a call
                                 are its name and its arguments

The reward is 1 if the calls are those of the answer in any order, and only then. Strings are equal but for
case, spaces, quotes and the characters ,./-_*^. Whole numbers equal floats, lists and tuples are the same. A
right object has, for each of its keys, a list of right values too. Calls are read in the form (call_forms)
whose marks the sample has, or as Python: [f(base=10), g()].
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from qerl.config import TaskConfig
from qerl.tasks.call_forms.choice import FORMS, form_of
from qerl.tasks.call_forms.form import RawCall, Schemas, bare_calls
from qerl.tasks.graders import Reward
from qerl.tasks.rows.messages import BadRow, from_json, read_variables

_IGNORED = re.compile(r"[ ,./\-_*^'\"]")
_FENCE = re.compile(r"^```\w*\n(.*)\n```$", re.DOTALL)
Call = tuple[str, dict[str, Any]]
"""A name and its arguments; of an answer, the lists of right values."""


def calls(config: TaskConfig) -> Reward:
    """Return the reward for answers in config.answer_column, and functions in the column tools."""

    def calls(completions: list[Any], **columns: list[Any]) -> list[float]:
        answers = columns[config.answer_column]
        tools = columns.get("tools") or [None] * len(completions)
        return [match(called(c, t), right(a)) for c, t, a in zip(completions, tools, answers, strict=True)]

    return calls


def right(answer: Any) -> list[Call]:
    """Return the calls of an answer; raise ValueError if it is none."""
    try:
        answer = from_json(answer, "the answer")
    except BadRow as error:
        raise ValueError(str(error)) from None
    if not isinstance(answer, list) or not all(isinstance(call, dict) and len(call) == 1 for call in answer):
        raise ValueError('the answer is not a list of calls {"name": {"argument": [right values]}}')
    pairs = [next(iter(call.items())) for call in answer]
    for name, arguments in pairs:
        if not isinstance(arguments, dict) or not all(isinstance(v, list) for v in arguments.values()):
            raise ValueError(f"the answer's {name} does not have a list of right values for each argument")
    return pairs


def called(completion: Any, tools: Any) -> list[Call]:
    """Return the calls of a sample; of a conversation, those of all its assistant's turns."""
    if not isinstance(completion, str):
        turns = [message for message in completion if message.get("tool_calls")]
        functions = [call.get("function", call) for turn in turns for call in turn["tool_calls"]]
        if functions:
            return [each for f in functions for each in _checked(RawCall(f.get("name"), f.get("arguments")))]
    functions = [tool["function"] for tool in read_variables({"tools": tools}).get("tools", ())]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    raw = [c for text in _texts(completion) for c in _marked(text, schemas) or _bare(text) or _python(text)]
    return [each for call in raw for each in _checked(call)]


def _texts(completion: Any) -> list[str]:
    """Return the text of a sample; of a conversation, that of each of its assistant's turns."""
    if isinstance(completion, str):
        return [completion]
    return [message["content"] for message in completion if message["role"] == "assistant"]


def match(sampled: list[Call], answer: list[Call]) -> float:
    """Return 1 if the calls are those of the answer, in any order, else the share of their parts that is."""
    is_same = [[_is_same(call, one) for call in sampled] for one in answer]
    if len(sampled) == len(answer) and _num_matched(is_same) == len(answer):
        return 1.0
    left, matched = list(sampled), 0
    for one in answer:
        best = max(left, key=lambda call: _num_shared(call, one), default=None)
        if best is not None and _num_shared(best, one):
            matched += _num_shared(best, one)
            left.remove(best)
    num_given = sum(1 + len(arguments) for _, arguments in sampled)
    num_right = sum(1 + sum("" not in v for v in arguments.values()) for _, arguments in answer)
    # Arguments that may be left out count where the sample has them, so the sum can be too small by them.
    return min(2 * matched / max(num_given + num_right, 1), 0.99) if sampled and answer else 0.0


def _num_matched(is_same: list[list[bool]]) -> int:
    """Return how many rows can have a column of their own where they are true."""
    row_of: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, is_true in enumerate(is_same[row]):
            if is_true and column not in tried:
                tried.add(column)
                if column not in row_of or place(row_of[column], tried):
                    row_of[column] = row
                    return True
        return False

    return sum(place(row, set()) for row in range(len(is_same)))


def _is_same(call: Call, answer: Call) -> bool:
    return _has_name(call, answer) and _are_right(call[1], answer[1])


def _num_shared(call: Call, answer: Call) -> int:
    if not _has_name(call, answer):
        return 0
    return 1 + sum(_is_right(value, answer[1].get(name, [])) for name, value in call[1].items())


def _has_name(call: Call, answer: Call) -> bool:
    """True for the same name; those who offer functions to models write _ for a dot."""
    return call[0].replace(".", "_") == answer[0].replace(".", "_")


def _are_right(values: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    is_known = all(name in answer and _is_right(value, answer[name]) for name, value in values.items())
    return is_known and all(name in values or "" in allowed for name, allowed in answer.items())


def _is_right(value: Any, allowed: list[Any]) -> bool:
    return any(_equals(value, each) for each in allowed)


def _equals(value: Any, answer: Any) -> bool:
    if isinstance(answer, dict):
        nested = {name: each if isinstance(each, list) else [each] for name, each in answer.items()}
        return isinstance(value, dict) and _are_right(value, nested)
    if isinstance(answer, list | tuple):
        is_list = isinstance(value, list | tuple) and len(value) == len(answer)
        return is_list and all(map(_equals, value, answer))
    if isinstance(answer, str):
        return isinstance(value, str) and _plain(value) == _plain(answer)
    return isinstance(value, bool) == isinstance(answer, bool) and value == answer


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).casefold()


def _checked(call: RawCall) -> Iterator[Call]:
    """Yield the call if it has a name and arguments, which may be a JSON text."""
    try:
        arguments = from_json(call.arguments or {}, "arguments")
    except BadRow:
        return
    if isinstance(call.name, str) and isinstance(arguments, dict):
        yield call.name, arguments


def _marked(text: str, schemas: Schemas) -> list[RawCall]:
    """Return the calls behind the marks of a form."""
    form, place, raw = form_of(text), 0, list[RawCall]()
    while starts := [(at, -len(each)) for each in form.opens if (at := text.find(each, place)) >= 0]:
        start, negative_size = min(starts)
        reading = form.read(text, start - negative_size, schemas, True)
        is_read = reading is not None and bool(reading.calls)
        raw += reading.calls if reading is not None else ()
        place = reading.end if reading is not None and is_read else start - negative_size
    return raw


def _bare(text: str) -> list[RawCall]:
    """Return the calls of a text that is nothing else."""
    return next((list(raw) for form in FORMS if (raw := bare_calls(form, text))), [])


def _python(text: str) -> list[RawCall]:
    """Return the calls of [f(a=1), g()], or of f(a=1) alone."""
    text = text.strip()
    fenced = _FENCE.match(text)
    try:
        node = ast.parse((fenced[1] if fenced else text).strip(), mode="eval").body
        nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        return [
            RawCall(ast.unparse(each.func), {str(k.arg): ast.literal_eval(k.value) for k in each.keywords})
            for each in nodes
            if isinstance(each, ast.Call) and not each.args
        ]
    except (SyntaxError, ValueError, MemoryError, RecursionError, TypeError):
        return []
