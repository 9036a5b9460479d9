"""The tests' side: what stands for the program, and all that the tests' process believes of the other one.

A question goes to the program's process with plain arguments, a plain value comes back (`values`). For anything else the
tests get a `Handle`: it can be handed back, called, and asked for an attribute or an item, all of which happens in the
program's process. Whatever else a test does with it cannot be judged from here: it raises `CannotJudge`, and the run
does not pass, whether the test lets that through or not. Values have no identity: neither has a handle.
"""

from __future__ import annotations

import _thread
import builtins
import itertools
import os
import sys

from tad_sandbox.inside.channel import Channel, Gone
from tad_sandbox.inside.values import Malformed, decode, encode, refresh

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, NoReturn

    Data = Any  # what `json` reads and writes

WAIT_SECONDS = 1.0
ERRORS = {k: v for k, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException)}
# An iterator of the tests that meets one of these ends quietly.
_ENDINGS = (StopIteration, StopAsyncIteration, GeneratorExit)
_STANDARD_ERRORS = {
    "FrozenInstanceError": "dataclasses",
    "JSONDecodeError": "json.decoder",
    "InvalidOperation": "decimal",
    "DivisionByZero": "decimal",
    "StatisticsError": "statistics",
    "Empty": "queue",
    "Full": "queue",
}
_DESCRIPTIONS = (
    "__name__",
    "__qualname__",
    "__doc__",
    "__module__",
    "__annotations__",
    "__dict__",
    "__wrapped__",
)
# Methods of plain values that see what the tests expect, or answer with a guess: an object must not answer in their place.
_ANSWERS = frozenset(
    name
    for kind in (str, set)
    for name in dir(kind)
    if name.startswith(("is", "find", "rfind", "index", "rindex", "strip", "lstrip", "rstrip", "remove"))
    and name != "remove"
).union(
    ["startswith", "endswith", "count", "replace", "partition", "rpartition", "setdefault"],
    ["difference", "intersection", "symmetric_difference", "union", "is_integer", "is_nan", "is_zero"],
    ["all", "any", "argmax", "argmin", "isclose", "equals", "same_quantum"],
    ["max", "mean", "min", "shape", "std", "sum"],
    ["compare", "compare_signal", "compare_total", "compare_total_mag", "is_relative_to", "samefile"],
)
_MUTABLE = ("list", "dict", "set", "bytearray", "OrderedDict", "Counter", "defaultdict", "deque", "ndarray")


class CannotJudge(BaseException):
    """The tests ask for more than values."""


