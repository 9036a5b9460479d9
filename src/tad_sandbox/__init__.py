"""Run programs that nobody has read, without letting them near the machine or near their verdict.

`Sandbox().run(program, tests)` says whether the tests pass. Containment is bubblewrap's: no network, an empty
environment, a read-only tree with nothing but the interpreter, scratch space in memory, own user, process, network and
IPC namespaces, a filter of system calls (`seccomp`), and limits on memory, time, processes, files, sockets and output
(`monitor`, `usage`). Where bubblewrap cannot be used it refuses; only `contained=False` runs programs next to your files.
The tests run in another process than the program (`inside`), and the program has no way to their verdict.
What is promised and what is not: README.md.
"""

from tad_sandbox.bwrap import Job, Sandbox
from tad_sandbox.errors import NoSandboxError, SandboxError
from tad_sandbox.monitor import Limits, Outcome

__all__ = ["Job", "Limits", "NoSandboxError", "Outcome", "Sandbox", "SandboxError"]
