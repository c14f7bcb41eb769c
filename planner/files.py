"""Values and their files: one reader, one writer and one (de)serialiser for every dataclass of the planner.

A file is JSON or YAML, by its suffix, and holds one object whose ``schema`` key says what it is. Everything wrong in
a file is a ``ValueError`` that reads ``<file>: <key>: <value> <what would be right>``.

A dataclass field may have a shorthand in the file (``shorthand``); a dataclass with ``BRIEF = True`` leaves out the
fields that equal their defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar, Union

T = TypeVar("T")
P = ParamSpec("P")
LINE_LENGTH = 120
SUFFIXES = (".json", ".yaml", ".yml")


class Document:
    """A value that is a file of its own: profile, cluster, job, plan. Subclasses are dataclasses with a ``SCHEMA``."""

    __slots__ = ()
    SCHEMA: ClassVar[str]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the value from a JSON or YAML file; ``ValueError`` names the file, the key and the value."""
        return from_dict(cls, read(path), str(path))

    def save(self, path: str | Path) -> None:
        """Write the value whole (JSON or YAML by suffix): a reader sees the old file or the new one, never a part."""
        data = self.to_dict()
        write(path, dumps_yaml(data) if _suffix(path) != ".json" else dumps(data))

    def to_dict(self) -> dict[str, Any]:
        """The value as plain JSON data, ``schema`` first."""
        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "") -> Self:
        """The value that plain JSON data describes; `where` (a file name) starts every error message."""
        return from_dict(cls, data, where)

    @property
    def digest(self) -> str:
        """16 hex digits that change when anything in the value does."""
        return digest(self)


# Reading and writing ------------------------------------------------------------------------------------------------


