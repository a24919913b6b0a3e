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
from itertools import islice

from .core import Action, Schedule

# Microbatches of a short order, in stages: twice the longest ramp (2p - 1 of ZB-H2), and a period.
_SHORT = 3
# Of the orders that `stretch` makes so many are worth a replay: 16, or as many as have about this
# number of actions together (a second).
_STRETCHED, _ACTIONS = 16, 200_000
_PERIODS = (1, 2, 3)  # microbatches of a period


def short(stages: int, microbatches: int) -> int | None:
    """Microbatches of the short order to find first; None where that would not be much shorter."""
    few = _SHORT * stages
    return few if microbatches >= 2 * few else None


def stretched(schedule: Schedule, microbatches: int) -> Iterator[Schedule]:
    """The first few of `stretch`."""
    actions = sum(map(len, schedule.rows)) * microbatches // schedule.microbatches
    return islice(stretch(schedule, microbatches), min(_STRETCHED, 1 + _ACTIONS // (actions + 1)))


def stretch(schedule: Schedule, microbatches: int) -> Iterator[Schedule]:
    """`schedule` with as many periods more as make `microbatches`, for each place there is to cut.

    F, I and W of each stage must ascend in microbatches, and none be fused. The middle comes first.
    What comes out may still be stuck or slow: replay it.
    """
    more = microbatches - schedule.microbatches
    middle = schedule.microbatches // 2
    places = sorted(range(schedule.microbatches - 1), key=lambda k: (abs(k - middle), k))
    rows = [_Row(row) for row in schedule.rows if row]
    for length in _PERIODS:
        for at in places if more % length == 0 else ():
            if all(row.repeats(at, length) for row in rows):
                longer = iter([row.longer(at, length, more // length) for row in rows])
                found = tuple(next(longer) if row else () for row in schedule.rows)
                yield replace(schedule, rows=found, microbatches=microbatches)


class _Row:
    """A rank's row; its kinds of action, a period of so many microbatches long after an F."""

    def __init__(self, row: Sequence[Action]) -> None:
        self._cells = [(action.stage, action.kind) for action in row]
        self._kinds = frozenset(self._cells)
        first = (min(stage for stage, _ in self._kinds), "F")
        self._after = [i + 1 for i, cell in enumerate(self._cells) if cell == first]

    def _period(self, at: int, length: int) -> slice:
        start = self._after[at]
        return slice(start, start + length * len(self._kinds))

    def repeats(self, at: int, length: int) -> bool:
        """Whether `length` of every kind, and nothing else, follow F of microbatch `at`."""
        period = self._cells[self._period(at, length)]
        return all(period.count(kind) == length for kind in self._kinds)

    def longer(self, at: int, length: int, times: int) -> tuple[Action, ...]:
        """The row with that period run `times` more."""
        period, cells = self._period(at, length), self._cells
        counts = dict.fromkeys(self._kinds, -1)
        actions = []
        for cell in (*cells[: period.start], *(cells[period] * (times + 1)), *cells[period.stop :]):
            counts[cell] += 1
            actions.append(Action(*cell, counts[cell]))
        return tuple(actions)
