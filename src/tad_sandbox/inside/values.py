"""The closed encoding of values: what comes back from a program, and nothing else.

Plain values are written in JSON and rebuilt from their parts; only exact types count, a subclass is no plain value. In JSON
a list is always `[tag, ...]`. What is not plain is handed to `export` when it is written, which gives a tag of its own or
raises, and to `resolve` when it is read. Reading executes nothing, imports nothing but five modules of the standard
library and numpy, and raises `Malformed` for whatever is not written as `encode` writes it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Export = Callable[[Any], list]
    Resolve = Callable[[list], Any]

_SCALARS = frozenset({type(None), bool, str, float})
_SEQUENCES: dict[Any, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
_BUILDERS: dict[str, Callable[[Iterable], Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset}
_VIEWS = {"dict_keys": "k", "dict_values": "v", "dict_items": "a"}
_EXACT = 1 << 53  # beyond this an integer is written in base 16: reading it then takes linear time
_FACTORIES = {"list": list, "int": int, "dict": dict, "set": set, "str": str, "float": float, "tuple": tuple}
_ARRAYS = ("|b1", "<i8", "<f8", "<c16")  # narrower numbers overflow where the tests' own do not

# Types of the standard library that are values: their module, their parts, and the types that the parts must have.
_REBUILT: dict[str, tuple[str, Callable[[Any], tuple], str]] = {
    "OrderedDict": ("collections", lambda v: (dict(v),), "dict"),
    "Counter": ("collections", lambda v: (dict(v),), "dict"),
    "deque": ("collections", lambda v: (list(v), v.maxlen), "list NoneType/int"),
    "Decimal": ("decimal", lambda v: (str(v),), "str"),
    "Fraction": ("fractions", lambda v: (v.numerator, v.denominator), "int int"),
    "date": ("datetime", lambda v: (v.year, v.month, v.day), "int int int"),
    "time": (
        "datetime",
        lambda v: (v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
        "int int int int NoneType/timezone",
    ),
    "datetime": (
        "datetime",
        lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
        "int int int int int int int NoneType/timezone",
    ),
    "timedelta": ("datetime", lambda v: (v.days, v.seconds, v.microseconds), "int int int"),
    "timezone": ("datetime", lambda v: (v.utcoffset(None),), "timedelta"),
}


class Malformed(Exception):  # noqa: N818
    """Not written as `encode` writes it."""


class NotPlain(Exception):  # noqa: N818
    """No plain value, where only one can stand."""


def encode(value: Any, export: Export) -> Any:
    """What `json` can write; `export` is asked about everything that is not plain."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else ["i", hex(value)]
    if kind is list or kind is tuple:
        return [_SEQUENCES[kind], *[encode(item, export) for item in value]]
    try:
        if kind is set or kind is frozenset:
            return [_SEQUENCES[kind], *[encode(item, _refuse) for item in value]]
        if kind is dict:
            return ["d", *_pairs(value, export)]
        if kind is bytes or kind is bytearray:
            return ["b" if kind is bytes else "B", value.decode("latin-1")]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is range:
            return ["r", *[encode(part, export) for part in (value.start, value.stop, value.step)]]
        module, name = kind.__module__, kind.__name__
        if name in _VIEWS and module == "builtins":
            return [
                _VIEWS[name],
                *[encode(item, _refuse if name != "dict_values" else export) for item in value],
            ]
        if name in _REBUILT and _REBUILT[name][0] == module and _is_own(kind):
            return ["R", name, *[encode(part, export) for part in _REBUILT[name][1](value)]]
        if name == "defaultdict" and module == "collections" and _is_own(kind):
            made = getattr(value.default_factory, "__name__", None)
            if value.default_factory is _FACTORIES.get(str(made)):
                return ["D", made, *_pairs(value, export)]
        if (numpy := sys.modules.get("numpy")) is not None:
            number = issubclass(kind, numpy.generic) and kind not in (numpy.datetime64, numpy.timedelta64)
            if number and type(plain := value.item()) is not kind:
                return encode(plain, export)  # as Python's own number
            if kind is numpy.ndarray and value.dtype.str in _ARRAYS and value.size:
                return ["n", value.dtype.str, value.tobytes().decode("latin-1"), *value.shape]
    except NotPlain:
        if export is _refuse:
            raise
    return export(value)


