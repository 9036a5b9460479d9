"""Python in a text: find it, keep what belongs to the answer.

Follows the published post-processing of these benchmarks: the text between the first ```python fence and the next fence,
the longest run of lines that parses, and from it the imports, classes, simple assignments and functions that return
something. Runs nothing.
"""

from __future__ import annotations

import ast
import re
import warnings

MAX_LINES = 100
_FENCE = re.compile(r"```(?:[a-zA-Z0-9_+-]*)[ \t]*\r?\n?(.*?)(?:```|\Z)", re.DOTALL)


def cut_python_fence(text: str) -> str:
    """What follows the first ```python line, up to the next fence; without such a line, everything up to a fence."""
    return text.split("```python\n", 1)[-1].split("```")[0]


def first_fence(text: str) -> str | None:
    """The content of the first fenced block of any language; an unclosed one runs to the end. None if there is none."""
    match = _FENCE.search(text)
    return match[1] if match else None


def sanitize(text: str, entry_point: str | None = None) -> str:
    """The definitions in a text that may be full of other things; with an entry point, only what it can reach."""
    lines = text.replace("\t", "    ").replace("\r\n", "\n").replace("\r", "\n").strip().split("\n")
    tree = parse(longest_program(lines[:MAX_LINES]))
    assert tree is not None
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    definitions: dict[str, ast.stmt] = {}
    for node in tree.body:
        name = _defined_name(node)
        if name is not None:
            definitions[name] = node
    wanted = _reachable(entry_point, definitions) if entry_point else set(definitions)
    kept = [*imports, *(node for name, node in definitions.items() if name in wanted)]
    return "\n".join(ast.unparse(node) for node in kept)


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


def _defined_name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.FunctionDef):
        returns = any(isinstance(inner, ast.Return) for inner in ast.walk(node))
        return node.name if returns else None
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _reachable(entry_point: str, definitions: dict[str, ast.stmt]) -> set[str]:
    reached: set[str] = set()
    waiting = [entry_point]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += _mentioned(definitions[name]) if name in definitions else []
    return reached


def _mentioned(node: ast.stmt) -> set[str]:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
