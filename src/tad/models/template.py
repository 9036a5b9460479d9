"""Chat templates: Jinja rendered in a process of its own, with limits on time and memory.

A template comes with a checkpoint, so it may loop for ever or fill the memory. Jinja's sandbox stops neither; ending a
process does. One worker per process renders all templates, in well under a millisecond each; templates known to be ours
need none. What a template may use is what transformers offers: `raise_exception`, `strftime_now`, `tojson`, `break`,
`continue` and `generation` blocks. Tools and documents are not passed.

The worker runs this file; it imports Jinja and nothing heavy.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tad.errors import TadError

SECONDS = 3.0  # for one rendering
_MEMORY = 1 << 30
_LARGEST = 1 << 24  # characters of a template, and of what it renders


class _Generation(Extension):
    """`{% generation %}` marks assistant turns for trainers; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


def render_here(template: str, values: dict[str, Any]) -> str:
    """Render in this process: for templates that are ours."""
    return str(_compile(template).render(**values))


def render(template: str, values: dict[str, Any]) -> str:
    """Render in the worker. `values` are what JSON can hold."""
    if len(template) > _LARGEST:
        raise TadError(f"the chat template has {len(template)} characters, more than {_LARGEST}")
    return _WORKER.render(template, values)


class _Worker:
    """A process that renders, started at the first call, after a fork, and anew after it was ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0

    def render(self, template: str, values: dict[str, Any]) -> str:
        request = json.dumps([template, values], default=str).encode() + b"\n"
        with self.lock:
            if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
                self._start()
            reply = json.loads(self._ask(request, SECONDS, "the chat template"))
        if "error" in reply:
            raise TadError(f"the chat template refuses this conversation: {reply['error']}")
        return str(reply["text"])

    def _start(self) -> None:
        # Isolated, since the working directory and this file's are no places to import from.
        code = (
            "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
        )
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", code, __file__, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program, which ends this process by closing its pipe
        )
        self._ask(b"", 60, "the process that renders chat templates")  # it says that it is there

    def _ask(self, request: bytes, seconds: float, who: str) -> bytes:
        """One line for one line. A worker that gives none, or whose answer nobody waited for, is ended."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], seconds)[0]:
                raise TadError(f"{who} does not end within {seconds:g} s")
            reply = self.process.stdout.readline()
            if not reply.endswith(b"\n"):
                raise BrokenPipeError
        except BaseException as error:
            self.process.kill()
            self.process.wait()
            self.process = None
            if isinstance(error, BrokenPipeError):
                raise TadError(f"{who} ended its process: it needs too much memory") from None
            raise
        return reply


_WORKER = _Worker()


def _serve() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    print(flush=True)  # ready
    for line in sys.stdin.buffer:
        try:
            template, values = json.loads(line)
            text = render_here(template, values)
            if len(text) > _LARGEST:
                raise TemplateError(f"it renders {len(text)} characters, more than {_LARGEST}")
            reply = {"text": text}
        except Exception as error:  # whatever a stranger's template raises is its refusal
            words = " ".join(str(error).split())[:300]
            reply = {"error": words or type(error).__name__}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _serve()
