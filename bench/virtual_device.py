"""Sleeps in place of a model: what the runtime adds to an order's own ideal time."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zbpipe.costs import Costs
from zbpipe.program import compile, virtual
from zbpipe.runtime.executor import Crew
from zbpipe.runtime.world import join
from zbpipe.schedule import families
from zbpipe.schedule.simulate import simulate
from zbpipe.timeline import Timeline


@dataclass(frozen=True)
class Sleeps:
    """`seconds` of F, I and W of a rank's whole model; `nbytes` of each message."""

    ranks: int
    microbatches: int
    seconds: float
    steps: int
    nbytes: tuple[int, ...] = (0, 1 << 20)


def measure(rank: int, sleeps: Sleeps) -> dict[str, dict[str, Any]]:
    """Every family under each message size, on rank 0; runs in each of `sleeps.ranks` processes.

    Steps follow each other without a barrier. The first is not counted: it maps the slots.
    """
    world = join(None)
    found: dict[str, dict[str, Any]] = {}
    for nbytes in sleeps.nbytes:
        for name in families.FAMILIES:
            schedule = families.build(name, sleeps.ranks, sleeps.microbatches)
            if schedule.copies > 1:  # planned only: the runtime keeps one copy of the parameters
                continue
            each = sleeps.seconds * sleeps.ranks / schedule.stages
            costs = Costs.uniform(schedule.stages, each, each, each)
            programs = virtual(compile(schedule), costs.duration, lambda _, n=nbytes: float(n))
            crew = Crew(world, timeout=30.0)
            crew.connect(programs.slots)
            loaded = crew.load(programs)
            dist.barrier()
            parts = []
            for _ in range(sleeps.steps + 1):
                crew.run(loaded, dict.fromkeys(world.local))
                parts.append(crew.timeline(loaded, "virtual"))
            everyone = world.gather(parts)
            crew.close()
            if rank == 0:
                steps = [Timeline.merge(step) for step in zip(*everyone, strict=True)]
                key = f"{name} {nbytes >> 10} KiB" if nbytes else name
                found[key] = _summary(steps[1:], simulate(schedule, costs), nbytes)
    return found


def _summary(steps: list[Timeline], ideal: Timeline, nbytes: int) -> dict[str, Any]:
    """Seconds and ratios, medians over the steps, for both objectives."""
    out: dict[str, Any] = {"nbytes": nbytes}
    for objective in ("sync", "stage"):
        measured = [step.cost(objective) for step in steps]
        out[objective] = {
            "simulated_s": ideal.cost(objective),
            "measured_s": statistics.median(measured),
            "largest_s": max(measured),
            "ratio": statistics.median(measured) / ideal.cost(objective),
        }
    return out


def worst(found: dict[str, dict[str, Any]], with_bytes: bool) -> float:
    """The largest measured ÷ simulated over the families and both objectives."""
    return max(
        row[objective]["ratio"]
        for row in found.values()
        if (row["nbytes"] > 0) == with_bytes
        for objective in ("sync", "stage")
    )
