"""What a command makes anew at every start, made once in a process that starts it a thousand times.

The options' docstrings and parser, and the commit and versions of the checkout, do not change while the tests
run. Of a tiny run of 0.8 CPU s they take 0.25. Data is not flushed to the disk either: only a power cut loses
what was written, and the tests of power cuts (tests/faults) put their own function in the place of os.fsync.
"""

import functools
import inspect
import os
from typing import Any

from tyro import _unsafe_cache
from tyro._docstrings import _ClassTokenization, get_class_tokenization_with_field, get_field_docstring
from tyro._parsers import ParserSpecification

from qerl.tracking import provenance

flush = os.fsync
"""Of the operating system."""


def install() -> None:
    os.fsync = _flushed
    provenance.environment = functools.cache(provenance.environment)
    _keep_docstrings()
    _keep_parsers()


def _flushed(fd: Any) -> None:
    os.fstat(fd)  # raises for what is not open, as a flush would


def _keep_docstrings() -> None:
    """Let tyro clear all caches but those of docstrings when a command has been parsed."""
    cached = (_ClassTokenization.make, get_class_tokenization_with_field, get_field_docstring)
    kept = {id(inspect.getclosurevars(f).nonlocals["local_cache"]) for f in cached}

    def clear_cache() -> None:
        for each in _unsafe_cache._cache_list:
            if id(each) not in kept:
                each.clear()

    setattr(_unsafe_cache, "clear_cache", clear_cache)  # noqa: B010


def _keep_parsers() -> None:
    """Keep the parser of each class of options with each default."""
    make = ParserSpecification.from_callable_or_type
    made: dict[Any, ParserSpecification] = {}

    def from_callable_or_type(f: Any, **given: Any) -> ParserSpecification:
        if given["intern_prefix"] or given["parent_classes"] or given["subcommand_prefix"]:
            return make(f, **given)  # a part of a parser
        default = given["default_instance"]
        key = f, given["description"], type(default), repr(default)
        if key not in made:
            made[key] = make(f, **given)
        return made[key]

    setattr(ParserSpecification, "from_callable_or_type", staticmethod(from_callable_or_type))  # noqa: B010
