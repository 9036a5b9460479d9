"""What the tests hand to the program beside plain values: its own objects back, names of the standard library, functions.

A function of the tests is sent as its code and runs in the program's process. It must be a plain one: it asserts nothing,
keeps nothing, changes nothing outside itself, and all that it uses can be sent too. Anything else would have to call back
into the tests' process, and cannot be judged.
"""

from __future__ import annotations

import builtins
import marshal
import sys
import types

from tad_sandbox.inside.stubs import CallableHandle, ErrorKind, Handle, Judge, Member, number_of
from tad_sandbox.inside.values import encode

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ITEMS = 100_000
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType)
_NAMED = (type, types.BuiltinFunctionType, types.MethodDescriptorType)
_SIMPLE = (int, float, str, bytes, tuple, frozenset, dict)
_ITERATORS = ("builtins", "itertools", "generator")
_REDUCED = (("operator", "itemgetter"), ("operator", "attrgetter"), ("operator", "methodcaller"))
_LOADED = ("_GLOBAL", "_GLOBALS", "_NAME")
_KEEPING = [
    "STORE_GLOBAL",
    "DELETE_GLOBAL",
    "STORE_SUBSCR",
    "DELETE_SUBSCR",
    "STORE_ATTR",
    "DELETE_ATTR",
    "LOAD_ASSERTION_ERROR",
]
_CHANGING = frozenset(
    [
        "append",
        "extend",
        "insert",
        "pop",
        "remove",
        "clear",
        "update",
        "add",
        "discard",
        "setdefault",
        "sort",
        "reverse",
        "popitem",
        "appendleft",
        "popleft",
        "extendleft",
        "rotate",
        "write",
        "writelines",
        "put",
        "send",
        "throw",
        "AssertionError",
        "LOAD_COMMON_CONSTANT",
        "setattr",
        "delattr",
        "__setattr__",
        "__setitem__",
        "__delitem__",
    ]
)


class Shipper:
    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.under_way: list[Any] = []
        self.drained: dict[int, Any] = {}

    def export(self, value: Any) -> list:
        kind = type(value)
        if kind is Handle or kind is CallableHandle:
            return ["object", number_of(value)]
        if kind is Member:
            return ["object", value._number]
        if kind is ErrorKind:
            return ["object", value._tad_kind]
        if isinstance(kind, ErrorKind) and "_tad_number" in value.__dict__:
            return ["object", value.__dict__["_tad_number"]]
        if kind is types.FunctionType:
            return self.export_function(value)
        if kind is types.ModuleType and value.__name__ not in ("tests", "solution"):
            return ["name", value.__name__]
        if kind is slice:
            return ["slice", *(encode(part, self.export) for part in (value.start, value.stop, value.step))]
        if value is Ellipsis or value is NotImplemented:
            return ["name", "builtins", repr(value)]
        owner = getattr(value, "__objclass__", value) if kind is types.MethodDescriptorType else value
        place = (getattr(owner, "__module__", None), getattr(value, "__qualname__", ""))
        if isinstance(value, _NAMED) and _find(*place) is value:
            return ["name", place[0], *place[1].split(".")]
        owner = getattr(value, "__self__", None)
        if isinstance(value, _BUILT_IN) and isinstance(owner, _SIMPLE) and value.__name__ not in _CHANGING:
            return ["made", ["name", "builtins", "getattr"], *self.encode_all((owner, value.__name__))]
        if kind.__module__ == "builtins" and isinstance(value, BaseException):
            return ["made", ["name", "builtins", kind.__name__], *self.encode_all(value.args)]
        if (kind.__module__, kind.__name__) == ("functools", "partial") and not value.keywords:
            return ["made", ["name", "functools", "partial"], *self.encode_all((value.func, *value.args))]
        if (kind.__module__, kind.__name__) in _REDUCED:
            return ["made", ["name", kind.__module__, kind.__name__], *self.encode_all(value.__reduce__()[1])]
        if kind.__name__ in ("PosixPath", "UUID"):
            return ["made", ["name", kind.__module__, kind.__name__], str(value)]
        if kind is types.GeneratorType or (kind.__module__ in _ITERATORS and hasattr(kind, "__next__")):
            if id(value) in self.drained:
                self.judge.refuse("the tests hand an iterator to the program twice")
            self.drained[id(value)] = value  # kept: its number is not another's
            items = [item for _, item in zip(range(ITEMS + 1), value)]  # noqa: B905 (one may be endless)
            if len(items) <= ITEMS:
                return ["items", *self.encode_all(items)]
        return self.judge.refuse(f"the tests hand a {kind.__name__!r} to the program")

    def encode_all(self, values: Any) -> list:
        return [encode(value, self.export) for value in values]

    def export_function(self, function: Any) -> list:
        library = _find(function.__module__, function.__qualname__)
        if library is function and function.__module__ in sys.modules and function.__module__ != "tests":
            return ["name", function.__module__, *function.__qualname__.split(".")]
        code, space = function.__code__, function.__globals__
        if function in self.under_way or not _is_plain(code):
            self.judge.refuse(
                f"the function {function.__name__!r} of the tests does more than give back a value"
            )
        self.under_way.append(function)
        try:
            used = {name: space[name] for name in _globals(code) if name in space and name != "__builtins__"}
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            parts = (used, function.__defaults__, function.__kwdefaults__, cells)
            return ["code", marshal.dumps(code).decode("latin-1"), *self.encode_all(parts)]
        except ValueError:  # a cell that is still empty
            self.judge.refuse(f"the function {function.__name__!r} of the tests is used before it is whole")
        finally:
            self.under_way.pop()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals(code: types.CodeType) -> set[str]:
    import dis

    steps = (step for part in _codes(code) for step in dis.get_instructions(part))
    return {
        step.argval for step in steps if step.opname.startswith("LOAD_") and step.opname.endswith(_LOADED)
    }


def _is_plain(code: types.CodeType) -> bool:
    """Whether nothing is left behind by a call, as far as its code shows."""
    import opcode

    refused = {opcode.opmap[name] for name in _KEEPING if name in opcode.opmap}
    for part in _codes(code):
        operations = set(part.co_code[::2])
        if operations & refused or not _CHANGING.isdisjoint(part.co_names):
            return False
        if part.co_freevars and opcode.opmap["STORE_DEREF"] in operations:
            return False
    return True


def _find(module: Any, path: Any) -> Any:
    """What a loaded module, one that the tests cannot have made, calls by a dotted name."""
    if module in ("tests", "solution", "__main__", None):
        return None
    found = sys.modules.get(module, builtins if module == "builtins" else None)
    for name in str(path).split("."):
        found = getattr(found, name, None)
    return found
