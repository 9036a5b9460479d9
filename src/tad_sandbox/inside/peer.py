"""Calls and references between two processes: the tests', which is trusted, and the program's.

A plain value crosses by value (`values`), anything else as a reference, for which the other side gets a proxy
(`proxies`). Of an object of the tests the program reaches its public attributes and its operators, and of a function
only its call. An assertion that fails in a function which the tests handed over fails the run, whether the program
lets it through or not.
"""

from __future__ import annotations

import _thread
import sys
import types

from tad_sandbox.inside.channel import Channel, Gone
from tad_sandbox.inside.operations import (
    IMMUTABLE,
    MEANINGFUL,
    MUTABLE,
    OPERATIONS,
    PROGRAM_OPERATIONS,
    plain_part,
)
from tad_sandbox.inside.proxies import KINDS, Mark, Proxy, Valued, is_proxy
from tad_sandbox.inside.surroundings import Surroundings, Watched
from tad_sandbox.inside.values import BUILTIN_TYPES, decode, encode, refresh

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Data = Any  # what `json` reads and writes

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_DESCRIPTIVE = frozenset({"__name__", "__qualname__", "__doc__", "__module__"})
_INTROSPECTIVE = ("_", "gi_", "cr_", "ag_", "tb_", "f_", "co_", "func_")


