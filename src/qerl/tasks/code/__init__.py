"""The reward `code`: run a sample's Python against the row's tests in a sandboxed process.

grade.py        the reward
test_cases.py   the tests of a row in the forms that data sets use; checks of outputs and values
script.py       a test in Python: which names are the program's, and why it could not run
runner.py       start sandboxed processes, read their output up to a limit, kill them at the deadline
launch.py       start such a process, as a fork of a server where it can be
fork_server.py  the server: what it does, and what a forked process leaves
child.py        what runs in such a process: the program, or the test that calls it
values.py       values as data that two processes exchange
sandbox.py      choose the backend that confines it on this machine
backends.py     the backends: Bubblewrap, or Landlock and seccomp
confine.py      what the process gives up before it loads the program
syscalls.py     the system calls that it keeps

In the process of a test:

test_process.py run a test and say if it passed
assertions.py   count the assertions that ran
remote_value.py reach the program in its own process
pytest_stub.py  the parts of pytest that tests use
"""

from qerl.tasks.code.grade import code

__all__ = ["code"]
