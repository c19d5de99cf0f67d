"""Generate files of tests from the features of pytest and unittest: `generate(seed)` returns the text of one.

Everything that runs appends its name to LOG, so that the order of setups, tests and teardowns can be
compared. The tests call f, which squares; some of their assertions are wrong.
"""

import random
from textwrap import indent


def generate(seed: int) -> str:
    return _Generator(random.Random(seed)).text()


class _Generator:
    def __init__(self, rng: random.Random):
        self.rng, self.count = rng, 0
        self.fixtures: list[str] = []
        self.bases: list[str] = []

    def text(self) -> str:
        features = self.rng.choices(list(FEATURES), list(FEATURES.values()), k=self.rng.randint(2, 7))
        parts = ["import functools, pytest, unittest\nLOG = []\n", *(feature(self) for feature in features)]
        if self.chance(0.2):
            end = self.rng.choice(["unittest.main()", "pytest.main([__file__])"])
            parts.append(f"if __name__ == '__main__':\n    {end}")
        return "\n".join(parts) + "\n"

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}_{self.rng.choice('abcxyz')}{self.count}"

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def check(self, value: str = "2") -> str:
        if self.chance(0.1):
            return f"assert f({value}) == -1"
        checks = [f"assert f({value}) == ({value}) * ({value})", "assert f(3) == 9", "assert f(2) != 5"]
        checks += ["assert f(2) == pytest.approx(4.0000001)", "with pytest.raises(TypeError): f('a', 'b')"]
        checks += ["with pytest.raises(ValueError): f(2)"] * self.chance(0.1)
        checks += ["pytest.skip('later')"] * self.chance(0.15)
        checks += ["if f(2) == 4: pytest.fail('no')"] * self.chance(0.1)
        return self.rng.choice(checks)

    def body(self, name: str, value: str = "2") -> str:
        return indent(f"{log(name)}\n{self.check(value)}", "    ")

    def marks(self) -> str:
        marks = [*[""] * 8, "@pytest.mark.slow", "@pytest.mark.skip", "@pytest.mark.skip(reason='later')"]
        marks += ["@pytest.mark.skipif(True, reason='so')"]
        marks += ["@pytest.mark.skipif('sys.maxsize < 0', reason='so')"]
        marks += ["@pytest.mark.xfail"] * self.chance(0.1)
        marks += [f"@pytest.mark.usefixtures({self.fixture_name()!r})"]
        mark = self.rng.choice(marks)
        return mark and mark + "\n"

    def fixture_name(self) -> str:
        return self.rng.choice(self.fixtures) if self.fixtures and self.chance(0.95) else "capsys"

    def takes(self) -> str:
        return ", ".join({self.fixture_name(): None for _ in range(self.rng.choice([0, 0, 1, 1, 2]))})


def log(what: str) -> str:
    return f"LOG.append({what!r})"


def function(g: _Generator) -> str:
    name = g.name("test")
    return f"{g.marks()}def {name}({g.takes()}):\n{g.body(name)}\n"


def fixture(g: _Generator) -> str:
    name = g.name(g.rng.choice(["fix", "fix", "test_fix"]))
    takes = [g.takes()] if g.chance(0.4) else []
    options = []
    if g.chance(0.4):
        options.append(f"scope={g.rng.choice(['function', 'class', 'module', 'session'])!r}")
    if has_params := g.chance(0.3):
        options.append(f"params=[1, {g.rng.choice(['2', 'pytest.param(3)', '(4,)', 'None'])}]")
        options += ["ids=['p', 'q']"] * g.chance(0.3)
    options += ["autouse=True"] * g.chance(0.2)
    given = f"{name}_given" if g.chance(0.15) else name
    options += [f"name={given!r}"] if given != name else []
    takes += ["request"] if has_params or g.chance(0.2) else []
    lines = [log(f"+{name}"), *["LOG.append(request.param)"] * has_params]
    if "request" in takes and g.chance(0.4):
        lines.append(f"request.addfinalizer(lambda: {log('final ' + name)})")
    lines += [f"assert f(2) == {g.rng.choice('44444445')}"] if g.chance(0.2) else []
    ends = [["return 3"], ["yield 3", log(f"-{name}")], ["yield 3", log(f"-{name}"), "assert f(1) == 1"]]
    lines += g.rng.choice(ends)
    g.fixtures.append(given)
    call = f"({', '.join(options)})" if options or g.chance(0.3) else ""
    arguments = ", ".join(filter(None, takes))
    return f"@pytest.fixture{call}\ndef {name}({arguments}):\n{indent(chr(10).join(lines), '    ')}\n"


