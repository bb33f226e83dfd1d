"""Records to and from JSON: the only wire and file format (nothing is ever unpickled).

A record may hold ``int float str bool None``, tuples, frozen sets, ``dict[str, T]``, enums, nested dataclasses, named
tuples (lists in JSON) and optional values. ``Annotated[T, check]`` is a ``T`` that ``check.check`` accepts (see
``inputs.Between``). Unknown fields, missing fields, wrong types and numbers out of range raise ``ValueError``, so that
a malformed message is refused as a whole. A ``TypedDict`` is the exception: only the fields that it names are checked,
and unknown ones are kept.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")
_SHOWN = 5
"""The largest number of wrong fields that an error names."""


_PLAIN = frozenset((str, int, float, bool, type(None)))


def to_jsonable(value: Any) -> Any:
    """Return ``value`` as plain dicts, lists and scalars."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if (names := _names(kind)) is not None:
        return {name: to_jsonable(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return list(value) if _PLAIN.issuperset(map(type, value)) else [to_jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(to_jsonable(item) for item in value)
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    return value


@functools.cache
def _names(cls: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None: ``cls`` is no dataclass.

    Cached, since a large plan has tens of thousands of records of a few kinds.
    """
    return tuple(one.name for one in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None


def to_json(value: Any) -> str:
    """Return canonical JSON (sorted keys, no spaces): equal records give equal text, so it can be hashed."""
    return _canonical(value)


def _one_level(value: Any) -> Any:
    """Return ``value`` as something that JSON has; the encoder calls this again for what is inside."""
    kind: Any = type(value)
    if (names := _names(kind)) is not None:
        return {name: getattr(value, name) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(to_jsonable(item) for item in value)
    raise TypeError(f"a {type(value).__name__} is nothing that a record may hold")


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_one_level).encode


def from_json(cls: type[T], text: str | bytes) -> T:
    """Parse ``text`` and check it against the annotations of the dataclass ``cls``.

    Raises:
        ValueError: ``text`` is not JSON, or not a ``cls``.
    """
    found: T = from_jsonable(cls, parsed(text))
    return found


def parsed(text: str | bytes) -> Any:
    """Return the parsed JSON ``text``. Raises ValueError, also if lists or objects are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


_Reader = Callable[[Any], Any]


def from_jsonable(kind: Any, value: Any) -> Any:
    """Return ``value`` (as parsed by ``json``) as an instance of the annotation ``kind``. Raises ValueError."""
    return _reader(kind)(value)


def _reader(kind: Any) -> _Reader:
    """Return what reads a value as ``kind``."""
    if dataclasses.is_dataclass(kind):
        return functools.partial(_record, kind)
    if typing.is_typeddict(kind):
        return functools.partial(_typed_dict, kind)
    if of_kind := _GENERIC.get(typing.get_origin(kind)):
        return of_kind(kind)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return functools.partial(_named_tuple, kind)
    return functools.partial(_scalar, kind)


@functools.cache
def _readers(cls: type) -> dict[str, _Reader]:
    """Return the reader of each field. Cached, since a journal has a million lines of a few kinds."""
    return {name: _reader(kind) for name, kind in _hints(cls).items()}


def _scalar(kind: Any, value: Any) -> Any:
    if kind is Any or type(value) is kind:
        return value
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    kind = getattr(kind, "__supertype__", kind)  # NewType
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("a whole number is longer than a float can be") from None
    if kind is int and isinstance(value, bool):
        raise ValueError(f"expected int, found {value!r}")
    return _expect(kind, value, kind)


def _expect(kind: type, value: Any, shown: Any) -> Any:
    if not isinstance(value, kind):
        name = getattr(shown, "__name__", shown)
        raise ValueError(f"expected {name}, found {_short(value)}")
    return value


def _short(value: Any) -> str:
    """Return ``value`` for a message; of a list or object only its kind and length, as it may be long or deep."""
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return repr(value)[:80] if not isinstance(value, int) or abs(value) < 2**63 else "a longer number"


def _record(cls: Any, value: Any) -> Any:
    _expect(dict, value, cls.__name__)
    fields = dataclasses.fields(cls)
    unknown = set(value) - {f.name for f in fields}
    if unknown:
        raise ValueError(f"{cls.__name__}: unknown field(s) {sorted(unknown)[:_SHOWN]}")
    missing = [f.name for f in fields if f.name not in value and _is_required(f)]
    if missing:
        raise ValueError(f"{cls.__name__}: field(s) {missing[:_SHOWN]} are missing")
    try:
        return cls(**{name: _field(cls, name, one) for name, one in value.items()})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _typed_dict(cls: Any, value: Any) -> Any:
    _expect(dict, value, cls.__name__)
    missing = cls.__required_keys__ - set(value)
    if missing:
        raise ValueError(f"field(s) {sorted(missing)[:_SHOWN]} are missing")
    readers = _readers(cls)
    return {name: _field(cls, name, one) if name in readers else one for name, one in value.items()}


def _field(cls: type, name: str, value: Any) -> Any:
    """Return the value of a field. Raises ValueError with the field's name."""
    try:
        return _readers(cls)[name](value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _named_tuple(cls: Any, value: Any) -> Any:
    return cls(*_items(_readers(cls).values(), _expect(list, value, cls)))


def _items(readers: Collection[_Reader], value: list[Any]) -> list[Any]:
    if len(readers) != len(value):
        raise ValueError(f"expected {len(readers)} items, found {len(value)}")
    return [read(item) for read, item in zip(readers, value, strict=True)]


def _union(kind: Any) -> _Reader:
    options = typing.get_args(kind)
    readers = [_reader(option) for option in options if option is not type(None)]

    def read(value: Any) -> Any:
        if value is None and type(None) in options:
            return None
        failures = []
        for one in readers:
            try:
                return one(value)
            except ValueError as error:
                failures.append(str(error))
        raise ValueError("; ".join(failures) or f"expected {kind}, found {_short(value)}")

    return read


def _tuple(kind: Any) -> _Reader:
    args = typing.get_args(kind)
    readers = [_reader(item) for item in args if item is not Ellipsis]
    if len(args) == 2 and args[1] is Ellipsis:
        return lambda value: tuple(map(readers[0], _expect(list, value, kind)))
    return lambda value: tuple(_items(readers, _expect(list, value, kind)))


def _annotated(kind: Any) -> _Reader:
    inner, *checks = typing.get_args(kind)
    read_inner, checkers = _reader(inner), [one.check for one in checks]

    def read(value: Any) -> Any:
        value = read_inner(value)
        for check in checkers:
            check(value)
        return value

    return read


def _frozenset(kind: Any) -> _Reader:
    (item,) = map(_reader, typing.get_args(kind))
    return lambda value: frozenset(map(item, _expect(list, value, kind)))


def _dict(kind: Any) -> _Reader:
    _, item = map(_reader, typing.get_args(kind))
    return lambda value: {key: item(one) for key, one in _expect(dict, value, kind).items()}


_GENERIC: dict[Any, Callable[[Any], _Reader]] = {
    typing.Annotated: _annotated,
    typing.Union: _union,
    types.UnionType: _union,
    tuple: _tuple,
    frozenset: _frozenset,
    dict: _dict,
}
"""What makes the reader of each annotation with brackets, by its origin (``typing.get_origin``)."""
