"""Tests that count a GPU's free memory, which other processes take too."""

import os

import pytest

IS_ALONE = "PYTEST_XDIST_WORKER" not in os.environ
alone = pytest.mark.skipif(not IS_ALONE, reason="counts free memory, so no other test may run beside it")
