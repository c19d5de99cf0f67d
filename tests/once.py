"""What a command makes anew at every start, made once in a process that starts it a thousand times.

The options' docstrings and parser, and the commit and versions of the checkout, do not change while the tests
run. Of a tiny run of 0.8 CPU s they take 0.25. Data is not flushed to the disk either: only a power cut loses
what was written, and the tests of power cuts (tests/faults) put their own function in the place of os.fsync.
"""

import functools
import inspect
import os

import tyro
from tyro._docstrings import _ClassTokenization, get_class_tokenization_with_field, get_field_docstring
from tyro._parsers import ParserSpecification

from qerl.tracking import provenance


def install() -> None:
    os.fsync = lambda descriptor: os.fstat(descriptor) and None  # as before, an error for what is not open
    provenance.environment = functools.cache(provenance.environment)
    _keep_docstrings()
    _keep_parsers()


def _keep_docstrings() -> None:
    """Let tyro clear all caches but those of docstrings when a command has been parsed."""
    cached = (_ClassTokenization.make, get_class_tokenization_with_field, get_field_docstring)
    kept = {id(inspect.getclosurevars(f).nonlocals["local_cache"]) for f in cached}

    def clear_cache() -> None:
        for each in tyro._unsafe_cache._cache_list:
            if id(each) not in kept:
                each.clear()

    tyro._unsafe_cache.clear_cache = clear_cache


def _keep_parsers() -> None:
    """Keep the parser of each class of options with each default."""
    make, made = ParserSpecification.from_callable_or_type, {}

    def from_callable_or_type(f, *, description, default_instance, intern_prefix, parent_classes, **given):
        def anew() -> ParserSpecification:
            return make(
                f,
                description=description,
                default_instance=default_instance,
                intern_prefix=intern_prefix,
                parent_classes=parent_classes,
                **given,
            )

        if intern_prefix or parent_classes or given["subcommand_prefix"]:
            return anew()  # a part of a parser
        key = f, description, type(default_instance), repr(default_instance)
        if key not in made:
            made[key] = anew()
        return made[key]

    ParserSpecification.from_callable_or_type = staticmethod(from_callable_or_type)
