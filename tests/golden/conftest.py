"""Parity runs: the `quirk` marker, the set in the header, and quirk cases counted apart at the end."""

from __future__ import annotations

import cases
import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quirk: parity case that pins a doubtful behaviour of its reference")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        (outcome, report)
        for outcome in ("passed", "failed", "xfailed", "xpassed")
        for report in terminalreporter.stats.get(outcome, [])
        if "golden/" in report.nodeid and report.when == "call"
    ]
    if not reports:
        return
    quirks = [outcome for outcome, report in reports if "[quirk]" in report.nodeid]
    plain = [outcome for outcome, report in reports if "[quirk]" not in report.nodeid]
    terminalreporter.write_sep("-", f"parity set {cases.ROOT}")
    for label, outcomes in (("plain cases", plain), ("quirk cases", quirks)):
        counts = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
        terminalreporter.write_line(f"{label}: {counts or 'none run'}")
