"""Configuration: the base class of every config, its loader, and the errors a user meets.

A run is one frozen, validated object. It is put together from, later ones winning:

    field defaults < preset function < TOML files, left to right < dotted flags

    k3rl rl quickstart @ my.toml @ more.toml --trainer.optim.lr 3e-4 --envs.1.ratio 5 --no-trace.enabled

Tables merge, lists are replaced whole (one entry is changed by its index), and naming another variant of a union
drops the old variant's fields. What is not in the schema is refused with the nearest name that is.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

# ---------------------------------------------------------------------------------------------------- errors


class K3Error(Exception):
    """An error with a message for the user: the command prints it without a traceback and exits `exit_code`.

    It travels between processes with all its attributes, whatever a subclass's constructor takes.
    """

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args, dict(self.__dict__))


def _again(kind: type[K3Error], args: tuple[Any, ...], attributes: dict[str, Any]) -> K3Error:
    """An error as it was in another process."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ConfigError(K3Error):
    """A configuration that cannot be run. `key` is dotted; `nearest` is a valid name, where one is close."""

    exit_code = 2

    def __init__(
        self, message: str, *, key: str = "", got: Any = None, wanted: str = "", nearest: str | None = None
    ) -> None:
        super().__init__(message)
        self.key = key
        self.got = got
        self.wanted = wanted
        self.nearest = nearest


class MissingResource(K3Error):
    """Something outside the configuration is not there: a package, a program, GPUs, a file, a checkpoint, a cluster."""

    exit_code = 3


NO_CHECKPOINT = "holds no checkpoint (no config.json); a run keeps its own in export/"


# ------------------------------------------------------------------------------------------------ base class


class Config(BaseModel):
    """Base of every config: frozen, unknown keys refused, the docstring under a field is its help.

    A union of configs names its discriminator (`Field(discriminator="type")`). A field that says where or under
    which name a run happens, not what it computes, is marked `Field(json_schema_extra=NOT_HASHED)`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, info in cls.model_fields.items():
            if _has_untagged_union(_kind_of(info)):
                raise TypeError(f"{cls.__name__}.{name}: a union of configs needs Field(discriminator=...)")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again. Raises ConfigError."""
        try:
            return type(self).model_validate({name: getattr(self, name) for name in type(self).model_fields} | changes)
        except ValidationError as error:
            raise as_config_error(error, type(self)) from None


NOT_HASHED: dict[str, Any] = {"hash": False}

C = TypeVar("C", bound=BaseModel)


