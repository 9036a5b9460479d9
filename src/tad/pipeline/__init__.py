"""The whole method for one checkpoint, from trajectories to a report: the work behind `tad run`, `tad init` and `tad demo`.

A chain has directories by name and refuses those of another recipe. Its stages are in `pool`, and the runs of a model in
`tad.evaluation.sweep`.
"""

from tad.pipeline.chain import Chain
from tad.pipeline.recipe import RunRecipe

__all__ = ["Chain", "RunRecipe"]
