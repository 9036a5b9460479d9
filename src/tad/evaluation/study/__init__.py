"""Whole experiments: the chain from trajectories to tables for one recipe, and studies of many cells."""

from tad.evaluation.study.chain import Chain
from tad.evaluation.study.recipe import RunRecipe, StudyRecipe
from tad.evaluation.study.study import Study

__all__ = ["Chain", "RunRecipe", "Study", "StudyRecipe"]
