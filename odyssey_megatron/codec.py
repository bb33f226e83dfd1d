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
from collections.abc import Callable
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


def from_jsonable(kind: Any, value: Any) -> Any:
    """Return ``value`` (as parsed by ``json``) as an instance of the annotation ``kind``. Raises ValueError."""
    if dataclasses.is_dataclass(kind):
        return _record(kind, value)
    if typing.is_typeddict(kind):
        return _typed_dict(kind, value)
    if read := _GENERIC.get(typing.get_origin(kind)):
        return read(kind, value)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*_tuple(tuple[tuple(_hints(kind).values())], value))  # type: ignore[misc]
    return _scalar(kind, value)


def _scalar(kind: Any, value: Any) -> Any:
    if kind is Any:
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
    hints = _hints(cls)
    fields = dataclasses.fields(cls)
    unknown = set(value) - {f.name for f in fields}
    if unknown:
        raise ValueError(f"{cls.__name__}: unknown field(s) {sorted(unknown)[:_SHOWN]}")
    missing = [f.name for f in fields if f.name not in value and _is_required(f)]
    if missing:
        raise ValueError(f"{cls.__name__}: field(s) {missing[:_SHOWN]} are missing")
    try:
        return cls(**{name: _field(cls, hints, name, one) for name, one in value.items()})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _typed_dict(cls: Any, value: Any) -> Any:
    _expect(dict, value, cls.__name__)
    missing = cls.__required_keys__ - set(value)
    if missing:
        raise ValueError(f"field(s) {sorted(missing)[:_SHOWN]} are missing")
    hints = _hints(cls)
    return {name: _field(cls, hints, name, one) if name in hints else one for name, one in value.items()}


def _field(cls: Any, hints: dict[str, Any], name: str, value: Any) -> Any:
    """Return the value of a field. Raises ValueError with the field's name."""
    try:
        return from_jsonable(hints[name], value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _union(kind: Any, value: Any) -> Any:
    failures = []
    for option in typing.get_args(kind):
        if option is type(None):
            if value is None:
                return None
            continue
        try:
            return from_jsonable(option, value)
        except ValueError as error:
            failures.append(str(error))
    raise ValueError("; ".join(failures) or f"expected {kind}, found {_short(value)}")


def _tuple(kind: Any, value: Any) -> Any:
    _expect(list, value, kind)
    args = typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(from_jsonable(args[0], one) for one in value)
    if len(args) != len(value):
        raise ValueError(f"expected {len(args)} items, found {len(value)}")
    return tuple(from_jsonable(item, one) for item, one in zip(args, value, strict=True))


def _annotated(kind: Any, value: Any) -> Any:
    inner, *checks = typing.get_args(kind)
    value = from_jsonable(inner, value)
    for one in checks:
        one.check(value)
    return value


def _frozenset(kind: Any, value: Any) -> Any:
    (item,) = typing.get_args(kind)
    return frozenset(from_jsonable(item, one) for one in _expect(list, value, kind))


def _dict(kind: Any, value: Any) -> Any:
    _, item = typing.get_args(kind)
    return {key: from_jsonable(item, one) for key, one in _expect(dict, value, kind).items()}


_GENERIC: dict[Any, Callable[[Any, Any], Any]] = {
    typing.Annotated: _annotated,
    typing.Union: _union,
    types.UnionType: _union,
    tuple: _tuple,
    frozenset: _frozenset,
    dict: _dict,
}
"""The reader of each annotation with brackets, by its origin (``typing.get_origin``)."""
