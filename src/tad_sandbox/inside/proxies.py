"""Objects of the other process, and what of them is believed.

Operations on a proxy are carried out by the owner of the object. One side is trusted: the tests'. It gives the verdict, so
it believes nothing that the program says about the tests' own values:

- a proxy never equals a plain value, and is never ordered against one; a subclass of a plain type compares by the plain
  value inside it, whatever its `__eq__` says;
- an operator between a proxy and a plain value gives an object again, never a number, and what it gives has no truth
  value and turns into no number (`abs(f(x) - expected) < 1e-6` is otherwise the program's to answer);
- `expected in f(x)` goes through the items, and `f(x).startswith(expected)` needs a string, unless the tests name a class
  of the program, whose operators are then what they test;
- a context manager of the program does not swallow a failed assertion.

Equality of two objects of the program is the program's own word: that is what such a test asks for.
"""

from __future__ import annotations

import sys
import types

from tad_sandbox.inside.operations import BINARY, COMPARISONS, OPERATIONS, UNARY
from tad_sandbox.inside.values import BUILTIN_TYPES

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tad_sandbox.inside.peer import Peer

_SPECIAL_TYPES = {
    "generator": types.GeneratorType,
    "coroutine": types.CoroutineType,
    "async_generator": types.AsyncGeneratorType,
}
_PREDICATES = frozenset({"startswith", "endswith", "issubset", "issuperset", "isdisjoint"})


class Mark:
    """What a proxy stands for."""

    __slots__ = ("kind", "name", "number", "peer", "plain", "tainted")

    def __init__(self, peer: Peer, number: int, kind: str, name: str, plain: Any) -> None:
        self.peer, self.number, self.kind, self.name, self.plain = peer, number, kind, name, plain
        self.tainted = False  # made from one of the tests' plain values: gives no number and no truth


def is_proxy(value: object) -> bool:
    return issubclass(type(value), (Proxy, Valued))


