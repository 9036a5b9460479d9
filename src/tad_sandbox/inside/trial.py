"""The tests' process: run the tests against the program, and say why they fail.

Tests of a script (HumanEval, MBPP) find the program's names as if they stood below it; tests of a module (KodCode) import
it as `solution`. Plain test functions are called here; modules that need more (classes, `unittest`, fixtures, parameters,
async tests) are run by pytest where the sandbox holds it, and refused where it does not. A test that gives back
anything but None or True fails, and so does a module that asserts nothing.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import types

from tad_sandbox.inside.channel import Gone
from tad_sandbox.inside.stubs import (
    CannotJudge,
    Judge,
    find_identity,
    find_type,
    is_foreign,
    is_not_same,
    is_same,
    raise_level,
)

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

_PLAIN_FLAGS = ~(0x04 | 0x20 | 0x80 | 0x200)  # no *args, generator, coroutine, async generator
_OUT_OF_PLAIN = ("setup_module", "setup_function", "teardown_module", "teardown_function", "pytestmark")
# What tests put in the place of something that is not the program's own: the program does not see it.
_REPLACED = (  # compiled when it is needed
    r"(\bpatch(\.object|\.multiple)?|monkeypatch\.setattr)\((?!\s*[\"']?(solution|builtins(\.|, *[\"'])input|sys(\.|, *[\"'])std))"
)
_IDENTITY = re.compile(r"\bis\b|\btype\b|\bid\b|assertIs\b|assertIsNot\b")
_PATCHED = re.compile(
    r"\b(?:caplog|assertLogs|addHandler|expectedFailure|xfail)\b|(?:\bpatch|\bpatch\.\w+|monkeypatch\.setattr)\(\s*[\"']?(\w+)(?:[\"']?,\s*[\"']|\.)(\w+)"
)
_OWN = {"@is": is_same, "@is not": is_not_same, "@type": find_type, "@id": find_identity}


class NotTestedError(Exception):
    """The tests cannot all be run, or test nothing."""


class Apart:
    """The program in its own process."""

    def __init__(self, judge: Judge, program: str) -> None:
        self.judge = judge
        judge.ask("exec", program)

    def get(self, name: str) -> Any:
        level = 2 if name.lstrip("_")[:1].isupper() else 0
        return raise_level(self.judge.ask("get", name), level)

    def set(self, name: str, value: object) -> None:
        self.judge.ask("set", name, value)

    def delete(self, name: str) -> None:
        self.judge.ask("delete", name)

    def names(self) -> list[str]:
        return [name for name in self.judge.ask("names") if type(name) is str]


class Together:
    """The program in this process."""

    def __init__(self, module: types.ModuleType) -> None:
        self.space = vars(module)
        self.get, self.set = self.space.__getitem__, self.space.__setitem__
        self.delete = self.space.__delitem__

    def names(self) -> list[str]:
        return list(self.space)


class Namespace(dict):
    """Globals of a script's tests: their own names first, then built-in ones, then the program's.

    A name of the program stands before a built-in one only if the job says so, and never before a module of the standard
    library: a program could otherwise bring its own `abs`, `all` or `math.isclose`.
    """

    def __init__(self, program: Apart | Together, text: str, wanted: list[str]) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self.program, self.text, self.wanted = program, text, wanted

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name not in self.wanted:
            raise KeyError(name)
        if name in sys.stdlib_module_names and f"{name}." in self.text:
            return __import__(name)
        try:
            value = self.program.get(name)
        except KeyError:
            raise NameError(f"name {name!r} is not defined") from None
        if callable(value):  # asked for once; other values may change
            self[name] = value
        return value


class Solution(types.ModuleType):
    """The program as a module of the tests."""

    def __init__(self, program: Apart | Together, bound: set[str]) -> None:
        super().__init__("solution")
        self.__dict__.update(_program=program, _bound=bound)

    def __getattr__(self, name: str) -> Any:
        program, bound = self.__dict__["_program"], self.__dict__["_bound"]
        if name == "__all__":  # never what the tests have from elsewhere
            bound = bound | vars(sys.modules.get("tests", builtins)).keys() | vars(builtins).keys()
            return [name for name in program.names() if not (name.startswith("_") or name in bound)]
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return program.get(name)
        except KeyError:
            raise AttributeError(f"module 'solution' has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self.__dict__["_program"].set(name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__["_program"].delete(name)


class Watched:
    """What the tests changed around a call, and the program should see: streams, input, environment, directory."""

    def __init__(self) -> None:
        self.input, self.own_input, self.stdin = builtins.input, builtins.input, sys.stdin
        self.environment, self.place = _environment(), os.getcwd()

    def changes(self) -> dict[str, Any]:
        listening = [
            name for name in ("stdout", "stderr") if getattr(sys, name) is not getattr(sys, f"__{name}__")
        ]
        changed: dict[str, Any] = {"streams": listening} if listening else {}
        # Sent once: what the program has read of them is gone.
        if builtins.input is not self.input:
            self.input = builtins.input
            changed["input"] = None if self.input is self.own_input else self.input
        if sys.stdin is not self.stdin:
            self.stdin = sys.stdin
            changed["stdin"] = sys.stdin.read() if hasattr(sys.stdin, "getvalue") else None
        if "warnings" in sys.modules:
            changed["warnings"] = True
        if (environment := _environment()) != self.environment:
            self.environment = environment
            changed["environ"] = dict(os.environ)
        if (place := os.getcwd()) != self.place:
            changed["place"] = self.place = place
        return changed


def _environment() -> dict[Any, Any]:
    """As it is stored: decoding it for every call would take longer than most calls."""
    return dict(os.environ._data)  # type: ignore[attr-defined]


def share_seeds(judge: Judge) -> None:
    """A seed that the tests set is the program's too."""
    import random

    seed_here = random.seed

    def seed(*arguments: Any) -> None:
        seed_here(*arguments)
        judge.ask("seed", *arguments)

    random.seed = seed  # type: ignore[assignment]


