"""`python -m qerl` is `qerl`."""

from qerl.cli import main

if __name__ == "__main__":
    main()