class Peer:
    """This process's end. Main thread and unknown threads share the first channel; others take a free one per call."""

    def __init__(self, channels: list[Channel], trusted: bool, **operations: Callable[..., Any]) -> None:
        self.operations = OPERATIONS if trusted else {**OPERATIONS, **PROGRAM_OPERATIONS, **operations}
        self.main, self.spare = channels[0], channels[1:]
        self.trusted = trusted
        self.main_thread = _thread.get_ident()
        self.local = _thread._local()
        self.own: dict[int, object] = {}
        self.proxies: dict[int, Any] = {}
        self.types: dict[tuple, Any] = {}
        self.tests_classes = False  # whether the tests name a class of the program
        self.failed_callback: AssertionError | None = None
        self.gone = False
        self.around = Watched()
        self.lent: list[tuple[Proxy, str, Any, Data]] = []

    def request(self, operation: str, *operands: object) -> Any:
        data = [self.encode(operand) for operand in operands]
        return self.decode(self.exchange(operation, *data)[0])

    def call(self, target: object, args: tuple, options: dict) -> Any:
        """Call an object of the other side; containers among the arguments come back as it left them."""
        given = (*args, *options.values())
        data = [self.encode(argument) for argument in given]
        surroundings = self.around.changes() if self.trusted else {}
        reply = self.exchange("call", self.encode(target), data, list(options), self.encode(surroundings))
        result, updates, same, printed, warned = reply
        for name, text in zip(surroundings.get("streams", ()), printed, strict=True):
            getattr(sys, name).write(str(text))
        for kind, text in self.decode(warned):
            if isinstance(kind, type) and issubclass(kind, Warning):
                sys.modules["warnings"].warn(str(text), kind, stacklevel=3)
        for number, update in updates:
            refresh(given[number], self.decode(update))
        return given[same] if same is not None else self.decode(result)

    def exchange(self, *message: Data) -> Data:
        if self.gone:
            raise Gone
        if self.lent:
            self.settle()
        channel, borrowed = self.channel()
        try:
            with channel.lock:
                self.local.channel = channel
                channel.send(["call", *message])
                while True:
                    reply = channel.receive()
                    if reply[0] != "call":
                        break
                    self.serve(channel, reply[1:])
                if reply[0] == "error":
                    raise self.decode(reply[1])
                return reply[1:]
        except Gone:
            self.gone = True
            raise
        finally:
            if borrowed:
                self.local.channel = None
                self.spare.append(channel)

    def lend(self, owner: Proxy, name: str, value: Any) -> Any:
        """An attribute of the program's: what the tests do to a container, they do to the program's."""
        if self.trusted and type(value) in (list, dict, set):
            self.lent.append((owner, name, value, self.encode(value)))
        return value

    def settle(self) -> None:
        lent, self.lent = self.lent, []
        *counts, ours = [sys.getrefcount(value) for _, _, value, _ in [*lent, (None, "", [], None)]]
        for (owner, name, value, before), count in zip(lent, counts, strict=True):
            if (after := self.encode(value)) != before:
                self.exchange("assign", self.encode(owner), name, after)
            if count > ours:  # the tests still hold it
                self.lent.append((owner, name, value, after))

    def channel(self) -> tuple[Channel, bool]:
        current = getattr(self.local, "channel", None)
        if current is not None:
            return current, False
        if self.trusted and self.spare and _thread.get_ident() != self.main_thread:
            return self.spare.pop(), True
        return self.main, False

    def serve_forever(self, channel: Channel) -> None:
        self.local.channel = channel
        while True:
            self.serve(channel, channel.receive()[1:])

    def serve(self, channel: Channel, message: Data) -> None:
        try:
            operation, operands = message[0], message[1:]
            if self.trusted:
                self.permit(operation, operands)
            if operation == "call":
                reply = self.answer_call(*operands)
                self.flush()
            else:
                values = [self.decode(operand) for operand in operands]
                reply = [self.encode(self.operations[operation](*values))]
            self.flush()
            channel.send(["ok", *reply])
        except Gone:
            raise
        except BaseException as error:
            if isinstance(error, AssertionError) and self.failed_callback is None:
                self.failed_callback = error
            self.flush()
            channel.send(["error", self.encode_error(error)])

    def flush(self) -> None:
        """Nothing printed is lost when this process is ended; what the program did to its streams decides nothing."""
        if not self.trusted:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except BaseException:
                    continue

    def permit(self, operation: str, operands: list) -> None:
        """Raise unless the program may do this with an object of the tests."""
        ours = [isinstance(operand, list) and operand[:1] == ["p"] for operand in operands]
        on_first = operation in ("call", "attr", "setattr", "delattr")  # and not on anything else
        if operation not in ("call", *OPERATIONS) or not (ours[0] if on_first else any(ours)):
            raise TypeError("not an object of the tests")
        if operation != "call" and on_first:
            target, name = self.decode(operands[0]), operands[1]
            if name in _DESCRIPTIVE and operation == "attr":
                return
            closed = _FUNCTIONS if operation == "attr" else (type, *_FUNCTIONS)
            if name.startswith(_INTROSPECTIVE) or isinstance(target, closed):
                raise AttributeError(name)

    def answer_call(self, target: Data, data: list, names: list, around: Data) -> list:
        function = self.decode(target)
        args = [self.decode(argument) for argument in data]
        plain = len(args) - len(names)
        with Surroundings(self.decode(around)) as around_call:
            result = function(*args[:plain], **dict(zip(names, args[plain:], strict=True)))
        updates = []
        for number, (argument, before) in enumerate(zip(args, data, strict=True)):
            if isinstance(before, list) and (after := self.encode(argument)) != before:
                updates.append([number, after])
        same = [
            number
            for number, argument in enumerate(args)
            if argument is result and isinstance(data[number], list)
        ]
        printed, warned = around_call.printed, self.encode(around_call.warned)
        return [self.encode(result), updates, same[0] if same else None, printed, warned]

    def encode(self, value: object) -> Data:
        return encode(value, self.export)

    def decode(self, data: Data) -> Any:
        return decode(data, self.resolve)

    def export(self, value: Any) -> list:
        kind = type(value)
        if is_proxy(value) or (issubclass(kind, type) and isinstance(vars(value).get("_tad_"), Mark)):
            return ["p", value._tad_.number]
        if issubclass(kind, BaseException):
            return self.encode_error(value)
        if issubclass(kind, types.ModuleType):
            return ["m", value.__name__]
        if self.trusted and issubclass(kind, (type, *_FUNCTIONS)):
            place = (getattr(value, "__module__", None), getattr(value, "__qualname__", ""))
            if place[0] not in (None, "tests", "__main__") and _find(*place) is value:
                return ["g", *place]
        self.own[id(value)] = value
        return ["h", id(value), *self.describe(value)]

    def describe(self, value: Any) -> list:
        """Kind, name of the type, and what the other side needs to stand in for the object."""
        kind = type(value)
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return ["E", value.__name__, [self.encode(base) for base in value.__bases__]]
            return ["c", value.__name__, None]
        for base in (*IMMUTABLE, *MUTABLE):
            if issubclass(kind, base):
                more = [vars(step) for step in kind.__mro__ if step not in base.__mro__]
                own = any(name in step for step in more for name in MEANINGFUL)
                if base in IMMUTABLE and not own:
                    return ["v", kind.__name__, [base.__name__, self.encode(plain_part(value))]]
                return ["b", kind.__name__, base.__name__]
        if hasattr(kind, "__await__"):
            return ["a", kind.__name__, None]
        return ["f" if callable(value) else "o", kind.__name__, None]

    def resolve(self, data: list) -> Any:
        tag = data[0]
        if tag == "p":
            return self.own[data[1]]
        if tag == "h":
            return self.import_reference(*data[1:])
        if tag == "x":
            return self.decode_error(*data[1:])
        if tag == "m":
            return self.import_module(data[1])
        if tag == "g" and not self.trusted:
            return _find(data[1], data[2], load=True)
        raise TypeError(f"not a value: {str(data)[:80]}")

    def import_module(self, name: str) -> Any:
        known = name in sys.modules or name.partition(".")[0] in sys.stdlib_module_names
        if self.trusted and (not known or name.startswith("unittest")):  # its mocks equal everything
            raise TypeError(f"module {str(name)[:80]!r} cannot be handed to the tests")
        __import__(name)
        return sys.modules[name]

    def import_reference(self, number: int, kind: str, name: str, extra: Data) -> Any:
        if number in self.proxies:
            return self.proxies[number]
        mark = Mark(self, number, kind, str(name), extra)
        made: Any
        if kind == "E":
            made = self.mirror_error(mark, extra)
        elif kind == "v":
            base = BUILTIN_TYPES[extra[0]]
            if base not in IMMUTABLE:
                raise TypeError(name)
            made = base.__new__(self.proxy_type(name, kind, base), self.decode(extra[1]))
            made._tad_ = mark
        else:
            made = object.__new__(self.proxy_type(name, kind, KINDS[kind]))
            object.__setattr__(made, "_tad_", mark)
        self.proxies[number] = made
        return made

    def proxy_type(self, name: str, kind: str, base: type) -> Any:
        key = (name, kind, base)
        if key not in self.types:
            bases, slots = ((Valued, base), {}) if kind == "v" else ((base,), {"__slots__": ()})
            described = property(lambda proxy: proxy.__getattr__("__doc__"))
            self.types[key] = type(
                str(name), bases, {**slots, "__module__": "solution", "__doc__": described}
            )
        return self.types[key]

    def encode_error(self, error: BaseException) -> list:
        kind = type(error)
        if hasattr(kind, "_tad_"):
            kind_data: Data = ["p", kind._tad_.number]
        elif BUILTIN_TYPES.get(kind.__name__) is kind:
            kind_data = ["T", kind.__name__]
        elif (
            (module := sys.modules.get(kind.__module__))
            and getattr(module, kind.__name__, None) is kind
            and (kind.__module__.partition(".")[0] in sys.stdlib_module_names)
        ):
            names = (base.__name__ for base in kind.__mro__ if base in BUILTIN_TYPES.values())
            kind_data = ["L", kind.__module__, kind.__name__, next(names)]
        else:
            kind_data = self.export(kind)
        try:
            text = str(error)
        except BaseException:
            text = ""
        parts = {
            key: value for key, value in getattr(error, "__dict__", {}).items() if not key.startswith("_")
        }
        try:
            return ["x", kind_data, self.encode(tuple(error.args)), self.encode(parts), text]
        except BaseException:  # arguments that cannot be written
            return ["x", kind_data, self.encode((text,)), self.encode({}), text]

    def decode_error(self, kind_data: Data, args: Data, parts: Data, text: str) -> BaseException:
        kind = self.decode_error_type(kind_data)
        values = self.decode(args)
        try:
            error = kind(*values) if kind.__module__ == "builtins" else kind.__new__(kind)
            error.args = values
        except Exception:
            error = kind.__new__(kind)
            error.args = (text,)
        if hasattr(error, "__dict__"):
            error.__dict__.update(self.decode(parts), _text_=text)
        return error

    def decode_error_type(self, data: Data) -> type[BaseException]:
        if data[0] == "L":
            # Own classes of the standard library, if the tests have imported them; unittest's own mean "skipped" to it.
            found = getattr(sys.modules.get(data[1]), data[2], None)
            standard = data[1].partition(".")[0] in sys.stdlib_module_names - {"unittest"}
            if standard and isinstance(found, type) and issubclass(found, Exception):
                return found
            data = ["T", data[3]]
        kind = self.decode(data)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError("not an exception")
        return kind

    def mirror_error(self, mark: Mark, bases: Data) -> Any:
        """An exception type of our own for one of the other side: tests catch it by class."""
        kinds = [kind for base in bases for kind in [self.decode(base)] if isinstance(kind, type)]
        kinds = [kind for kind in kinds if issubclass(kind, BaseException)] or [Exception]

        def describe(self: BaseException) -> str:
            return str(self.__dict__.get("_text_", BaseException.__str__(self)))

        return type(mark.name, tuple(kinds), {"_tad_": mark, "__module__": "solution", "__str__": describe})


def _find(module: Any, path: str, load: bool = False) -> Any:
    """What a module calls by a dotted name; None if there is nothing."""
    if load:
        __import__(module)
    found = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