def config_hash(config: BaseModel) -> str:
    """SHA-256 (hex) of the canonical JSON of everything that changes what the run computes."""
    text = json.dumps(_hashed(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _hashed(value: Any) -> Any:
    if isinstance(value, BaseModel):
        kept = {name: info for name, info in type(value).model_fields.items() if _is_hashed(info)}
        return {name: _hashed(getattr(value, name)) for name in kept}
    if isinstance(value, Mapping):
        return {str(key): _hashed(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_hashed(item) for item in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_hashed(item) for item in value]
    if isinstance(value, float):
        value += 0.0  # the two zeros are equal, so they hash alike
    return to_jsonable_python(value, inf_nan_mode="constants")


def _is_hashed(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("hash") is False)


def to_tree(config: BaseModel) -> dict[str, Any]:
    """The config as plain JSON values, nulls kept, so that it loads back to an equal object."""
    return config.model_dump(mode="json")


def from_tree(model: type[C], tree: Mapping[str, Any]) -> C:
    """The inverse of `to_tree`. Raises ConfigError."""
    return _validate(model, dict(tree), {})


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> plain value; list entries by index, an empty table or list as itself."""
    items: Sequence[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        return {prefix: tree}
    if not items:
        return {prefix: tree} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


ABSENT = "(absent)"


def diff(a: BaseModel | Mapping[str, Any], b: BaseModel | Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted names whose values differ -> (in a, in b); ABSENT where one side has no such name."""
    left, right = (flatten(to_tree(side) if isinstance(side, BaseModel) else side) for side in (a, b))
    names = sorted(left.keys() | right.keys())
    pairs = {name: (left.get(name, ABSENT), right.get(name, ABSENT)) for name in names}
    return {name: pair for name, pair in pairs.items() if not _same(*pair)}


def _same(a: Any, b: Any) -> bool:
    """Equal in value and kind; NaN equals itself, 0.0 equals -0.0, True is not 1."""
    return json.dumps(a) == json.dumps(b) or (isinstance(a, float) and isinstance(b, float) and a == b)


# --------------------------------------------------------------------------------------------- the schema walk


@dataclass(frozen=True)
class _Kind:
    """What one annotation accepts. At most one of models, item and value is set in a config of ours."""

    scalars: tuple[type, ...] = ()
    literals: tuple[Any, ...] = ()
    models: tuple[type[BaseModel], ...] = ()
    tag: str | None = None  # the discriminator's field name
    item: Any = None  # annotation of a list's or tuple's entries
    value: Any = None  # annotation of a mapping's values


def _kind_of(info: FieldInfo) -> _Kind:
    tag = info.discriminator if isinstance(info.discriminator, str) else None
    return _kind(info.annotation, tag)


def _kind(annotation: Any, tag: str | None = None) -> _Kind:
    annotation = getattr(annotation, "__value__", annotation)  # a type alias
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        tags = [part.discriminator for part in arguments[1:] if isinstance(part, FieldInfo) and part.discriminator]
        return _kind(arguments[0], cast(str, tags[0]) if tags else tag)
    if origin in (Union, types.UnionType):
        kinds = [_kind(argument, tag) for argument in arguments]
        return _Kind(
            scalars=tuple(scalar for kind in kinds for scalar in kind.scalars),
            literals=tuple(literal for kind in kinds for literal in kind.literals),
            models=tuple(model for kind in kinds for model in kind.models),
            tag=next((kind.tag for kind in kinds if kind.tag), tag),
            item=next((kind.item for kind in kinds if kind.item is not None), None),
            value=next((kind.value for kind in kinds if kind.value is not None), None),
        )
    if origin is Literal:
        return _Kind(literals=arguments)
    bare = object if annotation is Any else origin or annotation
    if isinstance(bare, type) and issubclass(bare, BaseModel):
        return _Kind(models=(bare,), tag=tag)
    if bare in (list, tuple, set, frozenset, Sequence):
        return _Kind(item=arguments[0] if arguments else Any)
    if bare in (dict, Mapping):
        return _Kind(value=arguments[1] if arguments else Any)
    return _Kind(scalars=(bare,) if isinstance(bare, type) else (object,))


def _has_untagged_union(kind: _Kind) -> bool:
    if len(kind.models) > 1 and kind.tag is None:
        return True
    return any(inner is not None and _has_untagged_union(_kind(inner)) for inner in (kind.item, kind.value))


def _variant(kind: _Kind, chosen: Any) -> tuple[type[BaseModel], ...]:
    """The config of a union that the tag value `chosen` names, all of them where it names none."""
    if kind.tag is None or chosen is None:
        return kind.models
    named = tuple(model for model in kind.models if chosen in _kind_of(model.model_fields[kind.tag]).literals)
    return named or kind.models


def dotted_names(model: type[BaseModel], prefix: str = "", above: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    """Every name that the schema knows, depth first; `N` stands for a list index or a mapping's key."""
    if model in above:
        return
    for name, info in model.model_fields.items():
        path, kind = f"{prefix}{name}", _kind_of(info)
        yield path
        for inner in (kind.item, kind.value):
            if inner is not None:
                path, kind = f"{path}.N", _kind(inner)
        for variant in kind.models:
            yield from dotted_names(variant, f"{path}.", (*above, model))


def _nearest(key: str, siblings: Sequence[str], root: type[BaseModel]) -> str | None:
    """The valid name closest to `key`: one beside it, else the same last word elsewhere, else any that is close."""
    parent, _, last = key.rpartition(".")
    if close := difflib.get_close_matches(last, siblings, n=1, cutoff=0.6):
        return f"{parent}.{close[0]}" if parent else close[0]
    names = list(dict.fromkeys(dotted_names(root)))
    same = [name for name in names if name.rpartition(".")[2] == last]
    return next(iter(same or difflib.get_close_matches(key, names, n=1, cutoff=0.5)), None)


# ------------------------------------------------------------------------------------------------- command line


@dataclass(frozen=True)
class Flag:
    """One dotted flag: its path, and its text, or True for a bare `--x` and False for `--no-x`."""

    path: tuple[str, ...]
    text: str | bool
    written: str


def split_words(words: Sequence[str]) -> tuple[list[Path], list[Flag]]:
    """Split `@ a.toml --b.c-d 1 --e --no-f` into files and flags. Raises ConfigError for any other word."""
    files: list[Path] = []
    flags: list[Flag] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "@":
            if not rest or rest[0].startswith("--"):
                raise ConfigError("'@' wants the path of a TOML file after it", key="@", wanted="a path")
            files.append(Path(rest.pop(0)))
        elif word.startswith("--") and len(word) > 2:
            name, equals, text = word[2:].partition("=")
            if equals:
                flags.append(Flag(_path(name), text, f"--{name}"))
            elif rest and not rest[0].startswith("--") and rest[0] != "@":
                flags.append(Flag(_path(name), rest.pop(0), word))
            elif name.startswith("no-"):
                flags.append(Flag(_path(name[3:]), False, word))
            else:
                flags.append(Flag(_path(name), True, word))
        else:
            fix = f"write '@ {word[1:]}'" if word.startswith("@") else "flags are '--key value', files '@ file.toml'"
            raise ConfigError(f"unexpected word {word!r}: {fix}", key=word, got=word, wanted=fix)
    return files, flags


def _path(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))


def _patch_of(flags: Sequence[Flag], model: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as one nested mapping, each value converted to what its field accepts."""
    texts = {tuple(part.replace("-", "_") for part in flag.path): flag.text for flag in flags}
    patch: dict[str, Any] = {}
    for flag in flags:
        kinds, keys = _resolve(flag, model, tree, texts)
        here = patch
        for key in keys[:-1]:
            inner = here.get(key)
            here[key] = here = inner if isinstance(inner, dict) else {}
        here[keys[-1]] = _convert(flag.text, kinds)
    return patch


def _resolve(
    flag: Flag, root: type[BaseModel], tree: Any, texts: Mapping[tuple[str, ...], str | bool]
) -> tuple[list[_Kind], list[str]]:
    """(what the flag's field accepts in each variant it may mean, its path in field names)."""
    kinds: list[_Kind] = [_Kind(models=(root,))]
    keys: list[str] = []
    for part in flag.path:
        name = part.replace("-", "_")
        models: dict[type[BaseModel], None] = {}
        for kind in kinds:
            chosen = texts.get((*keys, kind.tag)) if kind.tag else None
            if chosen is None and isinstance(tree, Mapping):
                chosen = tree.get(kind.tag)
            models |= dict.fromkeys(_variant(kind, chosen))
        everywhere = [model for kind in kinds for model in kind.models]
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        fields = fields or [model.model_fields[name] for model in everywhere if name in model.model_fields]
        entries = [kind.item for kind in kinds if kind.item is not None and part.isdecimal()]
        values = [kind.value for kind in kinds if kind.value is not None]
        if fields:
            kinds = [_kind_of(info) for info in fields]
        elif entries or values:
            name, kinds = part, [_kind(inner) for inner in entries or values]
        else:
            raise _unknown_flag(flag, keys, name, kinds, list(models), root)
        keys.append(name)
        tree = _child(tree, name)
    return kinds, keys


def _child(tree: Any, key: str) -> Any:
    if isinstance(tree, Mapping):
        return tree.get(key)
    if isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
        return tree[int(key)]
    return None


def _unknown_flag(
    flag: Flag, keys: list[str], name: str, kinds: list[_Kind], models: list[type[BaseModel]], root: type[BaseModel]
) -> ConfigError:
    key = ".".join([*keys, name])
    if any(kind.item is not None for kind in kinds):
        wanted, nearest = f"the number of an entry of the list {'.'.join(keys)}, from 0", None
    elif models:
        siblings = [known for model in models for known in model.model_fields]
        wanted, nearest = "a known name", _nearest(key, siblings, root)
    else:
        wanted, nearest = f"no part below {'.'.join(keys)}, which is a single value", ".".join(keys)
    return _error(_Problem(key, flag.text, wanted, nearest, flag.written))


def _convert(text: str | bool, kinds: Sequence[_Kind]) -> Any:
    """The plain value that a flag's text means for its field; text that fits nothing stays for the validator."""
    if isinstance(text, bool):
        return text
    for kind in kinds:
        for convert in _converters(kind):
            try:
                return convert(text)
            except ValueError:
                continue
    return text


def _converters(kind: _Kind) -> list[Any]:
    literals = {str(literal): literal for literal in kind.literals}
    ways: list[Any] = [lambda text: _lookup(literals, text)]
    ways += [lambda text: _lookup({"none": None, "null": None}, text)] if types.NoneType in kind.scalars else []
    ways += [lambda text: _lookup({"true": True, "false": False}, text)] if bool in kind.scalars else []
    ways += [int] if int in kind.scalars else []
    ways += [float] if float in kind.scalars else []
    if kind.models or kind.item is not None or kind.value is not None or object in kind.scalars:
        ways.append(json.loads)  # JSONDecodeError is a ValueError
    return ways


def _lookup(table: Mapping[str, Any], text: str) -> Any:
    if text not in table:
        raise ValueError(text)
    return table[text]


# ------------------------------------------------------------------------------------------------------ loading


Origins = Mapping[str, str]
"""Dotted name -> the file or flag that set it, so that an error can say where a value came from."""


def _origin(key: str, origins: Origins) -> str | None:
    """Who set `key`, a part of it, or a table above it."""
    related = (name for name in origins if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}."))
    return origins.get(key) or next((origins[name] for name in related), None)


def load(base: C, *, files: Sequence[Path] = (), flags: Sequence[Flag] = ()) -> C:
    """`base` with the TOML files and then the flags laid over it, validated as a whole. Raises ConfigError."""
    model, tree = type(base), to_tree(base)
    origins: dict[str, str] = {}
    for file in files:
        patch = read_toml(file)
        tree = _merge(tree, patch, _Kind(models=(model,)))
        origins |= dict.fromkeys(flatten(patch), str(file))
    tree = _merge(tree, _patch_of(flags, model, tree), _Kind(models=(model,)))
    origins |= {".".join(part.replace("-", "_") for part in flag.path): flag.written for flag in flags}
    return _validate(model, tree, origins)


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError when it is missing, not TOML, or holds a date."""
    try:
        return json.loads(json.dumps(tomllib.loads(file.read_text(encoding="utf-8"))))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", key="@", got=str(file), wanted="a file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}", key="@", got=str(file), wanted="a TOML file") from None
    except TypeError:
        message = f"{file} holds a date or time; no configuration key takes one, write it as a quoted text"
        raise ConfigError(message, key="@", got=str(file), wanted="no dates") from None


def _merge(base: Any, patch: Any, kind: _Kind, at: str = "") -> Any:
    """`patch` over `base`: tables merge, an index changes one entry of a list, another variant starts afresh."""
    if not isinstance(patch, dict):
        return patch
    if kind.item is not None and not kind.models:
        return _merge_entries(base, patch, kind, at)
    base = base if isinstance(base, dict) else {}
    if kind.tag in patch and patch[kind.tag] != base.get(kind.tag):
        base = {}
    merged = dict(base)
    models = _variant(kind, patch.get(kind.tag, base.get(kind.tag)))
    for key, value in patch.items():
        info = next((model.model_fields[key] for model in models if key in model.model_fields), None)
        inner = _kind_of(info) if info else _kind(kind.value) if kind.value is not None else _Kind()
        merged[key] = _merge(base.get(key), value, inner, f"{at}.{key}" if at else key)
    return merged


def _merge_entries(base: Any, patch: dict[str, Any], kind: _Kind, at: str) -> Any:
    if not all(key.isdecimal() for key in patch):
        return patch  # a table where a list belongs: the validator names it
    entries = list(base) if isinstance(base, list) else []
    for index in sorted(int(key) for key in patch):
        if index > len(entries):
            wanted = f"an entry from 0 to {len(entries)} ({len(entries)} would add one)"
            raise _error(_Problem(f"{at}.{index}", patch[str(index)], wanted))
        old = entries[index] if index < len(entries) else None
        entries[index : index + 1] = [_merge(old, patch[str(index)], _kind(kind.item), f"{at}.{index}")]
    return entries


def _validate(model: type[C], tree: dict[str, Any], origins: Origins) -> C:
    # JSON in strict mode takes a list for a tuple and a text for a path or an enum, but neither "5" nor true for 5.
    try:
        return model.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise as_config_error(error, model, origins) from None


# ------------------------------------------------------------------------------------------------ what went wrong


@dataclass(frozen=True)
class _Problem:
    key: str
    got: Any
    wanted: str
    nearest: str | None = None
    origin: str | None = None

    def __str__(self) -> str:
        if not self.key:
            return self.wanted
        lines = [f"{self.key}" + (f"   (from {self.origin})" if self.origin else "")]
        lines += [f"  got:     {_short(self.got)}", f"  wants:   {self.wanted}"]
        lines += [f"  nearest: {self.nearest}"] if self.nearest else []
        return "\n".join(lines)


def _short(value: Any) -> str:
    text = json.dumps(to_jsonable_python(value, fallback=repr), ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."


def _error(*problems: _Problem) -> ConfigError:
    first = problems[0]
    message = "\n".join(str(problem) for problem in problems)
    return ConfigError(message, key=first.key, got=first.got, wanted=first.wanted, nearest=first.nearest)


def as_config_error(
    error: ValidationError, model: type[BaseModel], origins: Origins = types.MappingProxyType({})
) -> ConfigError:
    """Pydantic's findings in the words of a ConfigError: every problem, the first one as its attributes."""
    return _error(*(_problem(dict(detail), model, origins) for detail in error.errors(include_url=False)))


def _problem(detail: dict[str, Any], root: type[BaseModel], origins: Origins) -> _Problem:
    path, kind, models = _locate(detail["loc"], root)
    key, nearest = ".".join(path), None
    wanted = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        siblings = [name for variant in models for name in variant.model_fields]
        wanted, nearest = "a known name", _nearest(key, siblings, root)
        others = [other for other in kind.models if other not in models and path[-1] in other.model_fields]
        if others and kind.tag:
            tag = ".".join([*path[:-1], kind.tag])
            literal = _kind_of(others[0].model_fields[kind.tag]).literals[0]
            wanted, nearest = f"a name of the variant that is set; {path[-1]!r} needs {tag} = {literal!r}", tag
    elif detail["type"] == "union_tag_invalid":
        path, key = [*path, kind.tag or ""], f"{key}.{kind.tag}"
        wanted = f"one of {detail['ctx']['expected_tags']}"
        detail["input"] = detail["ctx"]["tag"]
        known = [str(tag) for variant in kind.models for tag in _kind_of(variant.model_fields[path[-1]]).literals]
        nearest = next(iter(difflib.get_close_matches(str(detail["input"]), known, n=1)), None)
    elif detail["type"] == "union_tag_not_found":
        tags = [repr(tag) for variant in kind.models for tag in _kind_of(variant.model_fields[kind.tag or ""]).literals]
        wanted = f"{key}.{kind.tag} set to one of {', '.join(tags)}"
    elif detail["type"] == "missing":
        wanted = "a value; this key has no default"
        detail["input"] = None
    elif detail["type"] == "literal_error":
        nearest = next(
            iter(difflib.get_close_matches(str(detail["input"]), detail["ctx"]["expected"].split("'"))), None
        )
    if not key:  # a rule of the whole configuration: its message says it all
        return _Problem(key, None, wanted)
    return _Problem(key, detail["input"], wanted, nearest, _origin(key, origins))


def _locate(loc: Sequence[str | int], root: type[BaseModel]) -> tuple[list[str], _Kind, tuple[type[BaseModel], ...]]:
    """A location of pydantic's -> (path without the tags of unions, kind of the last parent, its variant).

    Where the location ends at a union itself, the kind is that union's.
    """
    path: list[str] = []
    models: tuple[type[BaseModel], ...] = (root,)
    kind = _Kind(models=models)
    rest = list(loc)
    while rest:
        part = rest.pop(0)
        if kind.tag and len(kind.models) > 1 and models == kind.models:
            models = _variant(kind, part)
            if models != kind.models:
                continue  # pydantic puts the tag of the variant into the location
        path.append(str(part))
        info = next((model.model_fields[part] for model in models if part in model.model_fields), None)
        if info is not None:
            inner = _kind_of(info)
        elif kind.item is not None or kind.value is not None:
            inner = _kind(kind.item if kind.item is not None else kind.value)
        else:
            break
        if rest or (inner.tag and len(inner.models) > 1):
            kind, models = inner, inner.models
    return path, kind, models
