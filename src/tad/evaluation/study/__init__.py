"""Whole experiments: the chain from trajectories to tables for one recipe, and studies of many cells.

A chain has directories by name and refuses those of another recipe; a study names them by what decides them, so that cells
share. The stages that both consist of are in `pool`, and the runs of a model in `tad.evaluation.sweep`.
"""

from tad.evaluation.study.chain import Chain
from tad.evaluation.study.recipe import RunRecipe, StudyRecipe
from tad.evaluation.study.study import Study

__all__ = ["Chain", "RunRecipe", "Study", "StudyRecipe"]
