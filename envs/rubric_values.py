"""Plain values as JSON and back, exact in type, for a reward function that runs in another process.

Nothing that is read here can run code: only the types below are made, the dataclasses of `k3rl.types` by name.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from k3rl import types
from k3rl.packed import Packed

_DATACLASSES = {
    kind.__name__: kind
    for kind in (
        types.Branch,
        types.Budgets,
        types.EncodedImage,
        types.Episode,
        types.Failed,
        types.Invalid,
        types.Message,
        types.Scored,
        types.Task,
        types.ToolCall,
        types.Turn,
    )
}
_ENUMS = {kind.__name__: kind for kind in (types.StopReason, types.FailureKind)}


def encode(value: Any) -> Any:
    """A value as JSON. Raises TypeError for a type that is not plain data."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, enum.Enum) and type(value).__name__ in _ENUMS:
        return {"enum": [type(value).__name__, value.value]}
    if type(value).__name__ in _DATACLASSES and isinstance(value, _DATACLASSES[type(value).__name__]):
        fields = {item.name: encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {"record": [type(value).__name__, fields]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"set": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Packed):
        return {"packed": encode(value.array)}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [value.dtype.str, list(value.shape), data]}
    if isinstance(value, str | int | float):
        return encode(next(plain(value) for plain in (str, int, float) if isinstance(value, plain)))
    raise TypeError(f"a {type(value).__name__} is not plain data (numbers, text, lists, mappings, arrays)")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    match kind:
        case "float":
            return float(content)
        case "enum":
            return _ENUMS[content[0]](content[1])
        case "record":
            return _DATACLASSES[content[0]](**{name: decode(item) for name, item in content[1].items()})
        case "tuple":
            return tuple(map(decode, content))
        case "set":
            return set(map(decode, content))
        case "dict":
            return {decode(key): decode(item) for key, item in content}
        case "bytes":
            return base64.b64decode(content)
        case "packed":
            array = decode(content)
            return Packed.of(array, array.dtype)
        case "array":
            dtype, shape, data = content
            return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    raise ValueError(f"no value is of the kind {kind!r}")
