"""Python in a text: find it, keep what belongs to the answer.

Follows the published post-processing of these benchmarks: the text between the first ```python fence and the next fence,
the longest run of lines that parses, and from it the imports, classes, functions and simple assignments. It differs where
that made correct programs fail: functions that return nothing (generators, helpers that work in place) are kept, and so
is what only the tests use. Runs nothing.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection

MAX_LINES = 100
_FENCE = re.compile(r"```(?:[a-zA-Z0-9_+-]*)[ \t]*\r?\n?(.*?)(?:```|\Z)", re.DOTALL)


def cut_python_fence(text: str) -> str:
    """What follows the first ```python line, up to the next fence; without such a line, everything up to a fence."""
    return text.split("```python\n", 1)[-1].split("```")[0]


def fenced_or_all(text: str) -> str:
    """The content of the first fenced block of any language (an unclosed one runs to the end), else the whole text."""
    match = _FENCE.search(text)
    return match[1] if match else text


def sanitize(text: str, roots: Collection[str] = ()) -> str:
    """The definitions in a text that may be full of other things; given roots, only what these names can reach."""
    lines = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip().split("\n")
    program = longest_program(lines[:MAX_LINES])
    tree = parse(program)
    assert tree is not None
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    definitions: dict[str, ast.stmt] = {}
    for node in tree.body:
        name = _defined_name(node)
        # The last definition of a name counts, but a stub does not replace a function that returns something.
        if name is not None and not (
            name in definitions and _is_stub(node) and not _is_stub(definitions[name])
        ):
            definitions[name] = node
    wanted = _reachable(roots, definitions) if roots else set(definitions)
    kept = [*imports, *(node for name, node in definitions.items() if name in wanted)]
    return "\n".join(_spell(node, program.split("\n")) for node in kept)


def longest_program(lines: list[str]) -> str:
    """The contiguous lines with the most non-empty ones that parse; the first such run if several do."""
    filled = [0]
    for line in lines:
        filled.append(filled[-1] + bool(line.strip()))
    runs = [(first, last) for first in range(len(lines)) for last in range(first + 1, len(lines) + 1)]
    runs.sort(key=lambda run: (filled[run[0]] - filled[run[1]], run))
    for first, last in runs:
        program = "\n".join(lines[first:last])
        if filled[last] > filled[first] and parse(program) is not None:
            return program
    return ""


def parse(program: str) -> ast.Module | None:
    """The syntax tree, or None where there is none to be had."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(program)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def mentioned_names(program: str) -> set[str]:
    """Every name a program uses."""
    tree = parse(program)
    return _mentioned(tree) if tree is not None else set()


def _spell(node: ast.stmt, lines: list[str]) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:  # a sum of hundreds of terms is nested too deep for it: the lines as they stand
        first = min((node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))))
        return "\n".join(lines[first - 1 : node.end_lineno])


def _defined_name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _is_stub(node: ast.stmt) -> bool:
    results = (ast.Return, ast.Yield, ast.YieldFrom)
    return isinstance(node, ast.FunctionDef) and not any(
        isinstance(inner, results) for inner in ast.walk(node)
    )


def _reachable(roots: Collection[str], definitions: dict[str, ast.stmt]) -> set[str]:
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += _mentioned(definitions[name]) if name in definitions else []
    return reached


def _mentioned(node: ast.AST) -> set[str]:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
