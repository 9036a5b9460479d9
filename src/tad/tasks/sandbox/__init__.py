"""Run programs that nobody has read, without letting them near the machine.

`Sandbox().run(program, tests)` says whether the tests pass. Containment is bubblewrap's: no network, an empty
environment, a read-only tree with nothing but the interpreter, scratch space in memory, own user, process, network and
IPC namespaces, and limits on memory, time, processes, files and output. Where bubblewrap cannot be used it refuses;
only `contained=False` runs programs next to your files. It protects the machine from the program. It does not stop a
program from gaming tests that it shares an interpreter with (see `runner.py`).
"""

from tad.tasks.sandbox.box import Job, Limits, Outcome, Sandbox, runner_source

__all__ = ["Job", "Limits", "Outcome", "Sandbox", "runner_source"]
