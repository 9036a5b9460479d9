"""Small directories as the commands leave them, made with the commands' own writers and invented numbers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tad.decoding import get_decoder
from tad.decoding.decoders import describe, parameters
from tad.evaluation import Results, Row
from tad.evaluation.results import RunMeta
from tad.models import LM, load
from tad.runs.fingerprint import fingerprint_tokenizer
from tad.runs.record import write_record
from tad.tasks import Verdict
from tad.training.recipe import DistillRecipe
from tad.training.trainer import StepLog
from tad.trajectories.store import ShardStats, StoreMeta, Trajectory, TrajectoryStore
from tad.trajectories.window_report import Decay, Window, WindowReport, write_report

LENGTH = 64
ATTACK = '<script>alert("x")</script><img src=x onerror=alert(1)>'
TASKS = ("nano-word", "nano-math")
BASE = {
    "one-by-one": (0.8, 0.86),
    "fast-dllm": (3.2, 0.855),
    "tad": (4.2, 0.84),
}  # speed and share of right answers


def speller() -> LM:
    return load("nano-llada", weights=False)


def write_run(
    folder: Path,
    decoder: str,
    speed: float,
    right: float,
    adapter: str | None = None,
    examples: int = 24,
    tasks: Sequence[str] = TASKS,
    answer: str = "Ana starts with 12. Then 12 + 30 = 42.\n#### 42",
    model: str = "nano-llada",
    keep_ids: bool = True,
    graded: bool = True,
    whole: bool = True,
    seed: int = 0,
    split: str = "test",
    **settings: Any,
) -> Results:
    """An evaluation run whose rows are this fast and this often right."""
    lm = speller()
    chosen = get_decoder(decoder, "llada", **settings)
    meta = RunMeta(
        model="f00d" if model == "nano-llada" else f"of-{model}",
        adapter=None if adapter is None else f"of {adapter}",
        tokenizer=fingerprint_tokenizer(lm),
        family="llada",
        dtype="float32",
        decoder={"name": decoder, **describe(chosen), **parameters(chosen)},
        gen_length=LENGTH,
        seed=seed,
        tasks=[_facts(task, examples, split) for task in tasks],
        source={"model": model, "adapter": adapter},
        code="0.1.0",
    )
    draws = np.random.default_rng(
        zlib.crc32(f"{decoder} {settings} {adapter and Path(adapter).parts[-2:]}".encode())
    )
    rows = [
        _row(lm, task, number, speed, right, answer, keep_ids, draws)
        for task in tasks
        for number in range(examples)
    ]
    rows = rows if graded else [row.judged(Verdict(None, None, None)) for row in rows]  # type: ignore[arg-type]
    results = Results.open_or_create(folder, meta)
    with results.writing():
        write_record(folder, {"model": model}, rows_before=0)
        results.add(rows if whole else rows[: len(rows) // 2])
        results.close([row.key for row in rows])
    return results


def _facts(task: str, examples: int, split: str) -> dict[str, Any]:
    return {
        "name": task, "split": split, "limit": None, "sample": None, "templates": ["tad"],
        "options": {"size": examples}, "examples": examples, "digest": f"{task}-{split}-{examples}",
    }  # fmt: skip


def _row(
    lm: LM, task: str, number: int, speed: float, right: float, answer: str, keep: bool, draws: Any
) -> Row:
    ids = [*lm.encode_text(answer)[: LENGTH - 1], lm.tokens.eos]
    tokens = len(ids)
    forwards = max(1, round(tokens / speed * draws.uniform(0.85, 1.15)))
    order = np.argsort(np.arange(tokens) + draws.normal(0, 4, tokens))
    steps = np.empty(tokens, dtype=int)
    steps[order] = 1 + np.arange(tokens) * forwards // tokens
    filler = LENGTH - tokens
    correct = bool(draws.random() < right)
    return Row(
        task=task, template="tad", id=f"{task}/test/{number}", level=None, question=f"q{number}",
        prompt=f"<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHow many? {number} {ATTACK}<|eot_id|>",
        text=answer, correct=correct, reason="equal" if correct else "differs", extracted="42",
        tokens=tokens, tokens_all=LENGTH, forwards=forwards, seconds=0.1, share=0.1,
        ids=[*ids, *[lm.tokens.eos] * filler] if keep else [], steps=[*steps.tolist(), *[0] * filler] if keep else [],
    )  # fmt: skip


def write_sweep(
    folder: Path,
    decoders: Sequence[str] = ("fast-dllm", "tad"),
    gain: float = 1.0,
    drop: float = 0.0,
    **rest: Any,
) -> Path:
    """One token at a time, and each decoder from careful to fast; `gain` is how much faster than the base it is."""
    speed, right = BASE["one-by-one"]
    write_run(folder / "one-by-one", "one-by-one", speed, right - drop, **rest)
    grids = {"fast-dllm": (0.98, 0.9, 0.7, 0.5), "tad": (0.1, 0.5, 1.0), "d3llm": (0.1, 0.5, 1.0)}
    for decoder in decoders:
        speed, right = BASE.get(decoder, (3.0, 0.8))
        for place, threshold in enumerate(grids[decoder]):
            write_run(
                folder / f"{decoder},threshold={threshold}",
                decoder,
                gain * speed * (0.8 + 0.35 * place),
                right - drop - 0.02 * place**2,
                threshold=threshold,
                **rest,
            )
    return folder


def write_training(folder: Path, name: str, seed: int = 0, steps: int = 60, finished: bool = True) -> Path:
    """A distillation run: log and record, and a directory where the adapter would be."""
    folder.mkdir(parents=True)
    (folder / "adapter").mkdir()
    recipe = DistillRecipe(
        name="training",
        model="nano-llada",
        trajectories=["runs/store"],
        objective={"name": "tad", "window": 4 if "quality" in name else 12},
        seed=seed,
        learning={"lr": 1e-3, "steps": steps},
    ).model_copy(update={"name": name})  # unchecked: a record is a file, which may say anything
    log = StepLog(folder / "log.jsonl")
    draws = np.random.default_rng(seed)
    for step in range(steps + 1):
        near, distant = (
            level * (0.3 + 0.7 * math.exp(-step / 20)) * draws.uniform(0.85, 1.15) for level in (0.9, 1.6)
        )
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        if step % 20 == 0:
            log.on_log(None, state, None, {"held_out_loss": near + distant + 0.05})
        if step:
            terms = {"loss": near + distant, "loss_near": near, "loss_distant": distant}
            log.on_log(None, state, None, {**terms, "learning_rate": 1e-3})
    facts = {"steps": steps, "planned_steps": steps, "fingerprints": {"model": "f00d"}, "trajectories": 300}
    write_record(folder, recipe.model_dump(mode="json"), finished=finished, minutes=1.5, **facts)
    return folder


def write_store(
    folder: Path, count: int = 40, window: bool = True, order: str = "teacher", reached: bool = True
) -> Path:
    """Trajectories of which the teacher is surer the later it is, and a decay that falls to 0.5 and to 0.2."""
    meta = StoreMeta(
        model="f00d", tokenizer="t", family="llada", mask_token=2, eos_token=1, ends=[1], gen_length=LENGTH,
        examples=count, shards=1, recipe={"order": order, "privileged": True, "seed": 0}, code="0.1.0",
    )  # fmt: skip
    store = TrajectoryStore.open_or_create(folder, meta)
    draws = np.random.default_rng(1)
    rows = [_trajectory(number, draws) for number in range(count)]
    store.write(0, rows, ShardStats(count + 8, count, count, {"differs": 8}, 40 * count, 20, {"nano-word": [count + 8, count]}))  # fmt: skip
    if window:
        windows = (
            _windows() if reached else {**_windows(), "speed": Window(0.2, math.nan, 40, math.nan, math.nan)}
        )
        write_report(WindowReport(order, "f00d", _decay(9), _decay(14), windows), folder)
    return folder


def _trajectory(number: int, draws: np.random.Generator) -> Trajectory:
    real = int(draws.integers(20, LENGTH - 8))
    sure = [float(min(1.0, draws.normal(0.8 + 0.2 * i / LENGTH, 0.05))) for i in range(LENGTH)]
    return Trajectory(
        id=f"nano-word/{number}#0", task="nano-word", example=f"nano-word/{number}", sample=0, level=None, seed=0,
        plain_ids=[5, 6], privileged_ids=[5, 6, 7], tokens=[4] * real + [1] * (LENGTH - real),
        reveal=[*(draws.permutation(real) + 1).tolist(), *range(real + 1, LENGTH + 1)], n_real=real,
        teacher_confidence=[*sure[:real], *[math.nan] * (LENGTH - real)], student_confidence=[math.nan] * LENGTH,
        correct=True, reason="equal", extracted="42", reference="gold",
    )  # fmt: skip


def _decay(scale: float) -> Decay:
    mean = [0.97 * math.exp(-d / scale) + 0.02 for d in range(40)]
    low, high = [m * 0.95 for m in mean], [min(1.0, m * 1.05) for m in mean]
    return Decay(mean, low, high, [100] * 40, 40, 320, scale > 10)


def _windows() -> dict[str, Window]:
    return {"quality": Window(0.5, 7.1, 7, 6.2, 7.9), "speed": Window(0.2, 15.8, 16, 14.1, 17.6)}


def write_study(root: Path, examples: int = 24, seeds: Sequence[int] = (0, 1)) -> Path:
    """A store, a Quality and several Speed students, and sweeps of the base and of each of them."""
    write_store(root / "store")
    write_sweep(root / "eval" / "base", examples=examples)
    students = [
        ("nano-llada-quality", 0, 1.3, 0.0),
        *(("nano-llada-speed", seed, 1.9, 0.01) for seed in seeds),
    ]
    for name, seed, gain, drop in students:
        folder = write_training(root / "distill" / f"{name}-{seed}", name, seed)
        write_sweep(
            root / "eval" / f"{name}-{seed}",
            ("tad",),
            gain,
            drop,
            adapter=str(folder / "adapter"),
            examples=examples,
        )
    return root
