"""A method's results kept by its arguments, for as long as its object lives.

`functools.lru_cache` around a bound method is a cycle: the object, and the device memory that it holds, would
stay until Python looks for cycles.
"""

import weakref
from collections.abc import Callable
from typing import Any


def cached_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """To be kept by the method's own object; arguments are positional and hashable."""
    weak, results = weakref.WeakMethod(method), {}

    def call(*arguments: Any) -> Any:
        if arguments not in results:
            bound = weak()
            assert bound is not None
            results[arguments] = bound(*arguments)
        return results[arguments]

    return call
