"""The nano world: three generated families that mirror the benchmarks, small enough for models of a few million parameters.

`nano-word` (word problems), `nano-math` (equations, sequences, systems), `nano-code` (Python functions). A problem is a
function of family, split and index; the splits are disjoint by content. See docs/reference/nano.md.
"""

from tad.tasks.nano.code import CODE, hidden_tests
from tad.tasks.nano.math import MATH
from tad.tasks.nano.problem import SPLITS, NanoFamily, Problem, split_of
from tad.tasks.nano.word import WORD

WORLD: dict[str, NanoFamily] = {family.name: family for family in (WORD, MATH, CODE)}

__all__ = ["CODE", "MATH", "SPLITS", "WORD", "WORLD", "NanoFamily", "Problem", "hidden_tests", "split_of"]