def overridden(g: _Generator) -> str:
    name, outer = g.name("Test"), g.fixture_name()
    if outer == "capsys":
        return function(g)
    inner = (
        f"@pytest.fixture\ndef {outer}(self, {outer}):\n    {log('inner ' + outer)}\n    return [{outer}]\n"
    )
    test = f"def test_inner(self, {outer}):\n    LOG.append({outer})\n    assert f(2) == 4\n"
    return f"class {name}:\n{indent(inner + test, '    ')}\n"


def parametrized(g: _Generator) -> str:
    name = g.name("test")
    marks, arguments = [], []
    for argument in g.rng.sample(["x", "y", "z"], g.rng.randint(1, 2)):
        values = ["[1, 2]", "[3]", "[]", "range(2)", "[pytest.param(1, id='one'), 2]", "((1), (2))"]
        values += ["[1, pytest.param(5, marks=pytest.mark.skip)]", "{1: 2, 3: 4}"]
        more = g.rng.choice(["", "", ", ids=str", ", ids=None", ", scope='module'" * g.chance(0.1)])
        marks.append(f"@pytest.mark.parametrize({argument!r}, {g.rng.choice(values)}{more})")
        arguments.append(argument)
    if g.chance(0.3):
        pairs = g.rng.choice(["[(1, 1), (2, 4)]", "[[1, 1], pytest.param(2, 4, id='a')]", "zip([1], [1])"])
        names = g.rng.choice(["'v, w'", "('v', 'w')", "['v', 'w']", "'v,w'"])
        marks.append(f"@pytest.mark.parametrize({names}, {pairs})")
        arguments += ["v", "w"]
    if g.fixtures and g.chance(0.25):
        fixed = g.rng.choice(g.fixtures)
        indirect = g.rng.choice(["", ", indirect=True", f", indirect=[{fixed!r}]"])
        marks.append(f"@pytest.mark.parametrize({fixed!r}, [7, 8]{indirect})")
        arguments.append(fixed)
    arguments += [g.fixture_name()] if g.chance(0.2) else []
    logs = "".join(f"    LOG.append({argument})\n" for argument in arguments if len(argument) == 1)
    head = "\n".join([*marks, f"def {name}({', '.join(dict.fromkeys(arguments))}):"])
    return f"{head}\n{logs}{g.body(name, arguments[0])}\n"


UNITTEST_HOOKS = ("setUp", "tearDown", "setUpClass", "tearDownClass")


def hooks(g: _Generator, names: list[str]) -> list[str]:
    """Setup functions of a class."""
    lines = []
    for name in names:
        if g.chance(0.35):
            is_class = name.lower().endswith("class")
            decorator = "@classmethod\n" * (is_class and (name in UNITTEST_HOOKS or g.chance(0.7)))
            takes = "cls" if is_class else "self"
            takes += ", method" * (name.endswith("_method") and g.chance(0.5))
            wrong = "\nassert f(2) == 5" if g.chance(0.05) else "\nassert f(2) == 4" * g.chance(0.3)
            lines.append(f"{decorator}def {name}({takes}):\n{indent(log(name) + wrong, '    ')}\n")
    return lines


