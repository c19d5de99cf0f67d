"""Read a row's test in Python: which names are the program's, and why it could not be run.

A name is the program's if the test uses it and does not define or import it, and Python has no such builtin.
So `sum` in `assert sum(f(2)) == 3` is Python's, whatever the program defines. In `assert sum(1, 2) == 3`,
where the test names nothing else, it is the program's.

A text that names nothing of the program, or of which no assertion would run, cannot say anything about a
program: reading it raises ValueError, which rows/checks.py reports when the run starts.
"""

import ast
import builtins
import dataclasses
import importlib.machinery
import symtable
import sys
import warnings
from collections.abc import Iterator

from qerl.tasks.code import assertions, pytest_names

_LIBRARY = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "pytest": "pytest"}
_LIBRARY |= {name: f"math:{name}" for name in ("isclose", "sqrt")}
_LIBRARY |= {name: f"collections:{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")}
_LIBRARY |= {name: f"datetime:{name}" for name in ("datetime", "timedelta")}
_LIBRARY |= {"Decimal": "decimal:Decimal", "Fraction": "fractions:Fraction", "StringIO": "io:StringIO"}
_LIBRARY |= {"reduce": "functools:reduce", "List": "typing:List"}
"""Names that tests use as if they were imported. They must not be the program's, which could forge them."""
_MOCKS = ("patch", "Mock", "MagicMock", "AsyncMock", "PropertyMock")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """Script(text="assert f(math.pi) == 4", names=("f",), imports={"math": "math"}, candidate=None)"""

    text: str
    names: tuple[str, ...]
    """Names that the program is asked for."""
    imports: dict[str, str]
    """Modules that the test uses without importing them, by name; "math:isclose" is a name of a module."""
    candidate: str | None = None
    """Expression for the function that the test calls `candidate`; "" for the program's only function."""


def read_script(text: str, entry_point: str | None = None) -> Script:
    """Read a test; raise ValueError if it could not run, or could not fail."""
    tree = _parsed(text)
    definitions = {node.name: node for node in tree.body if isinstance(node, _Definition)}
    check = definitions.get("check")
    if isinstance(check, _FUNCTIONS) and "check" not in _called(tree):
        text += "\n\ncheck(candidate)\n" if check.args.args else "\n\ncheck()\n"
        tree = _parsed(text)
    if entry_point is not None:
        _parsed(entry_point)
    run = _what_runs(tree)
    _refuse_unsupported(tree)
    free = _free_names(text)
    called = _called(tree) & free
    has_candidate = "candidate" in free or "candidate" in _fixture_names(tree)
    candidate = (entry_point or "") if has_candidate else None
    names, imports = _sorted_out(free - {"candidate"}, called, entry_point)
    used = {name for node in tree.body for name in _modules(node)}
    used |= {path.partition(":")[0] for path in imports.values()}
    for name in sorted(used - {"solution", "pytest"}):
        if not _is_installed(name):
            raise ValueError(f"the test imports {name!r}, which is not installed")
    imports_solution = any("solution" in _modules(node) for node in ast.walk(tree))
    if not names and not has_candidate and not imports_solution:
        names = _tested_builtin(free & called)
    instrument = assertions.Instrument(tree, names)
    for node in run:
        instrument.visit(node)
    if instrument.num_places == 0:
        raise ValueError("the test has no assertion that would run")
    return Script(text, tuple(sorted(names)), imports, candidate)


