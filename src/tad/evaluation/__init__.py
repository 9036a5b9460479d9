"""How well and how fast: runs, tokens per forward, sweeps, AUP, comparisons, throughput."""

from tad.evaluation.aup import Point, Reach, reach
from tad.evaluation.compare import Comparison, compare_runs
from tad.evaluation.count import Count
from tad.evaluation.curves import Curve, CurveTable, tabulate
from tad.evaluation.recipe import EvalRecipe, EvalTask, list_tasks
from tad.evaluation.results import Results
from tad.evaluation.row import Row
from tad.evaluation.run import evaluate, regrade
from tad.evaluation.sweep import run_sweep
from tad.evaluation.throughput import Speed, measure_speed

__all__ = [
    "Comparison",
    "Count",
    "Curve",
    "CurveTable",
    "EvalRecipe",
    "EvalTask",
    "Point",
    "Reach",
    "Results",
    "Row",
    "Speed",
    "compare_runs",
    "evaluate",
    "list_tasks",
    "measure_speed",
    "reach",
    "regrade",
    "run_sweep",
    "tabulate",
]