class Judge:
    """The one conversation with the program's process."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.process = os.getpid()
        self.lock = _thread.allocate_lock()
        self.refused: str | None = None
        """Why the first test that could not be judged could not be; then the run has no other verdict."""
        self.broken: str | None = None
        self.kinds: dict[int, type[BaseException]] = {}
        self.loans: list[tuple[int, Any, Data]] = []
        self.around: Callable[[], dict] = dict
        self.export: Callable[[Any], list] = self.refuse

    def refuse(self, reason: object) -> NoReturn:
        if self.refused is None:
            self.refused = (
                reason if isinstance(reason, str) else f"a {type(reason).__name__!r} is no plain value"
            )
        raise CannotJudge(self.refused)

    def ask(self, operation: str, *operands: object) -> Any:
        """What the program's process answers; mutable operands are left as it left them."""
        data = [self._encode(operand) for operand in operands]
        if not self.lock.acquire(timeout=WAIT_SECONDS):
            self.refuse("the tests call the program from several threads at once")
        try:
            if os.getpid() != self.process:
                self.refuse("the tests call the program from another process")
            if self.broken is not None:
                raise Gone(self.broken)
            failed, value, updates, warned = self._exchange(operation, data)
        finally:
            self.lock.release()
        for number, update in updates:
            refresh(operands[number], update)
        for warning in warned:
            sys.modules["warnings"].warn(warning, stacklevel=3)
        if failed:
            raise value
        return value

    def _exchange(self, operation: str, data: list) -> tuple[bool, Any, list, list]:
        changed, around = self._changed_loans(), self.around()
        self.broken = "a call was interrupted"
        self.channel.send([operation, data, changed, self._encode(around)])
        try:
            reply = self.channel.receive()
        except Gone as error:
            self.broken = str(error) or "stopped answering"
            raise
        try:
            kind, result, updates, printed, warned = reply
            value = decode(result, self._resolve)
            new = [(_number(number), decode(update, self._resolve)) for number, update in updates]
            warnings = [decode(warning, self._resolve) for warning in warned]
            failed = kind != "ok"
            if (
                (failed and not isinstance(value, BaseException))
                or not all(0 <= number < len(data) for number, _ in new)
                or not all(isinstance(warning, Warning) for warning in warnings)
            ):
                raise Malformed("an answer")
            for name, text in zip(around.get("streams", ()), printed):  # noqa: B905
                getattr(sys, name).write("" + text)
        except (Malformed, TypeError, ValueError) as error:
            raise Gone("an answer that cannot be read") from error
        self.broken = None
        return failed, value, new, warnings

    def _encode(self, value: object) -> Data:
        try:
            return encode(value, self.export)
        except RecursionError:
            self.refuse("the tests hand over a value that is nested too deep")

    def _changed_loans(self) -> list:
        """Containers inside the program's objects that the tests have changed since they got them."""
        changed, kept = [], []
        for number, value, before in self.loans:
            if (after := self._encode(value)) != before:
                changed.append([number, after])
            kept.append((number, value, after))
        counts = _count_references(kept)
        self.loans = [loan for loan, count in zip(kept, counts, strict=True) if count > _ALONE + 1]
        return changed

    def _resolve(self, data: list) -> Any:
        tag, parts = data[0], data[1:]
        if tag == "h" or tag == "H":
            return make_handle(Handle if tag == "h" else CallableHandle, *parts)
        if tag == "m":
            number, owner, name, mixed, value = parts
            return Member(_number(number), str(owner), str(name), mixed is True, decode(value, _reject))
        if tag == "L":
            value = decode(parts[1], self._resolve)
            if type(value).__name__ not in _MUTABLE:
                raise Malformed("a loan")
            self.loans.append((_number(parts[0]), value, self._encode(value)))
            return value
        if tag == "g":
            items = self._drain(_number(parts[0]), decode(parts[2], self._resolve))
            return items if parts[1] is True else itertools.chain(items)
        if tag == "A":
            return self._wait(_number(parts[0]))
        if tag == "E":
            return self._read_error(*parts)
        return self._read_kind(data)

    def _drain(self, number: int, batch: Any) -> Generator[Any, Any, None]:
        """The items of an iterator of the program, some at a time; the last batch ends with True."""
        while True:
            if type(batch) is not tuple or len(batch) != 2 or type(batch[0]) is not list:
                self.broken = "an answer that cannot be read"
                raise Gone(self.broken)
            for item in batch[0]:
                if (yield item) is not None:
                    self.refuse("the tests send a value to a generator")
            if batch[1] is True:
                return
            batch = self.ask("next", number)

    async def _wait(self, number: int) -> Any:
        return self.ask("await", number)

    def _read_kind(self, data: Data) -> type[BaseException]:
        """An exception class: Python's own by name, one of the program's as a class of its own."""
        if type(data) is str:
            return ERRORS[data]
        tag, number, name, *bases = data
        if tag != "X" or not bases:
            raise Malformed("a tag")
        module, _, name = str(name).rpartition(".")
        if module and name not in _STANDARD_ERRORS and module.partition(".")[0] in sys.modules:
            self.refuse(f"{module}.{name} of the program is not the tests' own")
        if _number(number) not in self.kinds:
            if name in _STANDARD_ERRORS and _STANDARD_ERRORS[name] in sys.modules:
                kinds: tuple[Any, ...] = (getattr(sys.modules[_STANDARD_ERRORS[name]], name),)
            else:
                kinds = tuple(map(self._read_kind, bases))
            space = {
                "_tad_kind": number,
                "__module__": "solution",
                "__str__": _describe,
                "__getattr__": _ask_error,
            }
            self.kinds[number] = ErrorKind(str(name), kinds, space)  # type: ignore[assignment]
        return self.kinds[number]

    def _read_error(self, number: Any, kind_data: Data, text: Any, args: Data, *chain: Data) -> BaseException:
        error = self._make_error(number, kind_data, text, args)
        if chain:
            cause, context, hidden = chain
            error.__cause__, error.__context__ = decode(cause, self._resolve), decode(context, self._resolve)
            error.__suppress_context__ = hidden is True
        return error

    def _make_error(self, number: Any, kind_data: Data, text: Any, args: Data) -> BaseException:
        kind = self._read_kind(kind_data)
        if issubclass(kind, _ENDINGS):
            return RuntimeError(f"the program raised {kind.__name__}")
        values = decode(args, self._resolve)
        if type(values) is not tuple or type(text) is not str:
            raise Malformed("an error")
        if not isinstance(kind, ErrorKind):
            try:
                return kind(*values)
            except (TypeError, ValueError, AttributeError):
                return RuntimeError(text)
        error = kind.__new__(kind, *values)
        error.__dict__.update(_tad_number=_number(number), _tad_text=text)
        return error


