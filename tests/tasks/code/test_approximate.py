"""approx agrees with pytest's for any numbers, sequences, mappings and arrays. Releases of pytest
differ in what else they take."""

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qerl.tasks.code.approximate import approx

NEAR = [
    0,
    1,
    1 + 5e-7,
    1 + 2e-6,
    1e-13,
    1e-11,
    4.0,
    4,
    -4.000001,
    1e20,
    1e20 + 1e13,
    float("inf"),
    float("nan"),
]
NUMBERS = st.sampled_from([*NEAR, True, False, Decimal("1.0000001"), 1 + 0j, 1 + 1e-7j, 10**30])
NUMBERS |= st.floats() | st.integers() | st.builds(np.float64, st.floats())
FLOATS = st.sampled_from(NEAR).map(float)
SEQUENCES = st.lists(NUMBERS, max_size=3) | st.lists(NUMBERS, max_size=3).map(tuple)
ARRAYS = st.lists(FLOATS, max_size=3).map(np.array)
VALUES = (
    NUMBERS | SEQUENCES | st.dictionaries(st.sampled_from("ab"), NUMBERS) | ARRAYS | st.sets(st.integers())
)
TOLERANCES = st.none() | st.sampled_from([0, 1e-3, 1e-9, 2.0, -1.0, float("nan")])


def is_close(kind, value, expected, **tolerances):
    """True only if it is equal in either order; what raises is not."""
    try:
        made = kind(expected, **tolerances)
        return bool(value == made) and bool(made == value) and not bool(value != made)
    except Exception:
        return False


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=1500, deadline=None)
@given(value=VALUES, expected=VALUES, rel=TOLERANCES, abs=TOLERANCES, nan_ok=st.booleans())
@example(value=np.array([9.0, 1.0]), expected=np.array([9.0, 1.0]), rel=None, abs=None, nan_ok=False)
@example(value=[9.0, 1.0], expected=np.array([9.0, 1.0]), rel=None, abs=None, nan_ok=False)
@example(value=0, expected=Decimal("1.0000001"), rel=2.0, abs=None, nan_ok=False)
@example(value=1, expected=Decimal("1.1"), rel=None, abs=0.2, nan_ok=False)
@example(value=1, expected=True, rel=None, abs=None, nan_ok=False)
@example(value=[[1.0]], expected=[[1.0]], rel=None, abs=None, nan_ok=False)
def test_a_value_is_close_where_pytest_says_so(value, expected, rel, abs, nan_ok):
    given = {"rel": rel, "abs": abs, "nan_ok": nan_ok}
    assert is_close(approx, value, expected, **given) == is_close(pytest.approx, value, expected, **given)
