"""The environment `calculator`: a tool that the policy may use before it answers.

    "calc(17 * (3 + 4))"     ->  {"role": "tool", "content": "119"}, reward 0, the episode goes on
    anything else            ->  reward 1 if its last number is the answer column's, else 0; the end

What is inside calc(...) is arithmetic on numbers and nothing else; it is never executed.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from qerl.config import TaskConfig
from qerl.tasks.grade import gold_number, last_number

_CALL = re.compile(r"calc\((.*)\)")
_MAX_CHARACTERS = 200  # so that no product grows beyond what is cheap
_BINARY: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    answer_column = "answer"

    async def reset(self, row: dict[str, Any]) -> None:
        self._answer = gold_number(row.get(self.answer_column))

    async def step(self, completion: str) -> tuple[list[dict[str, str]], float, bool]:
        call = _CALL.search(completion)
        if call is None:
            return [], float(last_number(completion) == self._answer), True
        return [{"role": "tool", "content": value(call[1])}], 0.0, False


def calculator(config: TaskConfig) -> type[Calculator]:
    """For the config's answer column."""
    return type("calculator", (Calculator,), {"answer_column": config.answer_column})


def value(expression: str) -> str:
    """What the calculator shows: "119", "3.5", "error: ..."."""
    if len(expression) > _MAX_CHARACTERS:
        return f"error: more than {_MAX_CHARACTERS} characters"
    try:
        number = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an arithmetic expression"
    return str(number) if number.denominator == 1 else f"{float(number):.6g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return Fraction(str(node.value))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError
