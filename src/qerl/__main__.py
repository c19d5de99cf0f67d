"""Run `qerl`, and `python -m qerl`. Ctrl-C ends it without a traceback, also while modules are imported."""

import sys


def main() -> None:
    try:
        from qerl.cli.main import main as run  # half a second of imports

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