def test_class(g: _Generator, depth: int = 0) -> str:
    name = g.name("Test") if g.chance(0.92) else g.name("Helper")
    base = g.rng.choice([*g.bases, ""]) if g.chance(0.3) else ""
    lines = ["__test__ = False"] * g.chance(0.06) + ["pytestmark = pytest.mark.slow"] * g.chance(0.1)
    lines += [f"def __init__(self): {log('init')}\n"] * g.chance(0.05)
    lines += hooks(g, ["setup_class", "teardown_class", "setup_method", "teardown_method"]) * g.chance(0.5)
    own = ""
    if g.chance(0.25):
        own, auto = "own", "(autouse=True)" if g.chance(0.5) else ""
        lines.append(
            f"@pytest.fixture{auto}\ndef own(self):\n    {log('own')}\n    yield 2\n    {log('-own')}\n"
        )
    for _ in range(g.rng.randint(1, 3)):
        test = g.name("test")
        takes = ", ".join(filter(None, ["self", g.takes(), own]))
        kinds = {
            f"{g.marks()}def {test}({takes}):\n{g.body(test)}\n": 12,
            f"@staticmethod\ndef {test}():\n{g.body(test)}\n": 2,
            f"@classmethod\ndef {test}(cls):\n{g.body(test)}\n": 2,
            f"@pytest.mark.parametrize('x', [1, 2])\ndef {test}(self, x):\n{g.body(test, 'x')}\n": 3,
            f"{test} = lambda self: LOG.append({test!r})": 1,
            f"async def {test}(self):\n{g.body(test)}\n": 1,
            f"{test} = {g.rng.choice(['3', 'len', 'functools.partial(f, 2)'])}": 1,
        }
        lines += g.rng.choices(list(kinds), list(kinds.values()))
    if depth < 2 and g.chance(0.25):
        lines.append(test_class(g, depth + 1))
    g.bases += [name] * (depth == 0)
    return f"{g.marks()}class {name}({base}):\n{indent(chr(10).join(lines), '    ')}\n"


def unittest_class(g: _Generator) -> str:
    name = g.name(g.rng.choice(["Test", "Cases"]))
    is_async = g.chance(0.2)
    base = "unittest.IsolatedAsyncioTestCase" if is_async else "unittest.TestCase"
    lines = hooks(g, list(UNITTEST_HOOKS)) * g.chance(0.6)
    for _ in range(g.rng.randint(1, 3)):
        test = g.name("test")
        checks = ["self.assertEqual(f(2), 4)", "self.assertTrue(f(2) == 4)", "self.assertEqual(f(2), 5)"]
        checks += ["with self.assertRaises(TypeError): f('a', 'b')", "self.skipTest('later')"]
        checks += ["for x in (1, 2):\n    with self.subTest(x=x): self.assertEqual(f(x), x * x)"]
        checks += ["for x in (1, 2):\n    with self.subTest(x=x): self.assertEqual(f(x), x)"] * g.chance(0.3)
        checks += [f"self.addCleanup(LOG.append, 'cleanup {test}')\nassert f(2) == 4", "assert f(2) == 4"]
        text = indent(log(test) + "\n" + g.rng.choice(checks), "    ") + "\n    yield" * g.chance(0.03)
        marks = [*[""] * 5, "@unittest.skip('later')\n", "@unittest.skipIf(True, 'so')\n"]
        marks += ["@unittest.expectedFailure\n", "@pytest.mark.skip\n"] * g.chance(0.1)
        prefix = "async " * g.chance(0.6 if is_async else 0.06)
        lines.append(f"{g.rng.choice(marks)}{prefix}def {test}(self):\n{text}\n")
    if g.chance(0.05):
        lines.append("class TestInner(unittest.TestCase):\n    def test_inner(self): assert f(2) == 5")
    mark = g.rng.choice([*[""] * 5, "@unittest.skip('later')\n"])
    return f"{mark}class {name}({base}):\n{indent(chr(10).join(lines), '    ')}\n"


def module_hooks(g: _Generator) -> str:
    names = ["setup_module", "teardown_module", "setup_function", "teardown_function"]
    names += ["setUpModule", "tearDownModule"] * g.chance(0.3)
    lines = []
    for name in names:
        if g.chance(0.45):
            takes = g.rng.choice(["", "arg"]) if "_" in name else ""
            wrong = "\nassert f(2) == 5" if g.chance(0.06) else "\nassert f(2) == 4" * g.chance(0.3)
            lines.append(f"def {name}({takes}):\n{indent(log(name) + wrong, '    ')}\n")
    return "\n".join(lines)


