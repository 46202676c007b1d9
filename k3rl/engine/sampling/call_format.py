"""The xgrammar format of one call of a named tool, as `xtml.parse` reads it.

Each declared property comes once at most, in the order of the declaration, the required ones always; a value is of one
of the property's types, and a value that is no string keeps to the property's schema where that can be enforced.
Without declared properties any arguments may come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from k3rl.engine.sampling.json_schema import MAX_WHITESPACE, SchemaError, enforceable

Format: TypeAlias = dict[str, Any]
_KINDS = ("string", "number", "boolean", "null", "object", "array")
_BODIES: dict[str, Format] = {
    "string": {"type": "any_text"},
    "number": {"type": "regex", "pattern": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?"},
    "boolean": {"type": "regex", "pattern": "true|false"},
    "null": {"type": "const_string", "value": "null"},
    "object": {"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": MAX_WHITESPACE},
    "array": {"type": "json_schema", "json_schema": {"type": "array"}, "max_whitespace_cnt": MAX_WHITESPACE},
}


def call_format(source: str, special: Callable[[str], Format]) -> list[Format]:
    """The parts of a call, from OPEN call to CLOSE call SEP.

    source: JSON {"name", "parameters"}; special: the format of a special token. Raises SchemaError.
    """
    try:
        tool = json.loads(source)
        name, parameters = tool["name"], tool.get("parameters") or {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"a tool call names its tool as JSON {{name, parameters}}: {error}") from error

    def text(value: str) -> Format:
        return {"type": "const_string", "value": value}

    def argument(key: Format, kind: str, body: Format) -> Format:
        head = [special("open"), text('argument key="'), key, text(f'" type="{kind}"'), special("sep")]
        tail = [special("close"), text("argument"), special("sep")]
        return {"type": "sequence", "elements": [*head, body, *tail]}

    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    arguments: list[Format] = []
    if isinstance(properties, Mapping) and properties:
        required = parameters.get("required") or ()
        for key, schema in properties.items():
            options = [argument(text(_attribute(key)), kind, body) for kind, body in _values(schema)]
            one = options[0] if len(options) == 1 else {"type": "or", "elements": options}
            arguments.append(one if key in required else {"type": "optional", "content": one})
    else:
        key = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
        options = [argument(key, kind, _BODIES[kind]) for kind in _KINDS]
        arguments.append({"type": "star", "content": {"type": "or", "elements": options}})
    head = text(f'call tool="{_attribute(name)}" index="1"')
    return [special("open"), head, special("sep"), *arguments, special("close"), text("call"), special("sep")]


def _values(schema: Any) -> list[tuple[str, Format]]:
    """(type attribute, body) of each kind of value that a property may have."""
    if not isinstance(schema, Mapping):
        return [(kind, _BODIES[kind]) for kind in _KINDS]
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if values and all(isinstance(value, str) for value in values):
        options: list[Format] = [{"type": "const_string", "value": value} for value in values]
        return [("string", options[0] if len(options) == 1 else {"type": "or", "elements": options})]
    named = schema.get("type")
    kinds = [named] if isinstance(named, str) else list(named) if isinstance(named, list) else list(_KINDS)
    found = {"number" if kind == "integer" else kind: kind for kind in kinds}
    return [(attribute, _body(attribute, kind, schema)) for attribute, kind in found.items() if attribute in _KINDS]


def _body(attribute: str, kind: str, schema: Mapping[str, Any]) -> Format:
    if attribute == "string":
        return _BODIES["string"]
    try:
        own = enforceable(json.dumps({**schema, "type": kind}))
    except SchemaError:  # the tool is called, and its schema says the rest to whoever runs it
        return _BODIES[attribute]
    return {"type": "json_schema", "json_schema": own, "max_whitespace_cnt": MAX_WHITESPACE}


def _attribute(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")
