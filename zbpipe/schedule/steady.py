"""Long schedules from short ones: ramp up and ramp down around a period that repeats.

In the steady state of an order each rank runs, over and over, every kind of action of each of its
stages as often as any other. Such a period of one or a few microbatches is cut out after an F of
the rank's first stage, the same microbatch's on every rank, and repeated:

    short   F0 F1 F2 │I0 W0 F3│ I1 W1 I2 W2 I3 W3
    longer  F0 F1 F2 │I0 W0 F3│I1 W1 F4│I2 W2 F5│ I3 W3 I4 W4 I5 W5

What a rank holds in the period is what it held in the short order, so a budget is kept; whether the
ranks still fit together is for the replay to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .core import Action, Schedule

# Microbatches of a short order, in stages: twice the longest ramp (2p - 1 of ZB-H2), and a period.
_SHORT = 3
# Orders of those that `stretch` makes that are worth a replay.
STRETCHED = 16
_PERIODS = (1, 2, 3)  # microbatches of a period


def short(stages: int, microbatches: int) -> int | None:
    """Microbatches of the short order to find first; None where that would not be much shorter."""
    few = _SHORT * stages
    return few if microbatches >= 2 * few else None


def stretch(schedule: Schedule, microbatches: int) -> Iterator[Schedule]:
    """`schedule` with as many periods more as make `microbatches`, for each place there is to cut.

    F, I and W of each stage must ascend in microbatches, and none be fused. The middle comes first.
    What comes out may still be stuck or slow: replay it.
    """
    more = microbatches - schedule.microbatches
    middle = schedule.microbatches // 2
    places = sorted(range(schedule.microbatches - 1), key=lambda k: (abs(k - middle), k))
    for length in _PERIODS:
        for at in places if more % length == 0 else ():
            rows = [_longer(row, at, length, more // length) for row in schedule.rows]
            found = tuple(row for row in rows if row is not None)
            if len(found) == len(rows):
                yield replace(schedule, rows=found, microbatches=microbatches)


def _longer(row: Sequence[Action], at: int, length: int, times: int) -> tuple[Action, ...] | None:
    """A row with the period after F of microbatch `at` run `times` more; None if there is none."""
    if not row:
        return ()
    cells = [(action.stage, action.kind) for action in row]
    kinds = set(cells)
    first = Action(min(stage for stage, _ in kinds), "F", at)
    start = row.index(first) + 1
    end = start + length * len(kinds)
    period = cells[start:end]
    if any(period.count(kind) != length for kind in kinds):
        return None
    counts: dict[tuple[int, str], int] = {}
    longer = []
    for cell in (*cells[:start], *(period * (times + 1)), *cells[end:]):
        counts[cell] = counts.get(cell, -1) + 1
        longer.append(Action(*cell, counts[cell]))
    return tuple(longer)
