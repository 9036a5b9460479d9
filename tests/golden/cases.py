"""The parity data as Python objects: cases with their arrays, the tiny checkpoints, and pytest parameters.

The set is `tests/golden/data`, or the directory named by TAD_GOLDEN (same format: some of the folders in `FOLDERS`, each
with cases.json, meta.json, arrays.safetensors, checkpoint/ and, in the first two, student/). A file that is named but not
there raises: a parity set is never skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tad.models import MaskedDiffusionModel, family_of

ROOT = Path(os.environ.get("TAD_GOLDEN") or Path(__file__).parent / "data").resolve()

# Which module runs a kind of case. A kind that stands in neither table fails test_claims.py.
CLAIMED = {
    "logits": "test_logits.py",
    "decode": "test_decode.py",
    "tad_loss": "test_losses_golden.py",
    "dparallel_loss": "test_losses_golden.py",
    "d3llm_loss": "test_losses_golden.py",
    "d2f_loss": "test_losses_golden.py",
    "fdv2_loss": "test_block_losses.py",
    "sdar_loss": "test_block_losses.py",
    "llada2_loss": "test_block_losses.py",
    "block_decode": "test_block_decode.py",
    "aup": "test_aup.py",
    "tpf": "test_tpf.py",
}
CLAIMED_LATER: tuple[str, ...] = ()

BLOCK_FOLDERS = ("fastdllm_v2", "sdar", "llada2")  # block-diffusion families
FOLDERS = ("llada", "dream", *BLOCK_FOLDERS)

Case = dict[str, Any]


def families() -> list[str]:
    """The families the set has; at least one."""
    found = [name for name in FOLDERS if (ROOT / name).is_dir()]
    if not found:
        raise FileNotFoundError(f"{ROOT}: no parity set here (expected one of {', '.join(FOLDERS)})")
    return found


def need(path: Path) -> Path:
    """The path itself, which must exist."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing from the parity set")
    return path


@cache
def meta(family: str) -> dict[str, Any]:
    """Special token ids, the prompts and the versions the set was made with."""
    return json.loads(need(ROOT / family / "meta.json").read_text())


@cache
def load_cases(family: str) -> list[Case]:
    """All cases of a family. Those with stored arrays have them in `tensors`, by their names inside the case."""
    folder = ROOT / family
    document = json.loads(need(folder / "cases.json").read_text())
    arrays = load_file(need(folder / document["arrays"]))
    cases = []
    for case in document["cases"]:
        name = case.get("arrays") or case.get("inputs", {}).get("arrays")
        tensors = {
            key.partition(".")[2]: value for key, value in arrays.items() if key.partition(".")[0] == name
        }
        if name and not tensors:
            raise KeyError(f"{folder}: case {case['name']} names arrays '{name}', which are not stored")
        cases.append({**case, "family": family, "tensors": tensors})
    return cases


def kind(case: Case) -> str:
    """'logits', 'decode' or 'block_decode', or the strategy itself for the losses and for anything new."""
    if case["strategy"] == "logits":
        return "logits"
    if "output_ids" not in case.get("expected", {}):
        return case["strategy"]
    return "block_decode" if case["family"] in BLOCK_FOLDERS else "decode"


def parameters(keep: str | Callable[[Case], bool], family: str | None = None) -> list[Any]:
    """pytest parameters, one per case of a kind (or for which `keep` holds); quirk cases are marked and named so."""
    chosen = [
        case
        for name in ([family] if family else families())
        for case in load_cases(name)
        if (kind(case) == keep if isinstance(keep, str) else keep(case))
    ]
    return [
        pytest.param(
            case,
            id=case["name"] + ("[quirk]" if case["quirk"] else ""),
            marks=[pytest.mark.quirk] if case["quirk"] else [],
        )
        for case in chosen
    ]


@cache
def model(family: str, student: bool = False) -> MaskedDiffusionModel:
    """The tiny checkpoint in fp32, in eval mode; `student` replaces the overlay's tensors. Shared: do not train it."""
    checkpoint = need(ROOT / family / "checkpoint")
    declared = json.loads(need(checkpoint / "config.json").read_text())["model_type"]
    # SDAR's config asks for FlexAttention, which is no help on a CPU.
    kind_of = family_of(declared).model_class
    loaded = kind_of.from_pretrained(checkpoint, dtype="float32", attn_implementation="sdpa").eval()
    if student:
        overlay = load_file(need(ROOT / family / "student" / "overlay.safetensors"))
        unexpected = loaded.load_state_dict(overlay, strict=False).unexpected_keys
        if unexpected:
            raise KeyError(f"{family}: the student overlay has unknown tensors {unexpected}")
    return loaded