class Proxy:
    """An object of the other process."""

    __slots__ = ("_tad_",)
    _tad_: Mark

    def __getattr__(self, name: str) -> Any:
        if name == "_tad_":  # a copy that is not yet filled
            raise AttributeError(name)
        peer = self._tad_.peer
        if peer.trusted and name in _PREDICATES and not peer.tests_classes:
            raise AttributeError(
                f"{self._tad_.name!r} object has no attribute {name!r} that the tests can believe"
            )
        return peer.lend(self, name, peer.request("attr", self, name))

    def __setattr__(self, name: str, value: object) -> None:
        self._tad_.peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._tad_.peer.request("delattr", self, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        mark = self._tad_
        if mark.kind == "b":
            return BUILTIN_TYPES[mark.plain]
        if mark.name in _SPECIAL_TYPES:
            return _SPECIAL_TYPES[mark.name]
        return mark.peer.request("attr", self, "__class__") if mark.kind == "o" else type(self)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        swallow = self._tad_.peer.request("exit", self, error)
        return bool(swallow) and isinstance(error, Exception) and not isinstance(error, AssertionError)

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool:
        swallow = self._tad_.peer.request("aexit", self, error)
        return bool(swallow) and isinstance(error, Exception) and not isinstance(error, AssertionError)

    async def __aenter__(self) -> Any:
        return self._tad_.peer.request("aenter", self)

    async def __anext__(self) -> Any:
        return self._tad_.peer.request("anext", self)

    def __contains__(self, item: object) -> bool:
        peer = self._tad_.peer
        if not peer.trusted or peer.tests_classes or is_proxy(item):
            return bool(peer.request("contains", self, item))
        return any(item is other or item == other for other in iter(self))

    def __copy__(self) -> Any:
        return self._tad_.peer.request("copy", self)

    def __deepcopy__(self, memo: object) -> Any:
        return self._tad_.peer.request("deepcopy", self)


class CallableProxy(Proxy):
    __slots__ = ()

    def __call__(self, *args: object, **options: object) -> Any:
        return self._tad_.peer.call(self, args, options)


class ClassProxy(CallableProxy):
    __slots__ = ()

    def __instancecheck__(self, value: object) -> bool:
        return bool(self._tad_.peer.request("isinstance", value, self))

    def __subclasscheck__(self, value: object) -> bool:
        return bool(self._tad_.peer.request("issubclass", value, self))

    def __mro_entries__(self, bases: tuple) -> tuple:
        """The tests derive a class: it is made in the program's process, and its methods call back."""

        class Deriving(type):
            def __new__(cls, name: str, made: tuple, space: dict) -> Any:
                if not made:
                    return super().__new__(cls, name, made, space)
                space = {
                    key: value for key, value in space.items() if key not in ("__module__", "__classcell__")
                }
                derived = self._tad_.peer.request("derive", name, bases, space)
                for value in space.values():
                    if isinstance(value, types.FunctionType):
                        DERIVED[value.__code__] = derived
                return derived

        return (Deriving("Derived", (), {}),)


# The class of the program's side to which a method of the tests belongs.
DERIVED: dict[types.CodeType, ClassProxy] = {}


class Super:
    """`super()` in a method of a class that the tests derive from one of the program's."""

    def __init__(self, derived: ClassProxy, instance: object) -> None:
        object.__getattribute__(self, "__dict__").update(derived=derived, instance=instance)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        return own["derived"]._tad_.peer.request("super", own["derived"], own["instance"], name)


def find_super(*arguments: Any) -> Any:
    """The tests' `super`: it knows the classes whose methods run here and whose instances are there."""
    if arguments:
        return super(*arguments)
    frame = sys._getframe(1)
    instance = frame.f_locals[frame.f_code.co_varnames[0]]
    if frame.f_code in DERIVED:
        return Super(DERIVED[frame.f_code], instance)
    return super(frame.f_locals["__class__"], instance)


class AwaitableProxy(Proxy):
    """A coroutine or future: it runs to its end in its own process when it is awaited."""

    __slots__ = ()

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise StopIteration(self._tad_.peer.request("await", self))

    def send(self, value: object) -> Any:
        return self.__next__()

    def throw(self, kind: Any, error: Any = None, trace: Any = None) -> Any:
        raise kind if error is None else error

    def close(self) -> None:
        pass


class Valued:
    """Mixed into a subclass of a plain type: an immutable value here, its further attributes there."""

    _tad_: Mark

    def __getattr__(self, name: str) -> Any:
        if name == "_tad_":
            raise AttributeError(name)
        return self._tad_.peer.request("attr", self, name)

    def __repr__(self) -> str:
        return str(self._tad_.peer.request("repr", self))

    def __str__(self) -> str:
        return str(self._tad_.peer.request("str", self))


def _compare(name: str) -> Callable[[Proxy, object], Any]:
    def method(self: Proxy, other: object) -> Any:
        mark = self._tad_
        if self is other and name in ("eq", "ne"):
            return name == "eq"
        if not mark.peer.trusted:
            return mark.peer.request(name, self, other)
        theirs = getattr(other, "_tad_", None) if is_proxy(other) else None
        if mark.kind == "b" and (theirs is None or theirs.kind == "b"):
            value = mark.peer.request("plain", other) if theirs is not None else other
            return OPERATIONS[name](mark.peer.request("plain", self), value)
        return mark.peer.request(name, self, other) is True if theirs is not None else NotImplemented

    return method


def _combine(name: str, reflected: bool = False) -> Callable[[Proxy, object], Any]:
    def method(self: Proxy, other: object) -> Any:
        peer = self._tad_.peer
        result = peer.request(name, other, self) if reflected else peer.request(name, self, other)
        if peer.trusted and not is_proxy(other):
            if not isinstance(result, Proxy):
                raise TypeError(
                    f"{self._tad_.name!r} object and a plain value gave {type(result).__name__!r}"
                )
            result._tad_.tainted = True
        return result

    return method


def _apply(name: str) -> Callable[..., Any]:
    def method(self: Proxy, *more: object) -> Any:
        if self._tad_.tainted and (name in UNARY or name == "bool"):
            raise TypeError(f"{name}() of {self._tad_.name!r} that came from a plain value")
        return self._tad_.peer.request(name, self, *more)

    return method


for _name in COMPARISONS:
    setattr(Proxy, f"__{_name}__", _compare(_name))
for _name in BINARY:
    setattr(Proxy, f"__{_name}__", _combine(_name))
    setattr(Proxy, f"__r{_name}__", _combine(_name, reflected=True))
    if _name != "divmod":
        setattr(Proxy, f"__i{_name}__", _combine(f"i{_name}"))
for _name in (
    *UNARY,
    "len",
    "iter",
    "next",
    "reversed",
    "str",
    "repr",
    "hash",
    "bool",
    "bytes",
    "dir",
    "format",
):
    setattr(Proxy, f"__{_name}__", _apply(_name))
for _name in ("fspath", "aiter", "getitem", "setitem", "delitem", "enter"):
    setattr(Proxy, f"__{_name}__", _apply(_name))

KINDS: dict[str, type] = {"o": Proxy, "b": Proxy, "f": CallableProxy, "c": ClassProxy, "a": AwaitableProxy}
