"""What a sandbox uses, from a cgroup: here against a directory that stands in for the kernel's."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tad_sandbox import Job, Limits, Sandbox, SandboxError, bwrap, usage
from tad_sandbox.usage import Cgroup, find_cgroup


class Pretended(Cgroup):
    """The files that the kernel would make, and their removal with the directory."""

    def __init__(self, parent: Path, memory: int | None, processes: int | None) -> None:
        super().__init__(parent, memory, processes)
        (self.path / "cpu.stat").write_text("usage_usec 500000\nuser_usec 1\n")
        (self.path / "memory.events").write_text("oom 0\noom_kill 0\n")
        self.seen: dict[str, list[str]] = {}

    def _write(self, name: str, value: int) -> None:
        super()._write(name, value)
        if hasattr(self, "seen"):
            self.seen.setdefault(name, []).append(str(value))

    def remove(self) -> None:
        for file in self.path.iterdir():
            file.unlink()
        super().remove()


def test_a_cgroup_holds_the_limits_and_is_removed(tmp_path: Path) -> None:
    group = Pretended(tmp_path, 1 << 30, 32)
    assert int((group.path / "memory.max").read_text()) >= 1 << 30
    assert int((group.path / "pids.max").read_text()) >= 32
    assert group.cpu_seconds() == 0.5
    assert not group.ran_out_of_memory()
    (group.path / "memory.events").write_text("oom 1\noom_kill 3\n")
    assert group.ran_out_of_memory()
    group.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_cgroup_that_keeps_its_processes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage.time, "sleep", lambda _seconds: None)
    group = Cgroup(tmp_path, None, None)
    (group.path / "busy").write_text("x")
    with pytest.raises(SandboxError, match=str(group.path)):
        group.remove()


@pytest.mark.sandbox
def test_a_sandbox_runs_in_its_cgroup_from_its_first_instruction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[Pretended] = []

    def make(*arguments: object) -> Pretended:
        groups.append(Pretended(*arguments))  # type: ignore[arg-type]
        return groups[-1]

    monkeypatch.setattr(bwrap, "find_cgroup", lambda: tmp_path)
    monkeypatch.setattr(bwrap, "Cgroup", make)
    outcome = Sandbox().run("x = 1", "assert x == 1")
    assert outcome.passed, outcome
    assert len(groups) == 2  # the sandbox's own check, and the program
    for group in groups:
        assert len(group.seen["cgroup.procs"]) == 2  # bubblewrap and the first process inside
        assert group.seen["cgroup.kill"] == ["1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sandbox
def test_cpu_time_and_memory_are_the_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Pretended):
        def cpu_seconds(self) -> float:
            return 100.0

    monkeypatch.setattr(bwrap, "find_cgroup", lambda: tmp_path)
    monkeypatch.setattr(bwrap, "Cgroup", Busy)
    waiting = Sandbox(Limits(cpu_seconds=1))
    assert waiting._run(Job("import time\ntime.sleep(25)", "")).reason == "CPU limit"


def test_a_place_without_controllers_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu io\n")
    monkeypatch.setenv("TAD_CGROUP", str(tmp_path))
    find_cgroup.cache_clear()
    try:
        with pytest.raises(SandboxError, match="TAD_CGROUP"):
            find_cgroup()
    finally:
        find_cgroup.cache_clear()


def test_cpu_time_counts_what_was_waited_for() -> None:
    def spin() -> None:
        end = os.times().user + 0.3
        while os.times().user < end:
            pass

    before = usage.cpu_seconds(os.getpid())
    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()
    assert usage.cpu_seconds(os.getpid()) >= before + 0.2