JUDGES: list[Judge] = []  # the one of this process


def _count_references(loans: list) -> list[int]:
    return [sys.getrefcount(value) for _, value, _ in loans]


_ALONE = _count_references([(0, [], None)])[0]  # the list of loans before the last one holds it once more


class Handle:
    """An object of the program.

    `level` is 2 for a class that the tests call by a name with a capital letter, 1 for what a call of it gives, else 0:
    where tests expect a plain value, an object with a `startswith` of its own must not answer for it. What a method of a
    class gives may be such a value.
    """

    __slots__ = ("level", "number")

    def __getattribute__(self, name: str) -> Any:
        level = level_of(self)
        if (name.startswith("__") and name not in _DESCRIPTIONS) or (level < 1 and name in _ANSWERS):
            JUDGES[0].refuse(f"the tests use {name} of an object of the program")
        return raise_level(JUDGES[0].ask("attr", self, name), 2 if level == 2 and name[:1].isupper() else 0)

    def __setattr__(self, name: str, value: object) -> None:
        JUDGES[0].ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        JUDGES[0].ask("delattr", self, name)

    def __getitem__(self, key: object) -> Any:
        return JUDGES[0].ask("item", self, key)

    def __setitem__(self, key: object, value: object) -> None:
        JUDGES[0].ask("setitem", self, key, value)

    def __delitem__(self, key: object) -> None:
        JUDGES[0].ask("delitem", self, key)

    def __instancecheck__(self, value: object) -> bool:
        return _check("isinstance", value, self)

    def __subclasscheck__(self, value: object) -> bool:
        return _check("issubclass", value, self)


class CallableHandle(Handle):
    __slots__ = ()

    def __call__(self, /, *args: object, **options: object) -> Any:
        value = JUDGES[0].ask("call", self, list(options), *args, *options.values())
        return raise_level(value, 1 if level_of(self) == 2 else 0)


number_of: Callable[[Any], int] = Handle.__dict__["number"].__get__
level_of: Callable[[Any], int] = Handle.__dict__["level"].__get__


def raise_level(value: Any, level: int) -> Any:
    if level and type(value) in (Handle, CallableHandle):
        object.__setattr__(value, "level", level)
    return value


def make_handle(kind: type, number: Any) -> Handle:
    handle: Handle = object.__new__(kind)
    object.__setattr__(handle, "number", _number(number))
    object.__setattr__(handle, "level", 0)
    return handle


