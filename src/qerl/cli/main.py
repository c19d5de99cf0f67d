"""Dispatch `qerl COMMAND` to the command's module.

A UserError prints one line and exits with code 2; a RunError or an OSError prints one line and exits with
code 1.
`--debug` anywhere shows the traceback.
"""

import contextlib
import importlib
import importlib.metadata
import io
import os
import sys
from types import ModuleType

from qerl.cli.arguments import check_known
from qerl.errors import RunError, UserError, check_platform, printable, redact

USAGE = """\
usage: qerl COMMAND [ARGUMENT ...] [OPTIONS]

Train large language models with reinforcement learning on a single GPU, or on a CPU.

commands:
{commands}

examples:
  qerl check demo
  qerl train demo
  qerl train --task rows.jsonl --reward reward.py:score --model Qwen/Qwen2.5-1.5B-Instruct
  qerl eval runs/demo
  qerl serve runs/demo

Run 'qerl COMMAND --help' for a command's arguments and options.
Add --debug to any command to show the traceback of an error; qerl --version prints the version."""
COMMANDS = (
    *(
        "train",
        "sft",
        "dpo",
        "distil",
        "check",
        "data",
        "eval",
        "generate",
        "serve",
        "tinker",
        "plan",
        "quantize",
        "export",
    ),
    *("report", "watch", "bench"),
)


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the name of a file may be no text of its encoding
            with contextlib.suppress(OSError, ValueError):  # a stream that is closed or was redirected
                stream.reconfigure(errors="backslashreplace")
    try:
        command(arguments)
    except (UserError, RunError) as error:
        if "--debug" in sys.argv:
            raise
        print(f"qerl: {redact(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a disk, a path or a network that fails where no command expects it
        if "--debug" in sys.argv:
            raise
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        print(f"qerl: {redact(printable(place + (error.strerror or str(error))))}", file=sys.stderr)
        sys.exit(1)


def command(arguments: list[str]) -> None:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name == "--version":
        print(f"qerl {importlib.metadata.version('qerl')}")
        return
    check_platform()
    if name in ("-h", "--help"):
        first = {name: (_module(name).__doc__ or "").partition("\n")[0] for name in COMMANDS}
        lines = [f"  {name:10}{line.rstrip('.')}" for name, line in first.items()]
        print(USAGE.format(commands="\n".join(lines)))
        return
    _module(check_known(name, COMMANDS, "command")).run(rest)


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"qerl.cli.{'evaluate' if command == 'eval' else command}")
