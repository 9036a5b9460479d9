"""`tad <verb>`: thin commands. Each module here reads options, calls a room of the package and prints the answer.

Rooms are imported inside the commands, so that `tad --help` does not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from tad.errors import TadError

app = typer.Typer(
    name="tad",
    help="Fast and accurate decoding for diffusion language models (LLaDA, Dream).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


ROOMS = (
    "models",
    "decode",
    "tasks",
    "trajectories",
    "train",
    "evaluate",
    "harness",
    "run",
    "report",
    "serve",
    "chat",
)  # in the order `tad --help` lists their commands

for _room in ROOMS:
    import_module(f"tad.cli.{_room}").add_commands(app)


def main() -> None:
    """Run the command line; a TadError becomes one line on stderr and exit code 2, Ctrl-C becomes 130."""
    try:
        app()
    except TadError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
