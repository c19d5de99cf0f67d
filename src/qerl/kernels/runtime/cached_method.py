"""Cache a method's results by its arguments, for the lifetime of its object.

`functools.lru_cache` around a bound method makes a reference cycle: the object, and its device memory, would
stay until Python's cycle collector runs.
"""

import weakref
from collections.abc import Callable
from typing import Any


def cached_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a caching version, to be stored on the method's object; arguments must be hashable."""
    weak, results = weakref.WeakMethod(method), {}

    def call(*arguments: Any) -> Any:
        if arguments not in results:
            bound = weak()
            assert bound is not None
            results[arguments] = bound(*arguments)
        return results[arguments]

    return call
