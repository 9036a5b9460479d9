"""The first code inside the sandbox: limit this process, run a program and its tests, report how it went.

It is passed to the interpreter as text, imports only the standard library, and is never imported by the package.
The job arrives on a pipe: a length and a JSON object, then a nonce that stays unread until the tests are done. A report
counts only with that nonce, so nothing that a program prints, and no way of exiting early, is taken for a verdict.
What it cannot do: program and tests share one interpreter, so a program written against this very file can lie.
"""

import contextlib
import json
import os
import resource
import sys
import types


def read_exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            raise EOFError("the job ended early")
        data += part
    return data


def set_limits(limits: dict) -> None:
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_seconds"] and limits["cpu_seconds"] + 1,
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["file_size"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        if value is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(hard, value)
            # Past the lower CPU limit comes a signal that tells the parent why; past the upper one SIGKILL.
            soft = max(value - 1, 1) if kind == resource.RLIMIT_CPU else value
            resource.setrlimit(kind, (soft, value))


def describe(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def does_something(source: str) -> bool:
    """Whether a statement does more than import, define or assign; what only a script runs does not count."""
    import ast  # seldom needed, and slower to import than most programs are to run

    idle = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
    )
    for node in ast.parse(source).body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        script = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if not isinstance(node, idle) and not text and not script:
            return True
    return False


def run_job(job: dict) -> str:
    """Why the job fails; empty if it passes."""
    solution = types.ModuleType("solution")
    space = solution.__dict__
    sys.modules["solution"] = solution  # dataclasses look their module up
    try:
        exec(compile(job["program"], "<program>", "exec"), space)
    except BaseException as error:
        return f"program: {describe(error)}"
    if job["as_module"]:
        space = {"__name__": "tests"}
    try:
        exec(compile(job["tests"], "<tests>", "exec"), space)
        if job["as_module"]:
            calls = [name for name, value in space.items() if name.startswith("test_") and callable(value)]
            if not calls and not ("assert" in job["tests"] and does_something(job["tests"])):
                return "tests: nothing is tested"
            for name in calls:
                space[name]()
    except BaseException as error:
        return f"tests: {describe(error)}"
    return ""


def main() -> None:
    job_pipe, report_pipe = int(sys.argv[1]), int(sys.argv[2])
    job = json.loads(read_exactly(job_pipe, int(read_exactly(job_pipe, 16))))
    sys.argv = [""]
    sys.path += job["paths"]
    set_limits(job["limits"])
    failure = run_job(job)
    with contextlib.suppress(Exception):  # whatever the program has done to its output decides nothing
        print(end="", flush=True)
    nonce = read_exactly(job_pipe, 32).decode()
    report = {"nonce": nonce, "passed": not failure, "reason": failure or "passed"}
    os.write(report_pipe, json.dumps(report).encode() + b"\n")
    os._exit(0)


main()