def replaces_elsewhere(text: str) -> bool:
    """Whether tests replace more than names of the program and its streams: a failure may then be theirs."""
    return re.search(_REPLACED, text) is not None


def describe(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def run_tests(program: Apart | Together, job: dict[str, Any]) -> str | None:
    """Why the tests fail; None if they pass."""
    text = job["tests"]
    try:
        if isinstance(program, Apart):
            refuse_patches(program.judge, text)
        tree = rewrite(text) if isinstance(program, Apart) and _IDENTITY.search(text) else text
        code = compile(tree, "<tests>", "exec", dont_inherit=True)
        if job["as_module"]:
            sys.modules["solution"] = Solution(program, bound_names(text))
            run_module(code, text)
        else:
            sys.modules["solution"] = Solution(program, set())
            exec(code, Namespace(program, text, job["names"]))
    except NotTestedError as error:
        return f"tests: {error}"
    except CannotJudge:
        return None  # the judge has kept why
    except Gone:
        raise
    except BaseException as error:
        return f"tests: {describe(error)}"
    return None


def refuse_patches(judge: Judge, text: str) -> None:
    """What tests change or record in the interpreter itself has no effect on the program's."""
    for found in _PATCHED.finditer(text):
        name, member = found[1], found[2]
        standard = name == "builtins" or name in sys.stdlib_module_names
        carried = name == "sys" or (name, member) in (("builtins", "input"), ("os", "environ"))
        if name is None or (standard and not carried):
            what = name or ("failures that they expect" if "ail" in found[0] else "what is logged")
            judge.refuse(f"the tests change or record {what} in their own interpreter")
    if re.search(r"\bwait_for\(|\basyncio\.timeout\(", text) and "TimeoutError" in text:
        judge.refuse("the tests end a coroutine of the program before it is done")


def rewrite(text: str) -> Any:
    """The tests with their questions for identity and type asked by name, see `stubs`."""
    import ast

    vars(builtins).update(_OWN)

    def ask(name: str, *operands: Any) -> Any:
        return ast.Call(ast.Name(name, ast.Load()), list(operands), [])

    class Rewriter(ast.NodeTransformer):
        def visit_Compare(self, node: Any) -> Any:
            self.generic_visit(node)
            if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
                name = "@is" if isinstance(node.ops[0], ast.Is) else "@is not"
                return ast.copy_location(ask(name, node.left, node.comparators[0]), node)
            return node

        def visit_Call(self, node: Any) -> Any:
            self.generic_visit(node)
            function = node.func
            if isinstance(function, ast.Name) and function.id in ("type", "id") and len(node.args) == 1:
                function.id = f"@{function.id}"
            if isinstance(function, ast.Attribute) and function.attr in ("assertIs", "assertIsNot"):
                name = "@is" if function.attr == "assertIs" else "@is not"
                function.attr, node.args[:2] = "assertTrue", [ask(name, *node.args[:2])]
            return node

    return ast.fix_missing_locations(Rewriter().visit(ast.parse(text)))


def bound_names(text: str) -> set[str]:
    """What the tests import, define or assign themselves, anywhere."""
    import ast

    bound = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "solution"):
            bound |= {(name.asname or name.name).partition(".")[0] for name in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


def run_module(code: types.CodeType, text: str) -> None:
    module = sys.modules["tests"] = types.ModuleType("tests")
    exec(code, module.__dict__)
    if not asserts_something(text):
        raise NotTestedError("nothing is tested")
    own = {name: value for name, value in vars(module).items() if not is_foreign(value)}
    tests = {name: value for name, value in own.items() if name.startswith("test") and callable(value)}
    if not needs_pytest(own, tests, text):
        for test in tests.values():
            check_result(test())
        if not tests and not does_something(text):
            raise NotTestedError("nothing is tested")
        return
    try:
        import pytest
    except ImportError:
        raise NotTestedError("they need pytest, which this sandbox does not hold") from None
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    collected = types.ModuleType("tests")
    collected.__dict__.update(own)
    run_pytest(pytest, collected)


def needs_pytest(own: dict[str, Any], tests: dict[str, Any], text: str) -> bool:
    for test in tests.values():
        if not isinstance(test, types.FunctionType):
            return True
        code = test.__code__
        if (
            code.co_flags & ~_PLAIN_FLAGS
            or code.co_argcount
            or code.co_kwonlyargcount
            or hasattr(test, "__wrapped__")
        ):
            return True
    case = getattr(sys.modules.get("unittest"), "TestCase", ())
    for name, value in own.items():
        own_class = isinstance(value, type) and value.__module__ == "tests"
        if own_class and (name.startswith("Test") or issubclass(value, case)):
            return True
    return "fixture" in text or "pytest.mark" in text or any(name in own for name in _OUT_OF_PLAIN)


def run_pytest(pytest: Any, module: types.ModuleType) -> None:
    """Collect the module as it stands in memory, run all of it, and raise for the first failure."""
    failures: list[BaseException] = []
    passed: list[str] = []
    skipped: list[str] = []

    class Run:
        @pytest.hookimpl(tryfirst=True)
        def pytest_collection(self, session: Any) -> bool:
            node = pytest.Module.from_parent(session, path=session.config.rootpath / "tests.py")
            node.obj = module
            session.items = list(session.genitems(node))
            session.testscollected = len(session.items)
            return True

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
            names = pyfuncitem._fixtureinfo.argnames
            result = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
            if type(result) is types.CoroutineType:
                import asyncio

                result = asyncio.run(result)
            check_result(result)
            return True

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                failures.append(AssertionError("the tests cannot be collected"))

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, None]:
            report = (yield).get_result()
            if report.failed:
                failures.append(call.excinfo.value if call.excinfo else AssertionError(item.name))
            elif report.skipped and not hasattr(report, "wasxfail"):
                skipped.append(item.name)
            elif report.passed and call.when == "call":
                passed.append(item.name)

    options = ["-q", "-p", "no:cacheprovider", "-p", "no:warnings", "--noconftest", "--capture=sys"]
    options += ["-c", "/dev/null", "--rootdir=/", "--tb=no", "--no-header", "--maxfail=1"]
    status = pytest.main(options, plugins=[Run()])
    if failures:
        raise failures[0]
    if skipped:
        raise NotTestedError(f"{skipped[0]} was skipped")
    if status != 0 or not passed:
        raise NotTestedError("nothing is tested")


def check_result(result: object) -> None:
    if result is not None and result is not True:
        raise AssertionError("a test gave back a value, not None")


def asserts_something(text: str) -> bool:
    """Whether anything in the tests can fail but the program itself."""
    import ast

    words = ("assert", "raises", "fail", "warns", "check")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Return) and node.value is not None:
            return True
        if isinstance(node, ast.Call) and any(word in ast.unparse(node.func).lower() for word in words):
            return True
    return False


def does_something(text: str) -> bool:
    """Whether a statement does more than import, define or assign; what only a script runs does not count."""
    import ast

    idle = (ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) | (
        ast.Assign | ast.AnnAssign
    )
    for node in ast.parse(text).body:
        words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        script = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if not isinstance(node, idle) and not words and not script:
            return True
    return False
