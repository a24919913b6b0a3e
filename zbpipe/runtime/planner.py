"""The plan of a pipeline: measured costs where they are wanted, and the schedule that fits them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..costs import Costs
from ..errors import ConfigError, ScheduleError
from ..plan import Plan
from ..schedule import families
from ..schedule.check import check
from ..schedule.core import Action, Schedule
from ..schedule.solve import SEARCHED, solve
from ..timeline import Timeline

if TYPE_CHECKING:
    from ..program import Program
    from .rank import Rank

# Shapes that stand for "auto" until costs are known, by placement; the last needs least memory in
# trials.
AUTO = {"linear": ("zb2p", "zb1p", "1f1b"), "v": ("zb_v", "v_half", "v_min")}
# W's that are held for one launch: what it takes (kernels.tables.MOST). More would only be held.
RUN = 4
# Seconds that rank 0 may search while the others wait at their first step.
SEARCH_S = 2.0


def searched(schedule: object) -> str | None:
    """The name to search by once costs are measured; None where the order is fixed."""
    if not isinstance(schedule, str) or is_path(schedule):
        return None
    bare = "".join(letter for letter in schedule.lower() if letter not in "_- ")
    return bare if bare == "auto" or bare in SEARCHED else None


def is_path(schedule: object) -> bool:
    """Whether `schedule` names a CSV file and not a family."""
    return isinstance(schedule, os.PathLike) or (
        isinstance(schedule, str) and schedule.lower().endswith(".csv")
    )


def resolve(
    schedule: Any, ranks: int, microbatches: int, placement: str = "linear"
) -> list[Schedule]:
    """The schedules to choose from: one, or those of "auto" for a placement, which passed `check`.

    Raises ScheduleError for a name that is none (naming the nearest), an order that is wrong, and
    one for other ranks or microbatches; ConfigError for what is no schedule at all.
    """
    if isinstance(schedule, Schedule):
        found = [schedule]
    elif is_path(schedule):
        path = Path(schedule)
        if not path.is_file():
            raise ScheduleError(f"schedule = {str(schedule)!r}: there is no such file")
        found = [Schedule.from_csv(path.read_text(), name=path.stem)]
    elif isinstance(schedule, str):
        names = AUTO[placement] if searched(schedule) == "auto" else (schedule,)
        found = [families.build(name, ranks, microbatches) for name in names]
    else:
        raise ConfigError(
            f"schedule is a {type(schedule).__name__}: want a name, a Schedule or a path to a CSV"
        )
    for one in found:
        if one.ranks != ranks or one.microbatches != microbatches:
            raise ScheduleError(
                f"schedule {one.name!r} is for {one.ranks} ranks and {one.microbatches} "
                f"microbatches: want {ranks} ranks and microbatches={microbatches}"
            )
        check(one)
    return found


def choose(
    schedule: Schedule,
    search: str | None,
    costs: Costs,
    budget: float | Sequence[float] | None,
    time_limit: float = SEARCH_S,
) -> Plan:
    """The plan for measured costs inside `budget` (bytes a rank): `schedule`, or a `search`.

    The search keeps to the placement of `schedule`. Raises MemoryBudgetError, saying what would
    fit, where nothing does.
    """
    if search is not None:
        kind = "linear" if schedule.stages == schedule.ranks else "v"
        found = solve(
            search,
            {kind: costs},
            schedule.microbatches,
            budget,
            placements=(kind,),
            time_limit=time_limit,
        )
        schedule = found.schedule
    check(schedule, costs, budget)
    return Plan.make(schedule, costs, budget)


def split_backward(schedule: Schedule) -> Schedule:
    """The same order with every B as I and W, so that both can be timed."""
    rows = tuple(
        tuple(
            cell
            for a in row
            for cell in (
                (Action(a.stage, "I", a.microbatch), Action(a.stage, "W", a.microbatch))
                if a.kind == "B"
                else (a,)
            )
        )
        for row in schedule.rows
    )
    return replace(schedule, rows=rows, runs=())


def fused(schedule: Schedule) -> Schedule:
    """The same order, with what stands next to each other put together where nobody waits longer.

    An I that its W follows becomes a B where no other rank waits for that I: the same additions in
    the same order, with each weight gradient computed from warm caches. The W's that are left and
    follow one another become runs (`weight_runs`).
    """

    def cells(rank: int, row: tuple[Action, ...]) -> Iterator[Action]:
        skip = False
        for action, after in zip(row, (*row[1:], None), strict=True):
            stage = action.stage
            alone = stage == 0 or schedule.placement[stage - 1] == rank
            if skip:
                skip = False
                continue
            skip = action.kind == "I" and alone and after == action._replace(kind="W")
            yield action._replace(kind="B") if skip else action

    rows = tuple(tuple(cells(rank, row)) for rank, row in enumerate(schedule.rows))
    return replace(schedule, rows=rows, runs=tuple(run for row in rows for run in weight_runs(row)))


def weight_runs(row: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """The W's of one stage with nothing between them, two to `RUN` at a time.

    On CUDA the runtime holds a run's W's until its last one, which then adds all of them to each
    weight in one launch, that reads and writes the gradient once. Nobody waits longer for it: of a
    W there wait the receive into a slot that it reads (`compile` keeps the slot until the run's
    end; no F or I lies in a run, so no message is read there and no further slot is needed), the
    sum of tied gradients and the hooks (both after the stage's last W, which ends a run), and the
    optimizer (after the step). Nor does it cost memory: what is held at any time in a run was held
    when it began, and the plan's peak counts that.
    """
    for (_, kind), cells in groupby(row, lambda action: action[:2]):
        run = tuple(cells)
        for start in range(0, len(run) if kind == "W" else 0, RUN):
            if len(run) - start > 1:
                yield run[start : start + RUN]


@dataclass(frozen=True)
class Measured:
    """What a rank saw of its stages in trial runs: seconds and bytes by stage."""

    timelines: list[Timeline]
    held: dict[int, tuple[float, float, float]]  # act, stash, transient
    boundary: dict[int, int]


def costs_from(parts: Sequence[Measured], stages: int) -> Costs:
    """Costs out of what every rank measured: medians of times, maxima of bytes."""
    times: dict[tuple[int, str], list[float]] = {}
    trips: dict[int, list[float]] = {}
    for k in range(len(parts[0].timelines)):
        timeline = Timeline.merge(part.timelines[k] for part in parts)
        ends = {}
        for span in timeline.spans:
            if span.lane == "compute" and span.action is not None:
                key = (span.action.stage, span.action.kind)
                times.setdefault(key, []).append(span.end - span.start)
                ends[span.action] = span.end
        for span in timeline.spans:
            if span.lane.startswith("recv") and span.action is not None:
                boundary = span.action.stage - (span.action.kind != "F")
                trips.setdefault(boundary, []).append(max(0.0, span.end - ends[span.action]))
    held = {stage: row for part in parts for stage, row in part.held.items()}
    sizes: dict[int, int] = {}
    for part in parts:
        for boundary, nbytes in part.boundary.items():
            sizes[boundary] = max(nbytes, sizes.get(boundary, 0))

    def seconds(kind: str) -> tuple[float, ...]:
        return tuple(statistics.median(times[s, kind]) for s in range(stages))

    return Costs(
        forward=seconds("F"),
        input_grad=seconds("I"),
        weight_grad=seconds("W"),
        # The least that was seen: everything above it is waiting for the receiver.
        comm=tuple(min(trips.get(b, [0.0])) for b in range(stages - 1)),
        act=tuple(held[s][0] for s in range(stages)),
        stash=tuple(held[s][1] for s in range(stages)),
        transient=tuple(held[s][2] for s in range(stages)),
        boundary=tuple(float(sizes.get(b, 0)) for b in range(stages - 1)),
        source="profiled",
    )


def held_by_stage(program: Program, runner: Rank) -> dict[int, tuple[float, float, float]]:
    """(act, stash, transient) in bytes of each stage, the most of any microbatch, from the meter.

    The curve has one point after each compute instruction: the difference that F makes is act,
    that of I stash - act. The transient is what an action needed over both its ends.
    """
    assert runner.meter is not None
    after = [held for _, held in runner.meter.curve]
    actions = [i.action for i in program.instructions if i.lane == 0]
    act: dict[int, float] = {}
    kept: dict[tuple[int, int], float] = {}
    stash: dict[int, float] = {}
    transient: dict[int, float] = {}
    for action, before, now, extra in zip(
        actions, [0.0, *after], after, runner.meter.transients, strict=False
    ):
        stage = action.stage
        if action.kind == "F":
            kept[action[::2]] = now - before
            act[stage] = max(act.get(stage, 0.0), now - before)
        elif action.kind == "I":
            left = kept[action[::2]] + now - before
            stash[stage] = max(stash.get(stage, 0.0), left)
        transient[stage] = max(transient.get(stage, 0.0), extra)
    return {stage: (act[stage], stash[stage], transient[stage]) for stage in act}
