"""The graph of imports, read from the source: no cycle, imports inside functions included, and rooms import earlier rooms only.

Imports for type checkers alone do not count. What a package's `__init__` imports counts where the package itself is imported
from, not wherever one of its modules is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
ROOMS = (
    "models",
    "runs",
    "tasks",
    "decoding",
    "trajectories",
    "training",
    "evaluation",
    "pipeline",
    "serving",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Names of modules that the code under a node imports, whenever it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in {package}"
            home = str(node.module)
            inner = [f"{home}.{name.name}" for name in node.names]
            yield from (name for name in inner if name in modules())
            if any(name not in modules() for name in inner):
                yield home
        elif is_for_type_checkers(node):
            assert isinstance(node, ast.If)
            yield from (found for other in node.orelse for found in imports(ast.Module([other], []), package))
        else:
            yield from imports(node, package)


@cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules of this repository that it imports."""
    found = {}
    for name, path in modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = {other for other in imports(tree, name) if other in modules()} - {name}
    return found


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of a cycle in order; none where there is none."""
    done: set[str] = set()

    def visit(name: str, line: list[str]) -> list[str]:
        if name in line:
            return [*line[line.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges[name]):
            if cycle := visit(other, [*line, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in edges if (cycle := visit(name, []))), [])


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_through_others() -> None:
    assert find_cycle(graph()) == []


def test_a_room_imports_only_from_earlier_rooms() -> None:
    for name, others in graph().items():
        room = name.removeprefix("tad.").partition(".")[0]
        if name.startswith("tad.") and room in ROOMS:
            for other in others:
                home = other.removeprefix("tad.").partition(".")[0]
                allowed = home not in (*ROOMS, "cli") or (
                    home in ROOMS and ROOMS.index(home) <= ROOMS.index(room)
                )
                assert allowed, f"{name} imports {other}"


def test_tad_does_not_import_the_laboratory_and_the_sandbox_imports_neither() -> None:
    for name, others in graph().items():
        package = name.partition(".")[0]
        for other in others:
            home = other.partition(".")[0]
            if package == "tad":
                assert home != "tad_lab", f"{name} imports {other}"
            if package == "tad_sandbox":
                assert home == "tad_sandbox", f"{name} imports {other}"
