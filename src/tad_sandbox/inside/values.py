"""Which values cross between the program's process and the tests' process, and how they are written in JSON.

Plain values (numbers, text, bytes, the built-in containers, a few types of the standard library) are rebuilt on the other
side from their parts; only exact types count, a subclass is not plain. Anything else is handed to `export`, which
writes a reference. In JSON a list is always `[tag, ...]`, and nothing that arrives is executed, imported by a name that
the other side chose, or unpickled.
"""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Export = Callable[[Any], list]
    Resolve = Callable[[list], Any]

BUILTIN_TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
_NAMES: dict[Any, str] = {value: name for name, value in BUILTIN_TYPES.items()}
_SCALARS = frozenset({type(None), bool, str, float})
_SEQUENCES: dict[Any, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
_BUILDERS: dict[str, Callable[[Iterable], Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset}
_CONSTANTS = {"e": Ellipsis, "n": NotImplemented}
_EXACT = 1 << 53  # beyond this an integer is written in base 16: reading it then takes linear time

# Types of the standard library and numpy that are values: the arguments that build them anew.
_REBUILT: dict[tuple[str, str], Callable[[Any], tuple]] = {
    ("collections", "OrderedDict"): lambda v: (list(v.items()),),
    ("collections", "Counter"): lambda v: (dict(v),),
    ("collections", "defaultdict"): lambda v: (v.default_factory, dict(v)),
    ("collections", "deque"): lambda v: (list(v), v.maxlen),
    ("decimal", "Decimal"): lambda v: (str(v),),
    ("fractions", "Fraction"): lambda v: (v.numerator, v.denominator),
    ("datetime", "date"): lambda v: (v.year, v.month, v.day),
    ("datetime", "time"): lambda v: (v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    ("datetime", "datetime"): lambda v: (
        *(v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond),
        v.tzinfo,
    ),
    ("datetime", "timedelta"): lambda v: (v.days, v.seconds, v.microseconds),
    ("datetime", "timezone"): lambda v: (v.utcoffset(None),),
    ("zoneinfo", "ZoneInfo"): lambda v: (v.key,),
    ("uuid", "UUID"): lambda v: (v.hex,),
    ("pathlib", "PosixPath"): lambda v: (str(v),),
    ("numpy", "ndarray"): lambda v: (v.tobytes(), v.dtype.str, v.shape),
    **{
        ("numpy", name): lambda v: (v.item(),)
        for name in (
            *("bool_", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
}


def encode(value: Any, export: Export) -> Any:
    """What `json` can write; `export` is asked about everything that is not plain."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is int:
        return value if -_EXACT < value < _EXACT else ["i", hex(value)]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *(encode(item, export) for item in value)]
    if kind is dict:
        return ["d", *(encode(part, export) for item in value.items() for part in item)]
    if kind is bytes:
        return ["b", value.decode("latin-1")]
    if kind is bytearray:
        return ["B", value.decode("latin-1")]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is range:
        return ["r", *(encode(part, export) for part in (value.start, value.stop, value.step))]
    if kind is slice:
        return ["S", *(encode(part, export) for part in (value.start, value.stop, value.step))]
    if kind is type and value in _NAMES:
        return ["T", _NAMES[value]]
    for tag, constant in _CONSTANTS.items():
        if value is constant:
            return [tag]
    name = (kind.__module__, kind.__qualname__)
    if (
        name in _REBUILT
        and getattr(sys.modules.get(name[0]), name[1], None) is kind
        and not _holds_objects(value)
    ):
        return ["R", *name, *(encode(part, export) for part in _REBUILT[name](value))]
    return export(value)


def decode(data: Any, resolve: Resolve) -> Any:
    """The value written as `data`; `resolve` is asked about references."""
    if type(data) is not list:
        return data
    tag, parts = data[0], data[1:]
    if tag in _BUILDERS:
        return _BUILDERS[tag](decode(part, resolve) for part in parts)
    if tag == "d":
        values = [decode(part, resolve) for part in parts]
        return dict(zip(values[::2], values[1::2], strict=True))
    if tag == "i":
        return int(parts[0], 16)
    if tag == "b":
        return parts[0].encode("latin-1")
    if tag == "B":
        return bytearray(parts[0].encode("latin-1"))
    if tag == "c":
        return complex(*map(float, parts))
    if tag == "r":
        return range(*(decode(part, resolve) for part in parts))
    if tag == "S":
        return slice(*(decode(part, resolve) for part in parts))
    if tag == "T":
        return BUILTIN_TYPES[parts[0]]
    if tag in _CONSTANTS:
        return _CONSTANTS[tag]
    if tag == "R":
        return _rebuild((parts[0], parts[1]), [decode(part, resolve) for part in parts[2:]])
    return resolve(data)


def refresh(old: Any, new: Any) -> Any:
    """`new`, but with the identity of `old` where a mutable container of the same type stands in both."""
    kind = type(old)
    if kind is not type(new):
        return new
    if kind is list:
        old[:] = [refresh(*pair) for pair in zip(old, new)] + new[len(old) :]  # noqa: B905 (lengths differ)
    elif kind is dict:
        merged = {key: refresh(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(merged)
    elif kind is set or getattr(kind, "__name__", "") in ("OrderedDict", "Counter", "defaultdict"):
        old.clear()
        old.update(new)
    elif kind is bytearray:
        old[:] = new
    elif getattr(kind, "__name__", "") == "deque":
        old.clear()
        old.extend(new)
    elif kind is tuple and len(old) == len(new):
        parts = tuple(refresh(*pair) for pair in zip(old, new, strict=True))
        return old if all(a is b for a, b in zip(parts, old, strict=True)) else parts
    elif getattr(kind, "__name__", "") == "ndarray" and old.shape == new.shape and old.dtype == new.dtype:
        old[...] = new
    else:
        return new
    return old


def _holds_objects(value: Any) -> bool:
    return type(value).__name__ == "ndarray" and value.dtype.hasobject


def _rebuild(name: tuple[str, str], parts: list) -> Any:
    if name not in _REBUILT:
        raise TypeError(f"{name[1]!r} is not a plain type")
    module = __import__(name[0])
    if name == ("numpy", "ndarray"):
        return module.frombuffer(parts[0], dtype=parts[1]).reshape(parts[2]).copy()
    return getattr(module, name[1])(*parts)
