"""The plugin for lm-evaluation-harness: a model class, our benchmarks as its tasks, and a way to run them together.

The harness is the extra `eval` of this package; nothing here imports it before it is needed, and none of it is copied.
"""

from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
"""The directory of our task files, for the harness's `include_path`."""
