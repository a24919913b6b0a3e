"""Plan: costs, the schedule chosen for them, its simulated timeline, and how good it can get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .costs import Costs
from .schedule.bounds import lower_bound
from .schedule.core import Action, Schedule
from .schedule.render import text
from .schedule.simulate import planned_peak, simulate
from .timeline import Timeline


@dataclass(frozen=True)
class Plan:
    """What is going to run, and what is expected of it.

    `bound`: seconds; no schedule with these costs and this placement, inside the budget that the
    plan was made with, has a smaller stage-objective cost (largest span of a rank).
    """

    costs: Costs
    schedule: Schedule
    timeline: Timeline
    bound: float

    @classmethod
    def make(
        cls, schedule: Schedule, costs: Costs, budget: float | Sequence[float] | None = None
    ) -> Plan:
        """Simulate `schedule`, and bound what could be had within `budget` (bytes, None: any).

        Raises ScheduleError if it cannot run.
        """
        timeline = simulate(schedule, costs)
        bound = lower_bound(costs, schedule.placement, schedule.microbatches, budget)
        return cls(costs, schedule, timeline, bound)

    @property
    def cost(self) -> float:
        """Seconds: the largest span of a rank, first to last action (the stage objective)."""
        return self.timeline.cost("stage")

    @property
    def gap(self) -> float:
        """(cost - bound) / bound: at most this share is left to gain on the stage objective."""
        return (self.cost - self.bound) / self.bound if self.bound > 0 else 0.0

    def peak(self, rank: int) -> float:
        """Bytes: activations and stash at their most, and the largest transient of a stage."""
        return planned_peak(self.schedule, self.costs, rank)

    def summary(self) -> str:
        """The picture and the figures, a few lines of text."""
        schedule, timeline = self.schedule, self.timeline
        peaks = [self.peak(rank) for rank in range(schedule.ranks)]
        return "\n".join(
            [
                f"{schedule.name or 'schedule'}: {schedule.stages} stages on {schedule.ranks} "
                f"ranks, {schedule.microbatches} microbatches ({self.costs.source} costs)",
                text(timeline),
                f"step {timeline.makespan():.6g} s; bubble {timeline.bubble('stage'):.2%} (stage), "
                f"{timeline.bubble('sync'):.2%} (sync)",
                f"largest span {self.cost:.6g} s, bound {self.bound:.6g} s, gap {self.gap:.2%}",
                f"peak {max(peaks):.6g} bytes on rank {peaks.index(max(peaks))}",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it back to an equal Plan."""
        return {
            "costs": self.costs.to_dict(),
            "schedule": {
                "name": self.schedule.name,
                "microbatches": self.schedule.microbatches,
                "placement": list(self.schedule.placement),
                "rows": [[str(action) for action in row] for row in self.schedule.rows],
            },
            "timeline": self.timeline.to_dict(),
            "bound": self.bound,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_dict`."""
        held = data["schedule"]
        rows = tuple(tuple(Action.parse(cell) for cell in row) for row in held["rows"])
        schedule = Schedule(rows, held["microbatches"], tuple(held["placement"]), held["name"])
        return cls(
            Costs.from_dict(data["costs"]),
            schedule,
            Timeline.from_dict(data["timeline"]),
            data["bound"],
        )
