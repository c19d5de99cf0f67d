"""The reward `code`: run a sample's Python against the row's tests in a sandboxed process.

grade.py        the reward
test_cases.py   the tests of a row in the forms that data sets use; checks of outputs and values
runner.py       start sandboxed processes, read their output up to a limit, kill them at the deadline
child.py        what runs in such a process: the program, or the test that calls it
sandbox.py      what the process may ask of the kernel
"""

from qerl.tasks.code.grade import code

__all__ = ["code"]
