"""The process that compares LaTeX answers: JSON lines in, JSON lines out, one comparison at a time.

Run as a file by `equivalence.py`, never imported: it must not load the package (or torch), and its parser relies on
alarms, which only work in a process's main thread. It limits its own memory and interrupts itself after `seconds`;
its parent kills it when even that does not help (a huge power is computed inside one C call).
"""

import json
import logging
import resource
import signal
import sys
from functools import lru_cache
from types import FrameType
from typing import Any

MEMORY = 4 << 30


class OutOfTimeError(BaseException):
    """Not an Exception: the libraries below catch those."""


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY if hard == resource.RLIM_INFINITY else min(hard, MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    logging.disable(logging.CRITICAL)
    replies = sys.stdout
    sys.stdout = sys.stderr
    from math_verify import LatexExtractionConfig, parse, verify

    @lru_cache(maxsize=4096)
    def read(text: str, whole: bool) -> list[Any]:
        if not whole:
            return parse(text, parsing_timeout=None)
        # All of the answer or nothing: the default would go on to compare any number inside it.
        return parse(
            f"${text}$", [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None
        )

    signal.signal(signal.SIGALRM, interrupt)

    def compare(gold: str, target: str, gold_whole: bool, target_whole: bool) -> dict[str, Any]:
        parsed = read(target, target_whole)
        if not parsed:
            return {"equal": False, "reason": "no answer found"}
        equal = verify(read(gold, gold_whole), parsed, timeout_seconds=None)
        return {
            "equal": bool(equal),
            "reason": "equivalent" if equal else "different",
            "read": str(parsed[-1]),
        }

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            signal.setitimer(signal.ITIMER_REAL, request.pop("seconds"))
            reply = compare(**request)
        except OutOfTimeError:
            reply = {"equal": False, "reason": "comparison took too long"}
        except (Exception, RecursionError, MemoryError) as error:
            reply = {"equal": False, "reason": f"comparison failed: {type(error).__name__}"}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
