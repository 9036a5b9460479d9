"""The tests' process: run the tests against the program in the other process, and say why they fail.

Tests of a script (HumanEval, MBPP) find the program's names as if they stood below it; tests of a module (KodCode) import
it as `solution`. Plain test functions are called here; modules that need more (classes, `unittest`, fixtures, parameters,
async tests) are run by pytest where the sandbox holds it, and refused where it does not. A test that gives back
anything but None or True fails, and so does a module that asserts nothing.
"""

from __future__ import annotations

import builtins
import os
import sys
import types

from tad_sandbox.inside.channel import Gone
from tad_sandbox.inside.peer import Peer
from tad_sandbox.inside.proxies import find_super, is_proxy

TYPE_CHECKING = False  # `typing` takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import Any

_PLAIN_FLAGS = ~(0x04 | 0x20 | 0x80 | 0x200)  # no *args, generator, coroutine, async generator
_OUT_OF_PLAIN = ("setup_module", "setup_function", "teardown_module", "teardown_function", "pytestmark")


class NotTestedError(Exception):
    """The tests cannot all be run, or test nothing."""


class Namespace(dict):
    """Globals of a script's tests: their own names first, then the program's, then the built-in ones.

    A name of the program hides a built-in one only where it is the one name of the program that the tests use, and
    never a module of the standard library: otherwise a program could bring its own `abs`, `all` or `math.isclose`.
    """

    def __init__(self, peer: Peer, names: list, code: types.CodeType, text: str) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self.peer, self.names, self.text = peer, set(names), text
        used = self.names & set(_names_in(code))
        self.hiding = used if len(used) == 1 else set()

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name not in self.hiding:
            raise KeyError(name)
        if name in self.names and name in sys.stdlib_module_names and f"{name}." in self.text:
            return __import__(name)
        value = get(self.peer, name)
        if callable(value):  # asked for once; other values may change
            self[name] = value
        return value


class Solution(types.ModuleType):
    """The program as a module of the tests."""

    def __init__(self, peer: Peer) -> None:
        super().__init__("solution")
        self.__dict__["_peer"] = peer

    def __getattr__(self, name: str) -> Any:
        peer = self.__dict__["_peer"]
        if name == "__all__":
            return [name for name in peer.request("names") if not name.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return get(peer, name)
        except KeyError:
            raise AttributeError(f"module 'solution' has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self.__dict__["_peer"].request("set", name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__["_peer"].request("delete", name)


def get(peer: Peer, name: str) -> Any:
    value = peer.request("get", name)
    if is_proxy(value) and value._tad_.kind == "c":
        peer.tests_classes = True
    return value


def describe(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def run_trial(peer: Peer, program: str, tests: str, as_module: bool) -> str:
    """Why the job fails; empty if it passes."""
    try:
        names = peer.request("exec", program)
        sys.modules["solution"] = Solution(peer)
    except Gone:
        raise
    except BaseException as error:
        return f"program: {describe(error)}"
    try:
        if "random.seed" in tests:
            share_seeds(peer)
        if as_module:
            run_module(peer, tests)
        else:
            code = compile(tests, "<tests>", "exec")
            exec(code, Namespace(peer, names, code, tests))
    except Gone:
        raise
    except NotTestedError as error:
        return f"tests: {error}"
    except BaseException as error:
        return f"tests: {describe(error)}"
    if peer.gone:  # and the tests went on nevertheless
        raise Gone
    if peer.failed_callback is not None:
        return f"tests: {describe(peer.failed_callback)}"
    return ""


def share_seeds(peer: Peer) -> None:
    """A seed that the tests set is the program's too."""
    import random

    seed_here = random.seed

    def seed(*arguments: Any) -> None:
        seed_here(*arguments)
        peer.request("seed", *arguments)

    random.seed = seed  # type: ignore[assignment]


def run_module(peer: Peer, text: str) -> None:
    module = sys.modules["tests"] = types.ModuleType("tests")
    module.__dict__["super"] = find_super
    exec(compile(text, "<tests>", "exec"), module.__dict__)
    if not asserts_something(text):
        raise NotTestedError("nothing is tested")
    tests = {
        name: value for name, value in vars(module).items() if name.startswith("test") and callable(value)
    }
    if any(not isinstance(test, types.FunctionType | type) and is_proxy(test) for test in tests.values()):
        raise NotTestedError("a test is a function of the program")
    if not needs_pytest(module, tests, text):
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
    run_pytest(pytest, module)


def needs_pytest(module: types.ModuleType, tests: dict[str, Any], text: str) -> bool:
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
    for name, value in vars(module).items():
        own = isinstance(value, type) and value.__module__ == "tests"
        if own and (name.startswith("Test") or issubclass(value, case)):
            return True
    return "fixture" in text or "pytest.mark" in text or any(name in vars(module) for name in _OUT_OF_PLAIN)


def run_pytest(pytest: Any, module: types.ModuleType) -> None:
    """Collect the module as it stands in memory, run all of it, and raise for the first failure."""
    failures: list[BaseException] = []
    passed: list[str] = []

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
            if isinstance(result, types.CoroutineType):
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
            elif report.passed and call.when == "call":
                passed.append(item.name)

    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        "--noconftest",
        "--capture=sys",
        "-c",
        "/dev/null",
    ]
    status = pytest.main([*options, "--rootdir=/", "--tb=no", "--no-header"], plugins=[Run()])
    if failures:
        raise failures[0]
    if status != 0 or not passed:
        raise NotTestedError("nothing is tested")


def check_result(result: object) -> None:
    if result is not None and result is not True:
        raise AssertionError(f"a test gave back {type(result).__name__!r}, not None")


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


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
