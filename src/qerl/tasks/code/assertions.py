"""Count the assertions of a test that ran and those that failed, by rewriting the test's syntax tree.

    assert x, m                        if x: ran() else: failed(); assert False, m
    self.assertEqual(a, b)             checked(self.assertEqual)(a, b), and any call of an assert...
    with self.assertRaises(E):         with context(self.assertRaises(E)): counts when the block has raised E
    if x: raise AssertionError         ... else: ran()
    try: f(); assert False             except E: ran(), because the assertion was that f raises E
    except E: pass

An assertion on a constant (`assert True`, `assert (x, "message")`) is none. A failed one counts if the test
catches it, too. Each function with assertions first says that
it has been entered. This file imports the standard library only: it runs in the child (child.py) too.
"""

import ast
from collections.abc import Iterable
from typing import Any

RAN, FAILED, CHECKED, CONTEXT = "__ran__", "__failed__", "__checked__", "__context__"
ENTERED = "__entered__"
_RAISING = ("raises", "warns", "deprecated_call")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ALWAYS_TRUE = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Lambda, ast.JoinedStr)


class Instrument(ast.NodeTransformer):
    """Rewrites the nodes that it visits; num_places is how many assertions they have."""

    def __init__(self, tree: ast.Module, names: Iterable[str]):
        """names: the program's, of which a function is no assertion, whatever its name."""
        self.num_places = self._num_own = 0
        self.functions: dict[int, str] = {}
        """First line and name of the functions with assertions of their own that have to be entered: those
        named like tests, and those that the text does not refer to, so that only pytest or unittest could
        call them."""
        self._referred = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self._referred |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        self._function_names = {node.name for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)} | {
            *names
        }

    def visit_FunctionDef(self, node: Any) -> Any:
        outer, self._num_own = self._num_own, 0
        self.generic_visit(node)
        has_own, self._num_own = self._num_own > 0, outer
        is_special = node.name.startswith("__") and node.name.endswith("__")
        if has_own and not is_special and (node.name.startswith("test") or node.name not in self._referred):
            line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            self.functions[line] = node.name
            has_text = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            call = ast.Call(ast.Name(ENTERED, ast.Load()), [ast.Constant(line)], [])
            node.body.insert(has_text, self._placed(ast.Expr(call), node))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        if is_unreachable_mark(node):
            return [self._call(FAILED, node), node]
        has_names = any(isinstance(part, ast.Name) for part in ast.walk(node.test))
        if isinstance(node.test, _ALWAYS_TRUE) or not has_names:
            return node
        fails = ast.Assert(ast.Constant(False), node.msg)
        return self._placed(ast.If(node.test, [self._ran(node)], [self._call(FAILED, node), fails]), node)

    def visit_Raise(self, node: ast.Raise) -> Any:
        self.generic_visit(node)
        return [self._call(FAILED, node), node] if is_unreachable_mark(node) else node

    def visit_If(self, node: ast.If) -> Any:
        is_assertion = not node.orelse and _raises(node.body[-1], "AssertionError", "Exception")
        self.generic_visit(node)
        if is_assertion:
            node.orelse = [self._ran(node)]
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = name_of(node.func)
        is_assertion = name.startswith("assert") or (name in _RAISING and len(node.args) > 1)
        if name in self._function_names or not (is_assertion or name == "fail"):
            return node
        self._count(is_assertion)
        node.func = self._placed(ast.Call(ast.Name(CHECKED, ast.Load()), [node.func], []), node)
        return node

    def visit_With(self, node: ast.With) -> Any:
        for item in node.items:
            call = item.context_expr
            name = name_of(call.func) if isinstance(call, ast.Call) else ""
            if name.startswith(("assert", *_RAISING)) and name not in self._function_names:
                self._count(1)
                item.context_expr = self._placed(ast.Call(ast.Name(CONTEXT, ast.Load()), [call], []), call)
            else:
                self.visit(item)
        node.body = [each for part in node.body for each in _listed(self.visit(part))]
        return node

    def visit_Try(self, node: ast.Try) -> Any:
        expects_error = any(is_unreachable_mark(part) for part in _parts(*node.body, *node.orelse))
        self.generic_visit(node)
        for handler in node.handlers if expects_error else ():
            handler.body.insert(0, self._ran(handler))
        return node

    def _count(self, num_places: int) -> None:
        self.num_places += num_places
        self._num_own += num_places

    def _ran(self, node: ast.AST) -> ast.Expr:
        self._count(1)
        return self._call(RAN, node)

    def _call(self, name: str, node: ast.AST) -> ast.Expr:
        return self._placed(ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], [])), node)

    @staticmethod
    def _placed(new: Any, node: ast.AST) -> Any:
        return ast.fix_missing_locations(ast.copy_location(new, node))


def name_of(function: ast.expr) -> str:
    """Return f for f and for x.f, and nothing for other expressions."""
    return getattr(function, "attr", getattr(function, "id", ""))


def is_unreachable_mark(node: ast.AST) -> bool:
    """True for `assert False`, `raise AssertionError` and fail(): statements that a test must not reach."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    return _raises(node, "AssertionError") or (isinstance(node, ast.Call) and name_of(node.func) == "fail")


def is_caught(node: ast.AST) -> bool:
    """True for a block of which an assertion may fail without the test failing: a `try` whose handler asserts
    something else, or a `with raises(AssertionError)`. A failed assertion counts all the same."""
    if isinstance(node, ast.With):
        calls = (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call))
        raised = [name_of(each) for call in calls if _is_raising(call) for each in call.args]
        return "AssertionError" in raised and _has_assertion(node.body)
    if not isinstance(node, ast.Try) or not _has_assertion(node.body):
        return False
    handlers = (each for each in node.handlers if _caught(each) & {"", "AssertionError", "Exception"})
    return any(_has_assertion(each.body) for each in handlers)


def _is_raising(call: ast.Call) -> bool:
    return name_of(call.func).startswith(("assertRaises", "raises"))


def _caught(handler: ast.ExceptHandler) -> set[str]:
    """Return the names of the exceptions, "" for any."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {"" if kind is None else name_of(kind) for kind in kinds}


def _has_assertion(body: list[ast.stmt]) -> bool:
    parts = [part for part in _parts(*body) if not is_unreachable_mark(part)]
    calls = (part for part in parts if isinstance(part, ast.Call))
    return any(isinstance(part, ast.Assert) for part in parts) or any(
        name_of(call.func).startswith("assert") for call in calls
    )


def _raises(node: ast.AST, *names: str) -> bool:
    if not isinstance(node, ast.Raise) or node.exc is None:
        return False
    return name_of(node.exc.func if isinstance(node.exc, ast.Call) else node.exc) in names


def _parts(*nodes: ast.AST) -> Any:
    """Yield the nodes and what is in them, but not what is in functions."""
    for node in nodes:
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            yield from _parts(*ast.iter_child_nodes(node))


def _listed(nodes: Any) -> list[Any]:
    return nodes if isinstance(nodes, list) else [nodes]
