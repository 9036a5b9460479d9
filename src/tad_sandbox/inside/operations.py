"""What one process does for the other with an object that it owns: the operators, and what stands behind them."""

from __future__ import annotations

import builtins
import math
import operator
import os

from tad_sandbox.inside.values import refresh

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

IMMUTABLE: tuple[Any, ...] = (int, float, str, bytes, tuple, frozenset, complex)
MUTABLE: tuple[Any, ...] = (list, dict, set, bytearray)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
    *("and", "or", "xor", "lshift", "rshift"),
)
UNARY = (
    *("neg", "pos", "invert", "abs", "round", "trunc", "floor", "ceil"),
    *("int", "float", "complex", "index"),
)
# What makes a subclass of a plain type more than its plain value: then it stays with its owner.
MEANINGFUL = (
    *(f"__{name}__" for name in (*COMPARISONS, *BINARY, *UNARY)),
    *(f"__r{name}__" for name in BINARY),
    *("__getitem__", "__contains__", "__iter__", "__len__", "__bool__", "__call__"),
)


def plain_part(value: Any) -> Any:
    """The plain value inside an instance of a subclass, past whatever the subclass overrides."""
    for base in (*IMMUTABLE, *MUTABLE):
        if isinstance(value, base):
            if base is dict:
                return {key: dict.__getitem__(value, key) for key in dict.keys(value)}
            if base in (set, frozenset):
                return base(base.__iter__(value))
            if base is bytearray:
                return bytearray(bytes(value))
            if base in (str, bytes, tuple, list):
                return base.__getitem__(value, slice(None))
            return base.__pos__(value)  # a number
    raise TypeError("no plain value")


def _run(awaitable: Any) -> Any:
    import asyncio

    if not hasattr(_run, "loop"):
        _run.loop = asyncio.new_event_loop()  # type: ignore[attr-defined]
        asyncio.set_event_loop(_run.loop)  # type: ignore[attr-defined]

    async def wait() -> Any:
        return await awaitable

    return _run.loop.run_until_complete(wait())  # type: ignore[attr-defined]


def _exit(manager: Any, error: Any) -> bool:
    return bool(type(manager).__exit__(manager, type(error) if error is not None else None, error, None))


def _aexit(manager: Any, error: Any) -> bool:
    leaving = type(manager).__aexit__(manager, type(error) if error is not None else None, error, None)
    return bool(_run(leaving))


def _copy(value: Any) -> Any:
    import copy

    return copy.copy(value)


def _deepcopy(value: Any) -> Any:
    import copy

    return copy.deepcopy(value)


def _assign(owner: Any, name: str, value: Any) -> None:
    now = getattr(owner, name)
    if refresh(now, value) is not now:
        setattr(owner, name, value)


def _super(derived: type, instance: Any, name: str) -> Any:
    return getattr(super(derived, instance), name)


def _derive(name: str, bases: tuple, space: dict) -> type:
    def method(function: Any) -> Any:
        return lambda *args, **options: function(*args, **options)  # a proxy binds to no instance

    return type(
        name, bases, {key: method(value) if callable(value) else value for key, value in space.items()}
    )


# What one side does for the other with the first operand, which it owns.
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in COMPARISONS},
    **{name: getattr(operator, f"__{name}__") for name in BINARY if name != "divmod"},
    **{f"i{name}": getattr(operator, f"__i{name}__") for name in BINARY if name != "divmod"},
    **{
        name: getattr(operator, name)
        for name in ("neg", "pos", "invert", "index", "getitem", "setitem", "delitem")
    },
    **{
        name: getattr(builtins, name)
        for name in ("divmod", "abs", "round", "int", "float", "complex", "len", "iter")
    },
    **{
        name: getattr(builtins, name)
        for name in ("next", "reversed", "str", "repr", "hash", "bool", "bytes", "dir")
    },
    **{
        name: getattr(builtins, name)
        for name in ("format", "isinstance", "issubclass", "setattr", "delattr", "aiter")
    },
    **{name: getattr(math, name) for name in ("trunc", "floor", "ceil")},
    "attr": getattr,
    "contains": operator.contains,
    "fspath": os.fspath,
    "plain": plain_part,
    "copy": _copy,
    "deepcopy": _deepcopy,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": _exit,
    "await": _run,
    "aenter": lambda manager: _run(type(manager).__aenter__(manager)),
    "aexit": _aexit,
    "anext": lambda iterator: _run(type(iterator).__anext__(iterator)),
}


# What only the program's side does.
PROGRAM_OPERATIONS: dict[str, Callable[..., Any]] = {"assign": _assign, "derive": _derive, "super": _super}
