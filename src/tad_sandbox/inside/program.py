"""The program's process: run the program and answer what the tests ask of it. Nothing here is trusted by anyone."""

from __future__ import annotations

import builtins
import marshal
import operator
import os
import sys
import time
import types

from tad_sandbox.inside.channel import Channel, Gone
from tad_sandbox.inside.values import decode, encode, refresh

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Data = Any  # what `json` reads and writes

PROGRAM_FILE = "/tmp/solution.py"
_INPUT = builtins.input
BATCH, BATCH_SECONDS = 256, 0.05
_MUTABLE = ("list", "dict", "set", "bytearray", "OrderedDict", "Counter", "defaultdict", "deque", "ndarray")
_ERRORS = {k: v for k, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException)}


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "attr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "item": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
}


class Loader:
    """Gives `inspect` the text of the program, which is in no file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, name: str) -> str:
        return self.text


def execute(text: str) -> types.ModuleType:
    solution = types.ModuleType("solution")
    sys.modules["solution"] = solution  # dataclasses look their module up
    solution.__dict__.update(__file__=PROGRAM_FILE, __loader__=Loader(text))
    exec(compile(text, PROGRAM_FILE, "exec", dont_inherit=True), solution.__dict__)
    return solution


class Program:
    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        self.objects: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.received: dict[int, tuple[Any, Data]] = {}
        self.errors: dict[int, BaseException] = {}
        self.comparing = False

    def serve(self, channel: Channel) -> None:
        while True:
            operation, operands, changed, around = channel.receive()
            printed: list[str] = []
            warned: list[Any] = []
            values: list[Any] = []
            try:
                for number, data in changed:
                    refresh(self.objects[number], self.decode(data))
                values = [self.decode(data) for data in operands]
                with Surroundings(self.decode(around), printed, warned):
                    answer = _OPERATIONS.get(operation) or getattr(self, f"do_{operation}")
                    result = answer(*values)
                    data = self.encode_lent(result) if self.lends(operation, values) else self.encode(result)
                kind = "ok"
            except Gone:
                raise
            except BaseException as error:
                kind, data = "error", self.encode_error(error)
            updates = self.find_updates(values, operands)
            for stream in (sys.stdout, sys.stderr):  # nothing printed is lost when this process is ended
                try:
                    stream.flush()
                except BaseException:
                    continue
            channel.send([kind, data, updates, printed, [self.encode_error(warning) for warning in warned]])

    def find_updates(self, values: list, operands: list) -> list:
        updates = []
        self.comparing = True
        for number, (value, before) in enumerate(zip(values, operands)):  # noqa: B905 (an error may have cut them)
            if type(before) is list and len(before[0]) == 1:
                after = self.encode(value)
                if after != before:
                    updates.append([number, after])
        self.comparing = False
        return updates

    def lends(self, operation: str, values: list) -> bool:
        """Whether the result may be a part of an object, which the tests can change."""
        if operation == "call":
            return type(values[0]) is types.MethodType
        return operation in ("attr", "item", "get")

    def do_exec(self, text: str) -> None:
        self.space = execute(text).__dict__

    def do_names(self) -> list[str]:
        return [name for name in self.space if type(name) is str]

    def do_get(self, name: str) -> Any:
        return self.space[name]

    def do_set(self, name: str, value: Any) -> None:
        self.space[name] = value

    def do_delete(self, name: str) -> None:
        del self.space[name]

    def do_call(self, target: Any, names: list, *values: Any) -> Any:
        plain = len(values) - len(names)
        return target(*values[:plain], **dict(zip(names, values[plain:], strict=True)))

    def do_seed(self, *arguments: Any) -> None:
        __import__("random").seed(*arguments)

    def do_await(self, number: int) -> Any:
        import asyncio

        async def wait() -> Any:
            return await self.objects[number]

        if not hasattr(self, "loop"):
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(wait())

    def do_next(self, number: int) -> tuple[list, bool]:
        """The next items of an iterator, and whether they are the last."""
        items: list[Any] = []
        until = time.monotonic() + BATCH_SECONDS
        if number in self.errors:
            raise self.errors.pop(number)
        try:
            for item in self.objects[number]:
                items.append(item)
                if len(items) == BATCH or time.monotonic() > until:
                    return items, False
        except BaseException as error:
            if not items:
                raise
            self.errors[number] = error
            return items, False
        return items, True

    def encode(self, value: object) -> Data:
        try:
            return encode(value, self.export)
        except RecursionError:
            return self.export(value)

    def encode_lent(self, value: object) -> Data:
        data = self.encode(value)
        if type(value).__name__ in _MUTABLE and data[0] not in ("h", "H"):
            return ["L", self.keep(value), data]
        return data

    def keep(self, value: Any) -> int:
        if (number := self.numbers.get(id(value))) is None:
            number = self.numbers[id(value)] = len(self.objects)
            self.objects[number] = value
        return number

    def export(self, value: Any) -> list:
        kind = type(value)
        if self.comparing and id(value) in self.received:
            return self.received[id(value)][1]
        if isinstance(value, BaseException):
            return self.encode_error(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["h", self.keep(value)] if value in _ERRORS.values() else self.encode_kind(value)
        if isinstance(value, types.CoroutineType):
            return ["A", self.keep(value)]
        if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
            number = self.keep(value)
            return ["g", number, kind is types.GeneratorType, self.encode(self.do_next(number))]
        if "enum" in sys.modules and isinstance(value, sys.modules["enum"].Enum):
            plain = next((base for base in (int, str, float) if isinstance(value, base)), None)
            inner = encode(value.value if plain is None else plain(value.value), self.export)
            return ["m", self.keep(value), kind.__qualname__, value.name, plain is not None, inner]
        return ["H" if callable(value) else "h", self.keep(value)]

    def encode_kind(self, kind: Any) -> Data:
        if kind in _ERRORS.values():
            return kind.__name__
        bases = [base for base in kind.__bases__ if issubclass(base, BaseException)]
        standard = str(kind.__module__).partition(".")[0] in sys.stdlib_module_names
        name = f"{kind.__module__}.{kind.__name__}" if standard else kind.__name__
        return ["X", self.keep(kind), name, *map(self.encode_kind, bases)]

    def encode_error(self, error: BaseException, links: int = 3) -> list:
        """With the errors that it came from, up to a number of links."""
        data = self.encode_one_error(error)
        if links and (error.__cause__ or error.__context__ or error.__suppress_context__):
            chain = [
                one and self.encode_error(one, links - 1) for one in (error.__cause__, error.__context__)
            ]
            return [*data, *chain, error.__suppress_context__]
        return data

    def encode_one_error(self, error: BaseException) -> list:
        try:
            text = str(error)
        except BaseException:
            text = ""
        args: Data = ["t", text]
        try:
            if not any(isinstance(part, type | list) for part in error.args):  # details of the library's own
                args = self.encode(tuple(error.args))
            return ["E", self.keep(error), self.encode_kind(type(error)), text, args]
        except BaseException:  # what cannot be described
            return ["E", self.keep(error), "Exception", "", ["t"]]

    def decode(self, data: Data) -> Any:
        return decode(data, self.resolve)

    def resolve(self, data: list) -> Any:
        tag, parts = data[0], data[1:]
        value: Any
        if tag == "object":
            return self.objects[parts[0]]
        if tag == "name":
            __import__(parts[0])
            value = sys.modules[parts[0]]
            for name in parts[1:]:
                value = getattr(value, name)
        elif tag == "slice":
            return slice(*map(self.decode, parts))
        elif tag == "made":
            function, *args = map(self.decode, parts)
            value = function(*args)
        elif tag == "items":
            value = iter([self.decode(part) for part in parts])
        else:
            value = self.make_function(parts[0], *map(self.decode, parts[1:]))
        self.received[id(value)] = value, data
        return value

    def make_function(self, text: str, space: dict, defaults: Any, named: Any, cells: list) -> Any:
        code = marshal.loads(text.encode("latin-1"))
        space = {**space, **OWN_NAMES, "__builtins__": builtins, "__name__": "tests"}
        function = types.FunctionType(code, space, code.co_name, defaults, tuple(map(types.CellType, cells)))
        function.__kwdefaults__ = named
        return function


# What the tests' code calls by these names, see `trial`: in here they are what they are.
OWN_NAMES: dict[str, Callable[..., Any]] = {
    "@is": lambda one, other: one is other,
    "@is not": lambda one, other: one is not other,
    "@type": type,
    "@id": id,
}


class Surroundings:
    """What the tests changed around a call, changed here too while it lasts; what was printed and warned meanwhile.

    The environment, the directory and what is to be read stay: they are sent when they change.
    """

    def __init__(self, changed: dict[str, Any], printed: list[str], warned: list[Any]) -> None:
        self.changed, self.printed, self.warned = changed, printed, warned
        self.before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        for name, value in self.changed.items():
            if name == "environ":
                os.environ.clear()
                os.environ.update(value)
            elif name == "place":
                os.chdir(value)
            elif name == "warnings":
                import warnings

                self.set(warnings, "showwarning", lambda message, *_, **__: self.warned.append(message))
                warnings.simplefilter("always")
            elif name == "streams":
                for stream in value:
                    self.set(sys, stream, __import__("io").StringIO())
            elif name == "stdin":
                sys.stdin = sys.__stdin__ if value is None else __import__("io").StringIO(value)
            elif name == "input":
                builtins.input = _INPUT if value is None else value

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        for stream in self.changed.get("streams", ()):
            self.printed.append(getattr(sys, stream).getvalue())
        for owner, name, value in reversed(self.before):
            setattr(owner, name, value)