def _parsed(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\\d" in a string
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test is not Python: {error}") from error


def _called(tree: ast.AST) -> set[str]:
    return {assertions.name_of(node.func) for node in _calls(tree)}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _what_runs(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of the module, the tests, and the definitions that these name."""
    definitions = {node.name: node for node in tree.body if isinstance(node, _Definition)}
    run: list[ast.stmt] = [node for node in tree.body if not isinstance(node, _Definition)]
    run += [node for node in definitions.values() if _is_test(node)]
    for node in run:
        for name in {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & definitions.keys():
            if definitions[name] not in run:
                run.append(definitions[name])
    return run


def _is_test(node: _Definition) -> bool:
    if isinstance(node, _FUNCTIONS):
        return node.name.startswith("test")
    return node.name.startswith("Test") or _is_unittest(node)


def _is_unittest(node: ast.ClassDef) -> bool:
    return any(assertions.name_of(base).endswith("TestCase") for base in node.bases)


def _free_names(text: str) -> set[str]:
    """Return the names that the test uses, but neither defines nor imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top = symtable.symtable(text, "test.py", "exec")
    defined = {
        symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    used: set[str] = set()
    tables = [top]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is not top and symbol.is_declared_global() and symbol.is_assigned():
                defined.add(symbol.get_name())
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                used.add(symbol.get_name())
    return {name for name in used - defined if not (name.startswith("__") and name.endswith("__"))}


def _sorted_out(free: set[str], called: set[str], entry_point: str | None) -> tuple[set[str], dict[str, str]]:
    """Return the program's names among the free ones, and what the others are imported from."""
    entry = free & {entry_point}
    modules = (free & sys.stdlib_module_names) - called - entry
    imports = {name: _LIBRARY[name] for name in free & _LIBRARY.keys() - entry}
    imports |= {name: name for name in modules}
    return entry | (free - set(dir(builtins)) - imports.keys()), imports


def _tested_builtin(called: set[str]) -> set[str]:
    """Return the one name of a builtin that a test calls which calls nothing else."""
    tested = called & set(dir(builtins))
    if len(tested) > 1:
        names = ", ".join(sorted(tested))
        raise ValueError(f"the test calls {names}; name the program's function in a column entry_point")
    if not tested:
        raise ValueError("the test names nothing of the program")
    return tested


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").partition(".")[0]]
    return []


def _refuse_unsupported(tree: ast.Module) -> None:
    """Raise ValueError for what the test's process lacks, so that every program would fail."""
    has_mocks = any(name in ("unittest", "mock") for node in ast.walk(tree) for name in _modules(node))
    for node in ast.walk(tree):
        used = []
        if isinstance(node, ast.ImportFrom) and node.module == "pytest":
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and assertions.name_of(node.value) == "pytest":
            used = [node.attr]
        if missing := [name for name in used if name not in pytest_names.NAMES]:
            raise ValueError(f"the test uses pytest.{missing[0]}; there are: {', '.join(pytest_names.NAMES)}")
        if refused := {*_named(node)} & pytest_names.REFUSED_NAMES.keys():
            name = min(refused)
            raise ValueError(f"the test has {name}: {pytest_names.REFUSED_NAMES[name]}")
        if isinstance(node, ast.Attribute) and node.attr in pytest_names.REFUSED_MARKS:
            raise ValueError(f"the test uses pytest.mark.{node.attr}, which is not supported")
        if isinstance(node, ast.Module | ast.ClassDef) and (again := _defined_again(node.body)):
            raise ValueError(f"the test defines {again} twice, of which only the last would run")
        if assertions.is_caught(node):
            raise ValueError("the test expects that one of its own assertions fails")
        if has_mocks and (name := _mock(node)):
            raise ValueError(f"the test uses {name}, which does not reach the program in its own process")
    made = {node.name for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and node.decorator_list}
    made |= {str(word.value.value) for word in _words(tree, "name") if isinstance(word.value, ast.Constant)}
    if missing := _fixture_names(tree) - made - set(pytest_names.FIXTURES):
        raise ValueError(
            f"the test needs the fixture {min(missing)}; besides its own there are:"
            f" {', '.join(pytest_names.FIXTURES)}"
        )


def _words(tree: ast.AST, name: str) -> Iterator[ast.keyword]:
    """Yield the arguments that are given by this name."""
    return (word for call in _calls(tree) for word in call.keywords if word.arg == name)


def _named(node: ast.AST) -> list[str]:
    """Return the names that a definition, an assignment, an import or an attribute has."""
    if isinstance(node, _Definition):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.name for alias in node.names] + _modules(node)
    return [name] if (name := getattr(node, "attr", None) or getattr(node, "id", None)) else []


def _defined_again(body: list[ast.stmt]) -> str | None:
    """Return the name of a test that is defined more than once."""
    names = [node.name for node in body if isinstance(node, _Definition)]
    tests = (name for name in names if name.startswith(("test", "Test")))
    return next((name for name in tests if names.count(name) > 1), None)


def _mock(node: ast.AST) -> str | None:
    """Return the name of a mock that the node makes. patch("sys.stdout") is none: what the program prints
    during a call is printed by the test's process."""
    if isinstance(node, ast.Attribute) and assertions.name_of(node.value) == "patch":
        return "patch"
    if not isinstance(node, ast.Call) or (name := assertions.name_of(node.func)) not in _MOCKS:
        return None
    target = node.args[0] if name == "patch" and node.args else None
    return None if isinstance(target, ast.Constant) and target.value == "sys.stdout" else name


def _is_installed(name: str) -> bool:
    if name in sys.stdlib_module_names:
        return True
    folders = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    return importlib.machinery.PathFinder.find_spec(name, folders) is not None


def _fixture_names(tree: ast.Module) -> set[str]:
    """Return the parameters of test functions that are fixtures. A function that the test itself calls needs
    none."""
    called = _called(tree)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    plain = [node for node in classes if not _is_unittest(node)]
    wanted: set[str] = set()
    for function in (node for each in (tree, *plain) for node in each.body if isinstance(node, _FUNCTIONS)):
        marks = [node for decorator in function.decorator_list for node in _calls(decorator)]
        is_parametrized = any(assertions.name_of(mark.func) == "parametrize" for mark in marks)
        if function.name.startswith("test") and function.name not in called and not is_parametrized:
            required = len(function.args.args) - len(function.args.defaults)
            wanted |= {argument.arg for argument in function.args.args[:required]}
    return wanted - {"self", "cls"}