def read(path: str | Path) -> dict[str, Any]:
    """The object in a JSON or YAML file.

    Raises
    ------
    ValueError
        ``<path>: line 3 column 5: ...`` for bad syntax or a repeated key; also for a file that is missing, unreadable,
        empty, of another suffix, or whose top level is no object.
    """
    suffix = _suffix(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file{_similar_files(Path(path))}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise ValueError(f"{path}: the file is empty")
    data = _parse_json(text, str(path)) if suffix == ".json" else _parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object with keys at the top level, got {_describe(data)}")
    return data


def write(path: str | Path, content: str | bytes) -> None:
    """Write `content` to `path` whole: into a temporary file beside it, which then takes its name."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # still there only if writing failed


def dumps(value: Any) -> str:
    """Canonical JSON of a dataclass or of plain data: same value, same text. What fits on a line stands on one."""
    return _format(_plain(value), indent=0, used=0) + "\n"


def dumps_yaml(value: Any) -> str:
    """The same data as YAML, keys in the same order."""
    import yaml

    text: str = yaml.safe_dump(_plain(value), sort_keys=False, default_flow_style=None, width=LINE_LENGTH)
    return text


def digest(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of the value's canonical JSON; the order of object keys does not matter."""
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _suffix(path: str | Path) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: suffix {suffix!r} is not among {', '.join(SUFFIXES)}")
    return suffix


def _similar_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (there is no directory {path.parent})"
    close = difflib.get_close_matches(path.name, [each.name for each in path.parent.iterdir()], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parse_json(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{where}: key {repeated!r} occurs twice in one object")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: line {error.lineno} column {error.colno}: {error.msg}") from None


def _parse_yaml(text: str, where: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=_yaml_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}: {place}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None


@functools.cache
def _yaml_loader() -> Any:
    """YAML as people expect it: 1e9 is a number, a date is text, a repeated key is an error."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    problem = f"key {key.value!r} occurs twice in one object"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep=deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    exponent = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+.0123456789"))
    return Loader


def _format(data: Any, indent: int, used: int) -> str:
    """JSON text of plain data that starts after `used` characters on a line indented by `indent`."""
    line = json.dumps(data, ensure_ascii=False, allow_nan=False)
    if not isinstance(data, (dict, list)) or not data or (indent and used + len(line) < LINE_LENGTH):
        return line
    pad = " " * (indent + 1)
    if isinstance(data, list):
        parts = [_format(item, indent + 1, indent + 1) for item in data]
        return "[\n" + ",\n".join(pad + part for part in parts) + "\n" + " " * indent + "]"
    keys = [json.dumps(str(key), ensure_ascii=False) + ": " for key in data]
    parts = [key + _format(item, indent + 1, indent + 1 + len(key)) for key, item in zip(keys, data.values())]
    return "{\n" + ",\n".join(pad + part for part in parts) + "\n" + " " * indent + "}"


# Dataclass -> plain data --------------------------------------------------------------------------------------------


def shorthand(expand: Callable[[Any], Any], collapse: Callable[[Any], Any]) -> dict[str, Any]:
    """Field metadata: the file holds ``collapse(plain)``, and ``expand`` turns that back into `plain` JSON data."""
    return {"expand": expand, "collapse": collapse}


#: Field metadata for ``tuple[tuple[key, value], ...]`` that is an object in the file.
MAPPING = shorthand(lambda data: data, lambda pairs: {str(key): value for key, value in pairs})


def to_dict(value: Any) -> dict[str, Any]:
    """Plain JSON data of a dataclass, fields in order; `SCHEMA`, if its class has one, comes first."""
    schema = getattr(type(value), "SCHEMA", None)
    return {"schema": schema, **_fields_out(value)} if schema else _fields_out(value)


def _fields_out(value: Any) -> dict[str, Any]:
    cls: Any = type(value)
    hints, brief, out = _hints(cls), getattr(cls, "BRIEF", False), {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if not field.init or (brief and _is_default(field, item)):
            continue
        data = _out(item, hints[field.name])
        out[field.name] = field.metadata["collapse"](data) if "collapse" in field.metadata else data
    return out


def _is_default(field: dataclasses.Field[Any], item: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(item == field.default)
    return field.default_factory is not dataclasses.MISSING and bool(item == field.default_factory())


def _out(item: Any, hint: Any) -> Any:
    """Plain data of one item; its annotation decides whether 1 is written as 1 or 1.0, so that digests are stable."""
    if dataclasses.is_dataclass(item):
        return _fields_out(item)
    if isinstance(item, Mapping):
        return {str(key): _out(entry, Any) for key, entry in item.items()}
    if isinstance(item, (tuple, list)):
        args = typing.get_args(next((h for h in _members(hint) if typing.get_origin(h) is tuple), tuple[Any, ...]))
        inner = [args[0]] * len(item) if len(args) == 2 and args[1] is Ellipsis else list(args)
        return [_out(entry, each) for entry, each in zip(item, inner, strict=True)]
    item = _scalar(item)
    if isinstance(item, int) and not isinstance(item, bool) and float in _members(hint) and int not in _members(hint):
        return float(item)
    return item


def _plain(value: Any) -> Any:
    return to_dict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else _out(value, Any)


def _scalar(item: Any) -> Any:
    if hasattr(item, "tolist"):  # numpy scalar or array
        item = item.tolist()
    if item is None or isinstance(item, (bool, int, float, str, list)):
        return item
    if isinstance(item, Path):
        return str(item)
    raise TypeError(f"{item!r} has no JSON form")


# Plain data -> dataclass --------------------------------------------------------------------------------------------


def from_dict(cls: type[T], data: Any, where: str = "") -> T:
    """The dataclass that plain JSON data describes.

    Parameters
    ----------
    cls
        Dataclass; nested dataclasses, tuples, optionals, literals and unions of dataclasses are followed. If it has a
        ``SCHEMA``, `data` must carry that as ``schema``.
    data
        JSON object.
    where
        File name (or other origin) that starts every error message.

    Raises
    ------
    ValueError
        ``<where>: <key>: ...`` for an unknown or missing key, a wrong type, or a value that `cls` refuses.
    """
    try:
        schema = getattr(cls, "SCHEMA", None)
        if schema and isinstance(data, Mapping):
            if "schema" not in data:
                raise ValueError(f"schema: missing, expected {schema!r}")
            if data["schema"] != schema:
                raise ValueError(f"schema: {data['schema']!r} is not {schema!r}")
        result: T = _object_in(cls, data, "")
        return result
    except ValueError as error:
        raise ValueError(join(where, str(error), ": ")) from None


def join(path: str, message: str, glue: str = "") -> str:
    """`message`, which may itself start with a key, behind `path`: ``nodes[2].link`` + ``alpha_s: -1 ...``."""
    if not path:
        return message
    starts_with_key = re.match(r"[A-Za-z_]\w*(\[\d+\])*(\.\w+(\[\d+\])*)*: ", message)
    return path + (glue or ("." if starts_with_key else ": ")) + message


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """``a, b, c; did you mean 'b'?`` for an error message about `name`; long lists are cut to a dozen."""
    names = list(allowed)
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    close = difflib.get_close_matches(str(name), names, n=1)
    return (shown or "(none)") + (f"; did you mean {close[0]!r}?" if close else "")


def _object_in(cls: Any, data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(join(path, f"expected an object for {cls.__name__}, got {_describe(data)}"))
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    extra = {"schema"} if hasattr(cls, "SCHEMA") else set()
    for key in data:
        if key not in fields and key not in extra:
            raise ValueError(join(path, f"key {key!r} is not among the keys: {did_you_mean(key, fields)}"))
    values = {}
    hints = _hints(cls)
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ValueError(join(path, f"{name}: missing, expected {_expected(hints[name])}"))
            continue
        item, place = data[name], f"{path}.{name}" if path else name
        if "expand" in field.metadata:
            try:
                item = field.metadata["expand"](item)
            except ValueError as error:
                raise ValueError(join(place, str(error))) from None
        values[name] = _in(hints[name], item, place)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(join(path, str(error))) from None


def _in(hint: Any, data: Any, path: str) -> Any:
    """`data` as a value of the annotated type `hint`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if origin in (Union, types.UnionType):
        return _union_in(hint, data, path)
    if origin is Literal:
        if data not in args:
            raise ValueError(f"{path}: {data!r} is not among {did_you_mean(data, [str(arg) for arg in args])}")
        return data
    if origin is tuple:
        return _tuple_in(hint, data, path)
    if dataclasses.is_dataclass(hint):
        return _object_in(hint, data, path)
    return _scalar_in(hint, data, path)


def _union_in(hint: Any, data: Any, path: str) -> Any:
    members = _members(hint)
    if data is None and type(None) in members:
        return None
    members = [member for member in members if member is not type(None)]
    if len(members) == 1:
        return _in(members[0], data, path)
    if isinstance(data, Mapping):
        for member in members:
            if dataclasses.is_dataclass(member) and _has_shape(member, data):
                return _object_in(member, data, path)
    for member in members:
        if isinstance(member, type) and not dataclasses.is_dataclass(member) and type(data) is member:
            return data
    for member in members:
        if not dataclasses.is_dataclass(member):
            try:
                return _in(member, data, path)
            except ValueError:
                continue
    raise ValueError(f"{path}: {_describe(data)} is not {_expected(hint)}")


def _has_shape(cls: Any, data: Mapping[str, Any]) -> bool:
    fields = [field for field in dataclasses.fields(cls) if field.init]
    required = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    return required <= set(data) <= {field.name for field in fields}


def _tuple_in(hint: Any, data: Any, path: str) -> tuple[Any, ...]:
    args = typing.get_args(hint)
    if isinstance(data, Mapping) and typing.get_origin(args[0]) is tuple:  # an object for pairs of key and value
        key_hint = typing.get_args(args[0])[0]
        data = [[_key_in(key_hint, key, path), item] for key, item in data.items()]
    if not isinstance(data, (list, tuple)):
        raise ValueError(f"{path}: expected {_expected(hint)}, got {_describe(data)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple([_in(args[0], item, f"{path}[{i}]") for i, item in enumerate(data)])
    if len(data) != len(args):
        raise ValueError(f"{path}: expected {_expected(hint)}, got {_describe(data)}")
    return tuple([_in(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, data))])


def _key_in(hint: Any, key: Any, path: str) -> Any:
    if hint is not int:
        return str(key)
    try:
        return int(key)
    except ValueError:
        raise ValueError(f"{path}: key {key!r} is not a whole number") from None


def _scalar_in(hint: Any, data: Any, path: str) -> Any:
    number = isinstance(data, (int, float)) and not isinstance(data, bool)
    if number and not math.isfinite(data):
        raise ValueError(f"{path}: {data} is not a finite number")
    if hint is float and number:
        return float(data)
    if hint is int and number and data == int(data):
        return int(data)
    if hint in (str, bool) and isinstance(data, hint):
        return data
    raise ValueError(f"{path}: expected {_expected(hint)}, got {_describe(data)}")


def _expected(hint: Any) -> str:
    """An annotation in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in words:
        return words[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(member) for member in _members(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return f"a list, each entry {_expected(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: " + ", ".join(_expected(arg) for arg in args)
    return f"an object ({hint.__name__})"


def _describe(data: Any) -> str:
    if data is None:
        return "null"
    if isinstance(data, Mapping):
        return "an object with keys " + ", ".join(map(str, list(data)[:6])) if data else "an empty object"
    if isinstance(data, (list, tuple)):
        return f"a list of {len(data)}"
    if isinstance(data, bool):
        return str(data).lower()
    return f"text {data[:60]!r}" if isinstance(data, str) else repr(data)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _members(hint: Any) -> list[Any]:
    return list(typing.get_args(hint)) if typing.get_origin(hint) in (Union, types.UnionType) else [hint]


# Derived values of frozen dataclasses -------------------------------------------------------------------------------


def cached(method: Callable[P, T]) -> Callable[P, T]:
    """Method of a frozen dataclass whose results are kept in the value's own ``_cache`` dict, per arguments.

    Unlike ``functools.lru_cache`` it needs no hash of the value, which for a thousand nodes costs more than the answer.
    """

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        cache: dict[Any, Any] = args[0]._cache  # type: ignore[attr-defined]
        key = (method.__name__, args[1:], tuple(kwargs.items()))
        if key not in cache:
            cache[key] = method(*args, **kwargs)
        result: T = cache[key]
        return result

    return wrapper
