"""The OpenAI-compatible server: an engine that batches requests as they come, and the HTTP application around it.

`Engine` needs nothing but the package itself and also answers in a terminal; `tad.serving.app` needs the extra `serve`.
"""

from tad.serving.engine import Begun, Engine, Event, Failed, Finished, Job, RefusedError, Revealed, Ticket
from tad.serving.settings import Settings

__all__ = [
    "Begun",
    "Engine",
    "Event",
    "Failed",
    "Finished",
    "Job",
    "RefusedError",
    "Revealed",
    "Settings",
    "Ticket",
]
