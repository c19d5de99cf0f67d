"""The reward `code`: a sample's Python, run against the row's tests in a process that is confined.

sandbox.py   what the process may ask of the kernel
child.py    what runs inside: the program, or the test that asks it
runner.py      starts such processes, reads what they say up to a limit, and kills them at the deadline
case.py      the tests of a row, in the forms that data sets have them; what output is right
grade.py     the reward
"""

from qerl.tasks.code.grade import code

__all__ = ["code"]
