"""Layers per stage for a schedule: not the smallest slowest stage, but the shortest step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..costs import Costs
from ..schedule.core import Schedule
from ..schedule.simulate import planned_peak, simulate
from .partition import partition

# Actions that may be simulated: about a second.
_EFFORT = 500_000
_LEAST_TRIES = 16


@dataclass(frozen=True, order=True)
class Balanced:
    """A partition; the best compares least. `lacking`: bytes over the budget, on the worst rank.

    `cost`: seconds, the schedule's largest span of a rank with these stages.
    """

    lacking: float
    cost: float
    sizes: tuple[int, ...]


def stage_costs(layers: Costs, sizes: Sequence[int]) -> Costs:
    """Costs of stages of `sizes` layers each, from those of the layers (each a stage of its own).

    Seconds and held bytes add up; a stage's transient is its worst layer's.
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    ranges = [slice(start, end) for start, end in pairwise(ends)]
    inner = [end - 1 for end in ends[1:-1]]

    def total(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[r]) for r in ranges)

    return Costs(
        forward=total(layers.forward),
        input_grad=total(layers.input_grad),
        weight_grad=total(layers.weight_grad),
        comm=tuple(layers.comm[i] for i in inner),
        act=total(layers.act),
        stash=total(layers.stash),
        transient=tuple(max(layers.transient[r]) for r in ranges),
        boundary=tuple(layers.boundary[i] for i in inner),
        source=layers.source,
    )


def balance(
    layers: Costs,
    schedule: Schedule,
    budget: Sequence[float] | None = None,
    fixed: Mapping[int, int] | None = None,
) -> Balanced:
    """The layers per stage with which `schedule` takes the least time, inside `budget` (bytes).

    `layers`: costs of each layer as a stage of its own. `fixed`: stages whose number of layers is
    given. Starts from the partition with the smallest slowest stage and moves single layers from
    one stage to another, past those in between, for as long as that helps; deterministic.
    Raises ConfigError if there are more stages than layers.
    """
    fixed = fixed or {}

    def rate(sizes: tuple[int, ...]) -> Balanced:
        costs = stage_costs(layers, sizes)
        over = 0.0
        if budget is not None:
            over = max(planned_peak(schedule, costs, r) - b for r, b in enumerate(budget))
        return Balanced(max(0.0, over), simulate(schedule, costs).cost(), sizes)

    work = [layers.work(i) for i in range(layers.stages)]
    best = rate(partition(work, schedule.stages, fixed))
    tries = max(_LEAST_TRIES, _EFFORT // sum(map(len, schedule.rows)))
    seen = {best.sizes}
    improved = True
    while improved and tries > 0:
        improved = False
        for sizes in _moves(best.sizes, fixed):
            if sizes in seen or tries == 0:
                continue
            seen.add(sizes)
            tries -= 1
            found = rate(sizes)
            if (found.lacking, found.cost * (1 + 1e-9)) < (best.lacking, best.cost):
                best, improved = found, True
                break
    return best


def _moves(sizes: tuple[int, ...], fixed: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """One layer less on a stage and one more on another; near ones first."""
    free = [stage for stage in range(len(sizes)) if stage not in fixed]
    for distance in range(1, len(free)):
        for i in range(len(free) - distance):
            for giver, taker in ((free[i], free[i + distance]), (free[i + distance], free[i])):
                if sizes[giver] > 1:
                    moved = list(sizes)
                    moved[giver] -= 1
                    moved[taker] += 1
                    yield tuple(moved)