class Member:
    """A member of an enumeration of the program: equal by class, name and value; mixed with a plain type, by that value."""

    __slots__ = ("_key", "_mixed", "_number", "name", "value")

    def __init__(self, number: int, owner: str, name: str, mixed: bool, value: Any) -> None:
        self._number, self._mixed, self.name, self.value = number, mixed, name, value
        self._key = value if mixed else (owner, name, value)

    def __eq__(self, other: object) -> Any:
        if type(other) is Member:
            return self._key == other._key
        return self._mixed and self._key == other

    def __hash__(self) -> int:
        return hash(self._key)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what `isinstance` asks for
        return JUDGES[0].refuse("the tests ask for the class of a member of an enumeration")

    def __getattr__(self, name: str) -> Any:
        return JUDGES[0].refuse(f"the tests use {name} of a member of an enumeration")


class ErrorKind(type):
    """An exception class of the program: the tests catch it as their own; it is made and asked in there."""

    def __call__(cls, *args: object, **options: object) -> Any:
        handle = make_handle(Handle, cls._tad_kind)  # type: ignore[attr-defined]
        return JUDGES[0].ask("call", handle, list(options), *args, *options.values())


def is_handle(value: object) -> bool:
    return type(value) in (Handle, CallableHandle)


def is_foreign(value: object) -> bool:
    return is_handle(value) or type(value) is Member or isinstance(type(value), ErrorKind)


def is_same(one: Any, other: Any) -> bool:
    """The tests' `is`: of constants and classes; other values have no identity here."""
    for value, another in ((one, other), (other, one)):
        if value is None or type(value) is bool:
            return one is other
        if (value is ... or type(value) in (type, ErrorKind)) and not is_handle(another):
            return one is other
    if type(one) is type(other) is Member:
        return bool(one == other)
    return JUDGES[0].refuse("the tests ask whether two values are one object")


def is_not_same(one: Any, other: Any) -> bool:
    return not is_same(one, other)


def find_type(value: object) -> type:
    if is_foreign(value) and not isinstance(value, BaseException):
        JUDGES[0].refuse("the tests ask for the type of an object of the program")
    return type(value)


def find_identity(value: object) -> int:
    return JUDGES[0].refuse("the tests ask for an object's identity")


def _check(question: str, value: object, kind: Handle) -> bool:
    if not is_foreign(value) and type(value) is not ErrorKind:
        JUDGES[0].refuse("the tests ask whether a value is of a class of the program")
    return JUDGES[0].ask(question, value, kind) is True


def _describe(error: BaseException) -> str:
    return str(error.__dict__.get("_tad_text", ""))


def _ask_error(error: BaseException, name: str) -> Any:
    if name.startswith("__") or "_tad_number" not in error.__dict__:
        raise AttributeError(name)
    return JUDGES[0].ask("attr", error, name)


def _number(value: Any) -> int:
    if type(value) is not int:
        raise Malformed("no number")
    return value


def _reject(data: list) -> Any:
    raise Malformed("a reference")


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Handle, *args: object, **options: object) -> Any:
        return JUDGES[0].refuse(f"the tests use {name} of an object of the program")

    return method


_BINARY = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "divmod",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]
_OTHERS = [
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "hash",
    "bool",
    "len",
    "iter",
    "next",
    "reversed",
    "contains",
    "length_hint",
    "str",
    "repr",
    "format",
    "bytes",
    "int",
    "float",
    "complex",
    "index",
    "round",
    "trunc",
    "floor",
    "ceil",
    "abs",
    "neg",
    "pos",
    "invert",
    "enter",
    "exit",
    "aenter",
    "aexit",
    "aiter",
    "anext",
    "await",
    "copy",
    "deepcopy",
    "reduce",
    "reduce_ex",
    "getstate",
    "sizeof",
    "dir",
    "mro_entries",
    "fspath",
    "dataclass_fields",
]
for _name in (*_OTHERS, *_BINARY, *(f"r{name}" for name in _BINARY), *(f"i{name}" for name in _BINARY)):
    setattr(Handle, f"__{_name}__", _refusing(f"__{_name}__"))
    if _name not in (
        "eq",
        "hash",
        "copy",
        "deepcopy",
        "reduce",
        "reduce_ex",
        "getstate",
        "sizeof",
        "dir",
        "ne",
    ):
        setattr(Member, f"__{_name}__", _refusing(f"__{_name}__"))
