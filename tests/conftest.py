"""What every test shares: patient property tests, weights that are the same at every run, a browser, and the rule for tests
that run programs in the sandbox.

A test that takes the fixture `sandbox` or carries the mark `sandbox` needs bubblewrap. Where bubblewrap is missing or does
not work it is skipped, and the run says so at its end. For all other tests bubblewrap is hidden, so that a test
which lacks its mark fails on every machine, not only on the bare one.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tad_sandbox import Sandbox, SandboxError, bwrap

if find_spec("hypothesis") is not None:  # not where only the GPU tests run
    from hypothesis import HealthCheck, settings

    # No deadline: the machines that run these are often busy with something else.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")

NEEDS_SANDBOX = "needs bubblewrap (bwrap)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "sandbox" in getattr(item, "fixturenames", ()):
            item.add_marker("sandbox")
    marked = [item for item in items if item.get_closest_marker("sandbox")]
    if marked:
        try:
            Sandbox().check()
        except SandboxError as error:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{NEEDS_SANDBOX}: {error}"))


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which also draw weights
def pytest_runtest_setup() -> None:
    """Weights are the same at every run: drawn anew, once in some hundred runs two forwards that agree to rounding would lie on
    either side of a threshold."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: the one in TAD_CHROMIUM or on the path, else Playwright's own (`playwright install chromium`)."""
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (extra `long`)")
    here = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    path = os.environ.get("TAD_CHROMIUM") or next(filter(None, here), None)
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", *quiet]
    with api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=path, args=flags)
        except api.Error:
            pytest.skip("needs Chromium on the path, in TAD_CHROMIUM or from `playwright install chromium`")
        yield found
        found.close()


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return Sandbox()


@pytest.fixture(autouse=True)
def _bubblewrap_is_for_marked_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("sandbox") is None:
        monkeypatch.setattr(bwrap, "SYSTEM_PATH", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped for want of what, and how to get the sandbox."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ").partition(";")[0]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if not reasons:
        return
    terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5} {reason}")
    if any(reason.startswith(NEEDS_SANDBOX) for reason in reasons):
        terminalreporter.line("To run the sandbox tests, install bubblewrap:")
        terminalreporter.line("    apt install bubblewrap      # Debian, Ubuntu")
        terminalreporter.line("    dnf install bubblewrap      # Fedora, RHEL")
