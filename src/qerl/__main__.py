"""`python -m qerl` is `qerl`."""

from qerl.cli.main import main

if __name__ == "__main__":
    main()
