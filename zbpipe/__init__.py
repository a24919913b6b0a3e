"""zbpipe: zero-bubble pipeline-parallel training for PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._checkout import find_kernels
from ._version import __version__
from .costs import Costs
from .errors import (
    ConfigError,
    MemoryBudgetError,
    ScheduleError,
    StageError,
    ZbpipeError,
)
from .plan import Plan
from .schedule import Action, Schedule
from .timeline import Timeline

if TYPE_CHECKING:
    from .model.wrap import wrap
    from .runtime.pipeline import Pipeline

__all__ = [
    "Action",
    "ConfigError",
    "Costs",
    "MemoryBudgetError",
    "Pipeline",
    "Plan",
    "Schedule",
    "ScheduleError",
    "StageError",
    "Timeline",
    "ZbpipeError",
    "__version__",
    "wrap",
]

find_kernels(__name__, Path(__file__).parent)


def __getattr__(name: str) -> Any:
    # What needs torch is imported when it is asked for: planning and the command line do without.
    if name == "wrap":
        from .model.wrap import wrap

        return wrap
    if name == "Pipeline":
        from .runtime.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module 'zbpipe' has no attribute {name!r}")
