"""JSON schemas that a grammar enforces in full, and typed refusals of all others.

xgrammar passes over keywords that it cannot enforce (`uniqueItems`, `not`, `allOf`, a pattern together with a length)
with a warning or in silence, and a few schemas end its process. So a schema is brought here into a form that it
keeps exactly: every text of the resulting grammar is JSON that the given schema accepts. The form may be narrower
than the schema: no properties beyond the declared ones, strings of limited length by a pattern.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from k3rl.engine.sampling.patterns import FORMATS, PatternError, enforced

MAX_MULTIPLES = 4096  # values of an enum that stands for multiples
MAX_DEPTH = 64  # of nested schemas: the grammar compiler recurses
MAX_WHITESPACE = 16  # characters in a row between the parts of a JSON text
MAX_BRACKETS = 200  # nested in a pattern or grammar
MAX_COUNTED = 32  # properties of an object that limits their number: the grammar lists all ways to get there

_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
_NOTES |= {"$comment", "$defs", "definitions", "contentEncoding", "contentMediaType"}
_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_OF_TYPE: dict[str, set[str]] = {
    "null": set(),
    "boolean": set(),
    "integer": {*_RANGE, "multipleOf"},
    "number": {*_RANGE, "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
    },
}
_PYTHON: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


class SchemaError(ValueError):
    """A schema that cannot be enforced in full; the message names the place, the keyword and a way out."""


def enforceable(text: str) -> dict[str, Any]:
    """The schema of this JSON text in a form that the grammar keeps exactly. Raises SchemaError."""
    try:
        schema = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise SchemaError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise SchemaError(f"the schema is {type(schema).__name__}; it must be a JSON object")
    _refuse_bare_loops(schema)
    return _node(schema, "#", 0)


def check_brackets(source: str, place: str) -> None:
    """Raises SchemaError for brackets nested too deeply: compilers of patterns and grammars recurse."""
    depth = deepest = 0
    for character in source:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_BRACKETS:
        raise SchemaError(f"{place} has brackets nested {deepest} deep; at most {MAX_BRACKETS} are taken")


def _node(schema: Any, place: str, depth: int) -> dict[str, Any]:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError(f"{place} is {json.dumps(schema)}; it must be a schema, a JSON object")
    if depth > MAX_DEPTH:
        raise SchemaError(f"the schema is nested deeper than {MAX_DEPTH} at {place[:80]}; use $defs and $ref")
    notes = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
    out: dict[str, Any] = {}
    for key, definitions in notes.items():
        if not isinstance(definitions, dict):
            raise SchemaError(f"{place}/{key} must be an object of schemas")
        out[key] = {name: _node(value, f"{place}/{key}/{name}", depth + 1) for name, value in definitions.items()}
    asserted = {key: value for key, value in schema.items() if key not in _NOTES}
    return out | _asserted(asserted, place, depth)


def _asserted(schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
    """A schema without notes: one combining keyword alone, fixed values, or one type with its own keywords."""
    if isinstance(schema.get("allOf"), list) and len(schema) == 1 and len(schema["allOf"]) == 1:
        return _node(schema["allOf"][0], f"{place}/allOf/0", depth + 1)
    for key in ("$ref", "anyOf"):
        if key in schema:
            _refuse_others(schema, {key}, place, f"beside {key} nothing else can be enforced")
    if "$ref" in schema:
        return {"$ref": schema["$ref"]}
    if "anyOf" in schema:
        if not isinstance(schema["anyOf"], list) or not schema["anyOf"]:
            raise SchemaError(f"{place}/anyOf must be a list of at least one schema")
        return {"anyOf": [_node(item, f"{place}/anyOf/{i}", depth + 1) for i, item in enumerate(schema["anyOf"])]}
    if "const" in schema or "enum" in schema:
        return _fixed(schema, place)
    known = {"type"}.union(*_OF_TYPE.values())
    _refuse_others(schema, known, place, "it cannot be enforced while sampling; leave it out and check the result")
    types = _types(schema, place)
    if not types:
        return {}
    options = [_typed(kind, schema, place, depth) for kind in types]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _refuse_others(schema: Mapping[str, Any], known: set[str], place: str, why: str) -> None:
    if others := sorted(set(schema) - known):
        raise SchemaError(f"{place} uses {others[0]!r}: {why}")


def _types(schema: Mapping[str, Any], place: str) -> list[str]:
    """The types named, or the one that the keywords belong to; none for a schema that says nothing."""
    named = schema.get("type")
    if named is None:
        used = set(schema)
        owners = [kind for kind, keywords in _OF_TYPE.items() if used and used <= keywords]
        if used and not owners:
            raise SchemaError(f"{place} has keywords of several types ({sorted(used)}); name its type")
        return [owners[-1] if used <= _RANGE else owners[0]] if used else []
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list) or not types or any(kind not in _OF_TYPE for kind in types):
        raise SchemaError(f"{place}/type is {json.dumps(named)}; it must be of {', '.join(_OF_TYPE)}")
    return types


def _fixed(schema: dict[str, Any], place: str) -> dict[str, Any]:
    _refuse_others(schema, {"const", "enum", "type"}, place, "beside enum or const only type can be enforced")
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        raise SchemaError(f"{place}/enum must be a list of values")
    if "const" in schema and "enum" in schema:
        raise SchemaError(f"{place} has both const and enum; keep one")
    if "type" in schema:
        types = _types(schema, place)
        values = [value for value in values if any(_PYTHON[kind](value) for kind in types)]
    if not values:
        raise SchemaError(f"{place} has no value that its type allows")
    return {"enum": values}


def _typed(kind: str, schema: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
    own = {key: value for key, value in schema.items() if key in _OF_TYPE[kind]}
    out = {"type": kind, **own}
    if kind == "string":
        return _string(out, place)
    if "multipleOf" in own:
        return _multiples(out, place)
    if kind == "array":
        if "items" in own and own["items"] is not False:
            out["items"] = _node(own["items"], f"{place}/items", depth + 1)
        if "prefixItems" in own:
            items = own["prefixItems"]
            if not isinstance(items, list):
                raise SchemaError(f"{place}/prefixItems must be a list of schemas")
            out["prefixItems"] = [_node(item, f"{place}/prefixItems/{i}", depth + 1) for i, item in enumerate(items)]
    if kind == "object":
        return _object(out, place, depth)
    return out


def _multiples(out: dict[str, Any], place: str) -> dict[str, Any]:
    """Multiples of a whole number, as the values of an enum or as integers; of others JSON has no exact decimals."""
    step = out.pop("multipleOf")
    if isinstance(step, bool) or not isinstance(step, int | float) or step <= 0 or step != int(step):
        raise SchemaError(
            f"{place}/multipleOf is {json.dumps(step)}; it can be enforced for whole numbers from 1 on, so count in "
            "smaller units"
        )
    step, bounds = int(step), _whole_bounds(out, place)
    if step == 1:
        return {"type": "integer", **{key: value for key, value in bounds.items() if value is not None}}
    least, most = bounds["minimum"], bounds["maximum"]
    if least is None or most is None:
        raise SchemaError(
            f"{place}/multipleOf is {step}; it can be enforced between a minimum and a maximum, so give both"
        )
    first, last = -(-least // step), most // step
    if not 0 < last - first + 1 <= MAX_MULTIPLES:
        raise SchemaError(
            f"{place}/multipleOf has {max(0, last - first + 1)} values between {least} and {most}; from 1 to "
            f"{MAX_MULTIPLES} it can have"
        )
    return {"enum": [step * factor for factor in range(first, last + 1)]}


def _whole_bounds(out: Mapping[str, Any], place: str) -> dict[str, int | None]:
    """minimum and maximum of the whole numbers in a range; None for one that is open. Raises SchemaError."""
    for key in _RANGE & out.keys():
        value = out[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SchemaError(f"{place}/{key} is {json.dumps(value)}; it must be a number")
    least = [math.ceil(out["minimum"])] if "minimum" in out else []
    least += [math.floor(out["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in out else []
    most = [math.floor(out["maximum"])] if "maximum" in out else []
    most += [math.ceil(out["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in out else []
    return {"minimum": max(least, default=None), "maximum": min(most, default=None)}


def _string(out: dict[str, Any], place: str) -> dict[str, Any]:
    """Lengths and formats as a pattern: the grammar would let raw control characters through otherwise."""
    if "pattern" in out and "format" in out:
        raise SchemaError(f"{place} has a pattern beside a format; write the format into the pattern")
    if "pattern" in out:
        out = _without_lengths(out, place, "pattern")
        return {**out, "pattern": _pattern(out["pattern"], f"{place}/pattern")}
    if "format" in out:
        out = _without_lengths(out, place, "format")
        name = out.pop("format")
        if name not in FORMATS:
            raise SchemaError(
                f"{place}/format is {json.dumps(name)}; those that can be enforced are {', '.join(FORMATS)}"
            )
        return {**out, "pattern": FORMATS[name]}
    if "minLength" not in out and "maxLength" not in out:
        return out
    least, most = out.pop("minLength", 0), out.pop("maxLength", None)
    for name, value in (("minLength", least), ("maxLength", 0 if most is None else most)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise SchemaError(f"{place}/{name} is {json.dumps(value)}; it must be a whole number from 0 on")
    if most is not None and most < least:
        raise SchemaError(f"{place}: maxLength {most} is less than minLength {least}")
    return {**out, "pattern": f"^(.|\\n){{{least},{'' if most is None else most}}}$"}


def _without_lengths(out: dict[str, Any], place: str, beside: str) -> dict[str, Any]:
    if "minLength" in out or "maxLength" in out:
        raise SchemaError(f"{place} has a length beside a {beside}; write the length into a pattern")
    return dict(out)


def _pattern(pattern: Any, place: str) -> str:
    """A pattern that is enforced in full. Raises SchemaError."""
    if not isinstance(pattern, str):
        raise SchemaError(f"{place} is {json.dumps(pattern)}; it must be text")
    check_brackets(pattern, place)
    try:
        return enforced(pattern)
    except PatternError as error:
        raise SchemaError(f"{place} is {pattern[:60]!r}: {error}; leave it out and check the result") from error


def _object(out: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
    properties, required = out.get("properties", {}), out.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise SchemaError(f"{place}: properties must be an object and required a list of names")
    if missing := [name for name in required if name not in properties]:
        raise SchemaError(f"{place} requires {missing[0]!r}, which is not among its properties; declare it")
    patterns, more = out.get("patternProperties", {}), out.get("additionalProperties", not properties)
    if patterns and (properties or len(patterns) > 1 or more not in (True, False)):
        raise SchemaError(f"{place}: patternProperties can be enforced with one pattern and nothing beside it")
    patterns = {_pattern(pattern, f"{place}/patternProperties"): value for pattern, value in patterns.items()}
    if len(properties) > MAX_COUNTED and ("minProperties" in out or "maxProperties" in out):
        raise SchemaError(f"{place} limits the number of its {len(properties)} properties; up to {MAX_COUNTED} it can")
    if not properties and out.get("minProperties", 0) > 1:
        raise SchemaError(f"{place}: minProperties above 1 needs declared properties; names could repeat")
    out = {key: value for key, value in out.items() if key not in ("patternProperties", "properties")}
    if properties:
        out["properties"] = {
            name: _node(value, f"{place}/properties/{name}", depth + 1) for name, value in properties.items()
        }
    if patterns:
        ((pattern, value),) = patterns.items()
        out["patternProperties"] = {pattern: _node(value, f"{place}/patternProperties", depth + 1)}
    # A further property could repeat a declared name, and the last one counts: only declared ones are sampled.
    free = more is not False and not properties and not patterns
    out["additionalProperties"] = _node(more, f"{place}/additionalProperties", depth + 1) if free else False
    return out


def _refuse_bare_loops(root: dict[str, Any]) -> None:
    """A reference that comes back to itself without an array or object in between has no text at all."""

    def target(reference: Any, place: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(f"{place}/$ref is {json.dumps(reference)}; only references into this schema (#/...) work")
        found: Any = root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise SchemaError(f"{place}/$ref names {reference!r}, which is not there")
            found = found[name]
        return found

    def follow(schema: Any, place: str, trail: tuple[str, ...]) -> None:
        if not isinstance(schema, dict) or len(trail) > MAX_DEPTH:
            return
        if "$ref" in schema:
            if schema["$ref"] in trail:
                raise SchemaError(f"{place}/$ref comes back to itself through {' -> '.join(trail)}")
            follow(target(schema["$ref"], place), place, (*trail, schema["$ref"]))
        for key in ("anyOf", "allOf"):
            for item in schema.get(key) or ():
                follow(item, place, trail or ("#",) if schema is root else trail)

    def visit(schema: Any, place: str, depth: int) -> None:
        if depth > MAX_DEPTH * 4:
            raise SchemaError(f"the schema is nested deeper than {MAX_DEPTH}; use $defs and $ref")
        if isinstance(schema, dict):
            follow(schema, place, ("#",) if schema is root else ())
            for key, value in schema.items():
                visit(value, f"{place}/{key}", depth + 1)
        elif isinstance(schema, list):
            for index, value in enumerate(schema):
                visit(value, f"{place}/{index}", depth + 1)

    visit(root, "#", 0)
