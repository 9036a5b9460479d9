"""What other packages add to `tad`: tasks, recipes, commands and kinds of directories in a report.

A plugin is a module that a package names under the entry points of the group `tad.plugins`:

    [project.entry-points."tad.plugins"]
    mine = "my_package.tad_plugin"

It may have any of

    TASKS       task -> "module:factory", imported when the task is asked for
    RECIPES     the directory of its recipes, which are then found by name
    COMMANDS    verb -> "module:function", a command as typer has it
    RECIPE_KEYS verb -> the keys that only recipes of that verb have
    REPORTED    file name -> "module:function": a directory with this file is read for the report by that function, as
                `tad.evaluation.report.gather` describes it

Plugins are imported at every call of `tad`, so they name what they add and import nothing heavy. The nano world and the
laboratory, `tad_lab`, are such plugins; they are also found in a checkout whose entry points were written before they were
there.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tad.errors import TadError

GROUP = "tad.plugins"
_BESIDE = {"tad.tasks.nano.plugin": "nano", "tad_lab.plugin": "lab"}  # module -> name, in a checkout


@cache
def plugins() -> list[ModuleType]:
    """The plugins of this installation, each once."""
    named = {entry.value: entry.name for entry in entry_points(group=GROUP)}
    for module, name in _BESIDE.items():
        if find_spec(module.partition(".")[0]) is not None:
            named.setdefault(module, name)
    found = []
    for module, name in named.items():
        try:
            found.append(import_module(module))
        except ImportError as error:
            raise TadError(
                f"plugin '{name}' ({module}): cannot be imported ({error}); repair or uninstall its package"
            ) from error
    return found


def additions(kind: str) -> dict[str, Any]:
    """What all plugins have under one of the names above, together."""
    return {key: value for plugin in plugins() for key, value in getattr(plugin, kind, {}).items()}


def recipe_folders() -> list[Path]:
    return [Path(plugin.RECIPES) for plugin in plugins() if hasattr(plugin, "RECIPES")]


def resolve(place: str) -> Any:
    """The function or class of 'module:name'."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
