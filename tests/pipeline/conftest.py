"""The fixtures of `eval_world`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

from eval_world import data_dir, lm, no_pictures_of_windows, world  # noqa: F401 - fixtures
