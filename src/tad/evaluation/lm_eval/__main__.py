"""`python -m tad.evaluation.lm_eval`: the harness's own `lm_eval`, in which the model `tad` and our tasks are known.

For releases of the harness that do not look for plugins themselves.
"""

from __future__ import annotations

import sys
from importlib import metadata

from tad.errors import MissingExtraError, TadError
from tad.evaluation.lm_eval import TASKS

NEEDED = (0, 4, 13)


def check_harness() -> str:
    """The installed version of the harness; raise where it is missing or too old."""
    wanted = ".".join(map(str, NEEDED))
    try:
        version = metadata.version("lm_eval")
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"lm-evaluation-harness (lm-eval >= {wanted})", "eval") from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < NEEDED:
        raise TadError(f"lm-evaluation-harness {version} is too old; pip install 'lm-eval>={wanted}'")
    return version


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
