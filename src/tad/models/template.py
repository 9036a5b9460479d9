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
import time
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
            reply = self._ask(request)
        if reply is None:
            raise TadError("the chat template ended its renderer: it needs too much memory")
        found = json.loads(reply)
        if "error" in found:
            raise TadError(f"the chat template refuses this conversation: {found['error']}")
        return str(found["text"])

    def _ask(self, request: bytes) -> bytes | None:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            return self._read(process.stdout.fileno())
        except BrokenPipeError:
            self._end()
            return None
        except BaseException:
            self._end()
            raise

    def _read(self, pipe: int) -> bytes | None:
        reply, until = bytearray(), time.monotonic() + SECONDS
        while not reply.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TadError(f"the chat template does not end within {SECONDS:g} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                self._end()
                return None
            reply += part
        return bytes(reply)

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            # Isolated, since the working directory and this file's are no places to import from.
            code = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
            path = [entry for entry in sys.path if entry]
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", code, __file__, *path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the program, which ends this process by closing its pipe
            )
            self.owner = os.getpid()
            assert self.process.stdout is not None
            if not select.select([self.process.stdout], [], [], 60)[0]:
                self._end()
                raise TadError("the process that renders chat templates does not start")
            self.process.stdout.readline()
        return self.process

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


_WORKER = _Worker()


def _serve() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    print("ready", flush=True)
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
