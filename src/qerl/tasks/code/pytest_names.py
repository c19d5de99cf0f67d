"""Name the parts of pytest and unittest that a row's test may use, and those that refuse the row.

This file imports nothing: it is read where rows are parsed, and in the process of a test.
"""

NAMES = ("raises", "warns", "approx", "fixture", "mark", "param", "fail", "skip", "main")
FIXTURES = ("candidate", "capsys", "request")
"""Fixtures that a test need not define; candidate is the function that entry_point names."""
REFUSED_MARKS = ("xfail", "filterwarnings")
REFUSED_NAMES = {
    "load_tests": "pytest does not call it",
    "expectedFailure": "such a test asserts nothing",
    "assertLogs": "the program logs in its own process",
    "assertNoLogs": "the program logs in its own process",
    "addModuleCleanup": "pytest does not call it",
    "doctest": "its failures fail no test",
}
"""Functions, attributes and modules, and why a row with one of them is refused."""
