"""`python -m tad.evaluation.lm_eval`: the harness's own `lm_eval`, in which the model `tad` and our tasks are known.

For releases of the harness that do not look for plugins themselves.
"""

from __future__ import annotations

import sys

from tad.evaluation.lm_eval import TASKS
from tad.evaluation.lm_eval.harness import check_harness


def main() -> None:
    """Register the model, name our task files unless others are named, and hand over."""
    check_harness()
    from lm_eval.__main__ import cli_evaluate

    import tad.evaluation.lm_eval.model  # noqa: F401 - registers itself

    if "--tasks" in sys.argv and "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(TASKS)]
    cli_evaluate()


if __name__ == "__main__":
    main()
