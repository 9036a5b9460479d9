"""How well and how fast: runs, tokens per forward, sweeps, the analysis of their outcomes, throughput."""

from tad.evaluation.analysis import Estimate, PairedDifference, ResultTable, analyse
from tad.evaluation.aup import Point, TpfAtAccuracy, tpf_at_accuracy
from tad.evaluation.compare import Comparison, compare_runs
from tad.evaluation.measurement import MethodRuns, Outcomes
from tad.evaluation.methods import tabulate_folders
from tad.evaluation.recipe import EvalRecipe, EvalTask, list_tasks
from tad.evaluation.results import Results
from tad.evaluation.row import Row
from tad.evaluation.run import evaluate, regrade
from tad.evaluation.sweep import run_sweep
from tad.evaluation.throughput import Speed, TimedMethod, measure_speeds

__all__ = [
    "Comparison",
    "Estimate",
    "EvalRecipe",
    "EvalTask",
    "MethodRuns",
    "Outcomes",
    "PairedDifference",
    "Point",
    "ResultTable",
    "Results",
    "Row",
    "Speed",
    "TimedMethod",
    "TpfAtAccuracy",
    "analyse",
    "compare_runs",
    "evaluate",
    "list_tasks",
    "measure_speeds",
    "regrade",
    "run_sweep",
    "tabulate_folders",
    "tpf_at_accuracy",
]