def partial(g: _Generator) -> str:
    check, name = g.name("check"), g.name("test")
    made = f"functools.partial({check}, {g.rng.choice(['2', 'x=3'])})"
    return f"def {check}(x):\n    LOG.append(x)\n    {g.check('x')}\n{name} = {made}\n"


def callable_test(g: _Generator) -> str:
    kind, name = g.name("Check"), g.name("test")
    return f"class {kind}:\n    def __call__(self):\n{indent(g.body(name), '    ')}\n{name} = {kind}()\n"


def decorated(g: _Generator) -> str:
    outer, name = g.name("wrap"), g.name("test")
    wraps = "    @functools.wraps(test)\n" * g.chance(0.6)
    run = (
        "    def run(*args, **kwargs):\n        LOG.append('wrapped')\n        return test(*args, **kwargs)\n"
    )
    head = f"def {outer}(test):\n{wraps}{run}    return run\n"
    return f"{head}@{outer}\ndef {name}({g.takes()}):\n{g.body(name)}\n"


def other_name(g: _Generator) -> str:
    name = g.name(g.rng.choice(["Test_that", "_test", "tests", "testing"]))
    return f"def {name}():\n{g.body(name)}\n"


def no_test(g: _Generator) -> str:
    name = g.name("test")
    return f"def {name}():\n{g.body(name)}\n{name}.__test__ = False\n"


def twice(g: _Generator) -> str:
    name = g.name("test")
    return f"def {name}():\n{g.body(name)}\ndef {name}():\n{g.body(name)}\n"


def async_test(g: _Generator) -> str:
    name = g.name("test")
    return f"async def {name}():\n{g.body(name)}\n"


RARE = (
    "def load_tests(loader, tests, pattern):\n    return tests\n",
    "pytestmark = pytest.mark.skip\n",
    "pytestmark = [pytest.mark.slow, pytest.mark.skipif(False, reason='no')]\n",
    "def pytest_generate_tests(metafunc): pass\n",
    "import doctest\ndoctest.testmod()\n",
    "pytest.importorskip('nothing_of_the_kind')\n",
    "__test__ = False\n",
    "def test_text():\n    '''>>> f(2)\n    5\n    '''\n    assert f(2) == 4\n",
    "def test_warns():\n    import warnings\n    with pytest.warns(UserWarning): warnings.warn('a')\n"
    "    assert f(2) == 4\n",
    "def test_silent():\n    with pytest.warns(UserWarning): f(2)\n",
    "def test_prints(capsys):\n    print('a')\n    out, err = capsys.readouterr()\n"
    "    assert out == 'a\\n'\n",
    "class TestSelf:\n    x = 0\n    def test_one(self):\n        self.x = 1\n        assert f(1) == 1\n"
    "    def test_two(self):\n        assert f(self.x) == 0\n",
    "test_data = [1, 2]\n",
    "class TestEnd(Exception): pass\n",
    "class Base:\n    def test_base(self):\n        LOG.append('base')\n        assert f(2) == 4\n"
    "class TestOne(Base):\n    def test_one(self):\n        LOG.append('one')\n        assert f(2) == 4\n",
    "class Cases(unittest.TestCase):\n    def runTest(self):\n        LOG.append('run')\n"
    "        assert f(2) == 4\n",
)


def rare(g: _Generator) -> str:
    return g.rng.choice(RARE)


FEATURES = {
    function: 6,
    fixture: 8,
    overridden: 1,
    parametrized: 4,
    test_class: 5,
    unittest_class: 4,
    module_hooks: 3,
    partial: 1,
    callable_test: 0.4,
    decorated: 1,
    other_name: 0.8,
    no_test: 0.5,
    twice: 0.2,
    rare: 1.5,
    async_test: 0.7,
}
