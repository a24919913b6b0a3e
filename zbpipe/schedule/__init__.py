"""Schedules: who does what, in what order. Pure Python, never imports torch.

`simulate`, `check` and `render` are imported from their own modules: they need `zbpipe.costs`,
which itself needs `core`.
"""

from .core import Action, Schedule, linear_placement
from .families import ALIASES, FAMILIES, LINEAR, build, forward_only, resolve

__all__ = [
    "ALIASES",
    "FAMILIES",
    "LINEAR",
    "Action",
    "Schedule",
    "build",
    "forward_only",
    "linear_placement",
    "resolve",
]
