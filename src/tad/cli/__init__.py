"""`tad <verb>`: thin commands. Each module here reads options, calls a room of the package and prints the answer.

Rooms are imported inside the commands, so that `tad --help` does not wait for torch.
"""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.core

import tad
from tad.errors import TadError, printable
from tad.plugins import additions, plugins, resolve

# `tad --help` shows its commands in these groups, and those of plugins under the last heading.
GROUPS = {
    "Look at a model": ("demo", "generate", "chat", "serve", "info", "decoders"),
    "Make a student": ("init", "run", "recipes", "collect", "trajectories", "window", "distill"),
    "Measure it": (
        "eval",
        "compare",
        "points",
        "report",
        "throughput",
        "regrade",
        "tasks",
        "grade",
    ),
    "Other checkpoints": ("convert", "export"),
    "Laboratory": (),
}
_START = """\
Start here (a bundled model of 3M parameters; nothing to download, no GPU):
  tad chat nano-llada --adapter nano-llada-ltr    ask a distilled model, watch it decode
  tad demo                                        the whole method, in some minutes
  tad init --data FILE.jsonl --model nano-llada   a recipe for your own questions
"""


class _Commands(typer.core.TyperGroup):
    """The program, whose help has its commands in groups, after where to start."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write(_START)
        named = {name for names in GROUPS.values() for name in names}
        rest = tuple(name for name in self.list_commands(ctx) if name not in named)
        for title, names in GROUPS.items():
            if known := [name for name in names or rest if name in self.commands]:
                with formatter.section(title):
                    formatter.write_dl([(name, _first_sentence(self.commands[name])) for name in known])


def _first_sentence(command: Any) -> str:
    return " ".join((command.help or "").split()).split(". ")[0].rstrip(".")


app = typer.Typer(
    name="tad",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


# In the order `tad --help` lists them: a module, and its functions that are commands.
COMMANDS = {
    "models": ("info", "export", "demo"),
    "decode": ("generate",),
    "decoders": ("decoders",),
    "tasks": ("tasks", "grade"),
    "recipes": ("recipes",),
    "trajectories": ("collect", "trajectories", "window"),
    "train": ("convert", "distill"),
    "evaluate": ("evaluate", "regrade", "points", "compare"),
    "throughput": ("throughput",),
    "run": ("init", "run"),
    "report": ("report",),
    "serve": ("serve",),
    "chat": ("chat",),
}
_VERBS = {"evaluate": "eval"}  # where a command is not called like its function

for _module, _functions in COMMANDS.items():
    for _name in _functions:
        app.command(_VERBS.get(_name, _name))(getattr(import_module(f"tad.cli.{_module}"), _name))
_own = {_VERBS.get(name, name) for names in COMMANDS.values() for name in names}
with suppress(TadError):  # `main` says it
    for _name, _place in additions("COMMANDS").items():
        if _name not in _own:
            app.command(_name)(resolve(_place))


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tad {tad.__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fast and accurate decoding for diffusion language models (LLaDA, Dream)."""


_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST = 2000  # characters of an error
_UNUSABLE = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
)


def main() -> None:
    """Run the command line; a TadError, a wrong option, a full disk or an unusable path becomes one line and exit code 2,
    Ctrl-C 130."""
    try:
        plugins()
        if code := app(args=sys.argv[1:] or ["--help"], standalone_mode=False):
            sys.exit(code)
    except _UsageError as error:
        _fail(_explain_usage(error))
    except TadError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        if (line := explain_machine(error)) is None:
            raise
        _fail(line)


def explain_machine(error: Exception) -> str | None:
    """One line for what the machine refuses (a full disk, a path that cannot be used); None for every other error."""
    number = error.errno if isinstance(error, OSError) else None
    # safetensors wraps the system's error into its own, with its text
    if number in _FULL or "No space left on device" in str(error):
        return "the disk is full; free some space and run the same command again"
    if isinstance(error, OSError) and number in _UNUSABLE and error.filename is not None:
        return f"{error.filename}: cannot be used ({error.strerror}); give another path"
    return None


# Of typer, or of click in its older releases.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _explain_usage(error: Any) -> str:
    """A wrong option or value in a line, with the command whose help has the right ones."""
    command = f"{error.ctx.command_path.replace('python -m tad', 'tad')} " if error.ctx else "tad "
    return f"{error.format_message().rstrip('.')}; {command}--help lists what there is"


def _fail(line: str) -> NoReturn:
    line = printable(" ".join(line.split()))
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)
