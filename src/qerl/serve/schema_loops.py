"""Find references of a JSON schema that no finite value satisfies: loops of `$ref`, and objects that must
contain themselves.

A schema has an end if all its groups have one that ends; the groups of

    $ref, allOf              each target alone
    anyOf, oneOf             the alternatives together
    required properties      each alone, if the type is "object"
    the first minItems       each alone, if the type is "array"

The largest set without an end is what is left once schemas with an end have been found, one from another.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_Schema = dict[str, Any]
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_IN_OBJECTS = ("properties", "patternProperties")
_ALONE = ("items", "additionalProperties")


def find_loop(root: _Schema) -> str | None:
    """Return such a reference, as it is written; None if there is none."""
    schemas = _reachable(root)
    users: dict[int, list[tuple[int, int]]] = {}
    unmet: dict[int, set[int]] = {}
    for key, schema in schemas.items():
        groups = [_keys(group) for group in _groups(schema, root)]
        unmet[key] = {i for i, group in enumerate(groups) if group}
        for i, group in enumerate(groups):
            for member in group:
                users.setdefault(member, []).append((key, i))
    ending = [key for key, groups in unmet.items() if not groups]
    while ending:
        for user, group in users.get(ending.pop(), ()):
            if group in unmet[user]:
                unmet[user].discard(group)
                if not unmet[user]:
                    ending.append(user)
    endless = (schemas[key] for key, groups in unmet.items() if groups)
    return next((each["$ref"] for each in endless if _target(each, root) is not None), None)


def _reachable(root: _Schema) -> dict[int, _Schema]:
    """Return the schemas that a value may have to satisfy, by their ids."""
    schemas, waiting = {id(root): root}, [root]
    while waiting:
        schema = waiting.pop()
        target = _target(schema, root)
        for each in [*_parts(schema), *([] if target is None else [target])]:
            if id(each) not in schemas:
                schemas[id(each)] = each
                waiting.append(each)
    return schemas


def _parts(schema: _Schema) -> Iterator[_Schema]:
    values = [schema.get(name) for name in _ALONE]
    for name in _IN_LISTS:
        values += _list(schema.get(name))
    for name in _IN_OBJECTS:
        values += _object(schema.get(name)).values()
    return (each for each in values if isinstance(each, dict))


def _groups(schema: _Schema, root: _Schema) -> Iterator[list[Any]]:
    """Yield the groups of which one member must have an end. What is no object always has one."""
    if (target := _target(schema, root)) is not None:
        yield [target]
    yield from ([each] for each in _list(schema.get("allOf")))
    yield from filter(None, (_list(schema.get(name)) for name in ("anyOf", "oneOf")))
    if schema.get("type") == "object":
        properties = _object(schema.get("properties"))
        yield from (
            [properties[name]] for name in _list(schema.get("required")) if _is_named(name, properties)
        )
    if schema.get("type") == "array" and type(num := schema.get("minItems")) is int and num > 0:
        first = _list(schema.get("prefixItems"))
        yield from ([each] for each in first[:num])
        if num > len(first):
            yield [schema.get("items")]


def _keys(group: list[Any]) -> list[int]:
    """Return the members' ids; none if one of them has an end for sure."""
    return [id(each) for each in group] if all(isinstance(each, dict) for each in group) else []


def _target(schema: _Schema, root: _Schema) -> _Schema | None:
    """Return what `$ref` names in this document; None if there is none."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    value: Any = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name[:9]) < len(value):
            value = value[int(name[:9])]
        else:
            value = _object(value).get(name)
    return value if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_named(name: Any, properties: dict[str, Any]) -> bool:
    return isinstance(name, str) and name in properties
