"""The run record (run.json) of a training, an evaluation or a chain: what was run, with what, from which commit, call by call;
and what else a training leaves beside it, and under which names."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import tad
from tad.errors import TadError
from tad.files import write_json

RECORD, LOG = "run.json", "log.jsonl"
ADAPTER, MODEL = "adapter", "model"  # directories of what was trained
_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "peft")


def describe_machine() -> dict[str, Any]:
    """Versions, device and commit of this process."""
    versions = {"tad": tad.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})"
    return {
        "versions": versions,
        "device": device,
        "threads": torch.get_num_threads(),
        "commit": find_commit(),
    }


def find_commit() -> str | None:
    """The commit of the source tree this package runs from, `+` where it has changes; None outside a repository."""
    root = Path(tad.__file__).parent

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)

    try:
        head = git("rev-parse", "HEAD")
    except FileNotFoundError:  # no git on this machine
        return None
    if head.returncode:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no", "--", str(root)).stdout.strip()
    return head.stdout.strip() + ("+" if changed else "")


def write_record(directory: Path, recipe: dict[str, Any], **facts: Any) -> None:
    """Add a call to the run's record: the recipe, the machine, and what the call reports about itself."""
    record = read_record(directory) or {"calls": []}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    call = {"time": stamp, "argv": sys.argv[1:], **describe_machine(), **facts}
    write_json(directory / RECORD, {**record, "calls": [*record["calls"], call], "recipe": recipe})


def complete_record(directory: Path, **facts: Any) -> None:
    """Add what is known at the end of the last call."""
    record = read_record(directory)
    record["calls"][-1] |= facts
    write_json(directory / RECORD, record)


def last_call(record: dict[str, Any]) -> dict[str, Any]:
    """What the last call of a record says of itself; empty where there is none."""
    return dict((record.get("calls") or [{}])[-1])


def read_record(directory: Path) -> dict[str, Any]:
    """A run's record: `recipe`, the last call's, and `calls`; empty where there is none."""
    path = directory / RECORD
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_bytes())
        if isinstance(record["calls"], list):
            return dict(record)
    except (ValueError, KeyError, TypeError):
        pass
    raise TadError(f"{path}: is damaged; remove it, the run itself does not need it")


def find_result(directory: Path) -> Path | None:
    """The adapter or model of a finished training; None before that."""
    return next((directory / name for name in (ADAPTER, MODEL) if (directory / name).is_dir()), None)
