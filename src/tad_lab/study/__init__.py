"""Studies: a matrix of methods and seeds, whose cells are named by what decides them, so that they share stores, students and
answers. Behind `tad study`.
"""

from tad_lab.study.recipe import StudyRecipe
from tad_lab.study.study import Study

__all__ = ["Study", "StudyRecipe"]