def _pairs(value: Any, export: Export) -> list:
    pairs: list[Any] = []
    for key, item in value.items():
        pairs += (encode(key, _refuse), encode(item, export))
    return pairs


def _is_own(kind: type) -> bool:
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind


def _refuse(value: Any) -> Any:
    raise NotPlain


def decode(data: Any, resolve: Resolve) -> Any:
    """The value written as `data`; `resolve` is asked about tags that are not of this module."""
    try:
        return _decode(data, resolve)
    except Malformed:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise Malformed(str(error)[:100]) from None
    except (MemoryError, ImportError):
        raise Malformed("too large") from None


def _decode(data: Any, resolve: Resolve) -> Any:
    kind = type(data)
    if kind is not list:
        if kind is dict:
            raise Malformed("an object")
        return data
    tag, parts = data[0], data[1:]
    if tag == "l":
        return [_decode(part, resolve) for part in parts]
    if tag == "t":
        return tuple([_decode(part, resolve) for part in parts])
    if tag == "s" or tag == "f":
        return _BUILDERS[tag]([_decode(part, _reject) for part in parts])
    if tag == "d":
        return _read_pairs(parts, resolve)
    if tag == "n":
        return _read_array(*parts)
    if tag == "R" and parts[0] in _REBUILT:
        return _rebuild(parts[0], [_decode(part, resolve) for part in parts[1:]])
    if tag == "D":
        factory = None if parts[0] is None else _FACTORIES[parts[0]]
        return __import__("collections").defaultdict(factory, _read_pairs(parts[1:], resolve))
    if tag == "k":
        return dict.fromkeys([_decode(part, _reject) for part in parts]).keys()
    if tag == "v":
        return dict(enumerate([_decode(part, resolve) for part in parts])).values()
    if tag == "a":
        return dict([_decode(part, _reject) for part in parts]).items()
    if tag == "r":
        return range(*[_exactly(int, _decode(part, _reject)) for part in parts])
    if tag == "c":
        real, imaginary = parts
        return complex(_exactly(float, real), _exactly(float, imaginary))
    if tag in ("i", "b", "B"):
        (text,) = parts
        if tag == "i":
            return int(_exactly(str, text), 16)
        return (bytes if tag == "b" else bytearray)(_exactly(str, text).encode("latin-1"))
    if type(tag) is not str:
        raise Malformed("a tag")
    return resolve(data)


def _read_pairs(parts: list, resolve: Resolve) -> dict:
    keys = [_decode(part, _reject) for part in parts[::2]]
    return dict(zip(keys, [_decode(part, resolve) for part in parts[1::2]], strict=True))


def _read_array(kind: Any, text: Any, *shape: Any) -> Any:
    if kind not in _ARRAYS or any(type(length) is not int or length < 1 for length in shape):
        raise Malformed("an array")
    numpy = __import__("numpy")
    return numpy.frombuffer(text.encode("latin-1"), dtype=kind).reshape(shape).copy()


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise Malformed(f"no {kind.__name__}")
    return value


def _reject(data: list) -> Any:
    raise Malformed("a reference inside a set or a key")


def _rebuild(name: str, parts: list) -> Any:
    module, _, kinds = _REBUILT[name]
    for part, allowed in zip(parts, kinds.split(), strict=True):
        if type(part).__name__ not in allowed.split("/"):
            raise Malformed(f"a part of {name}")
    return getattr(__import__(module), name)(*parts)


def refresh(old: Any, new: Any) -> Any:
    """`new`, but with the identity of `old` where a mutable container of the same type stands in both."""
    kind = type(old)
    if kind is not type(new):
        return new
    if kind is list:
        old[:] = [refresh(*pair) for pair in zip(old, new)] + new[len(old) :]  # noqa: B905 (lengths differ)
    elif kind is dict or kind.__name__ in ("OrderedDict", "Counter", "defaultdict"):
        merged = {key: refresh(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(merged)
    elif kind is set:
        old.clear()
        old.update(new)
    elif kind is bytearray:
        old[:] = new
    elif kind.__name__ == "deque":
        old.clear()
        old.extend(new)
    elif kind is tuple and len(old) == len(new):
        parts = tuple(refresh(*pair) for pair in zip(old, new, strict=True))
        return old if all(a is b for a, b in zip(parts, old, strict=True)) else parts
    elif kind.__name__ == "ndarray" and old.shape == new.shape and old.dtype == new.dtype:
        old[...] = new
    else:
        return new
    return old
