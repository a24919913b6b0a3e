"""The bridge to csrc/schedule: problems in, orders out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import _native
from ..costs import Costs
from .core import Action, Schedule
from .limits import memory_limits

_KINDS = "FIW"


class Problem:
    """Costs, placement, number of microbatches and memory limits, as the native side holds them."""

    def __init__(
        self,
        costs: Costs,
        placement: Sequence[int],
        microbatches: int,
        budget: float | Sequence[float] | None = None,
    ) -> None:
        self.costs, self.placement, self.microbatches = costs, tuple(placement), microbatches
        self.ranks = max(placement) + 1
        self.hops = tuple(
            seconds if placement[s] != placement[s + 1] else 0.0
            for s, seconds in enumerate(costs.comm)
        )
        self.limits = memory_limits(costs, placement, budget)
        self.native = _native.schedule.Problem(
            ranks=self.ranks,
            microbatches=microbatches,
            placement=self.placement,
            f=costs.forward,
            i=costs.input_grad,
            w=costs.weight_grad,
            hop=self.hops,
            act=costs.act,
            stash=costs.stash,
            limit=self.limits,
        )
        self.actions = 3 * len(self.placement) * microbatches

    def order(self, schedule: Schedule) -> Any:
        """The native order of `schedule`, B as I and W; None where microbatches do not ascend."""
        rows = []
        for row in schedule.rows:
            codes: list[int] = []
            seen: dict[tuple[int, str], int] = {}
            for stage, kind, microbatch in row:
                for letter in "IW" if kind == "B" else kind:
                    expected = seen.get((stage, letter), 0)
                    if microbatch != expected:
                        return None
                    seen[stage, letter] = expected + 1
                    codes.append(stage * 3 + _KINDS.index(letter))
            rows.append(codes)
        return _native.schedule.Order(self.native, rows)

    def schedule(self, order: Any, name: str) -> Schedule:
        """The Schedule of a native order."""
        actions = [
            [Action(stage, kind, i) for i in range(self.microbatches)]
            for stage in range(len(self.placement))
            for kind in _KINDS
        ]
        rows = []
        for codes in order.rows:
            nexts = [iter(cells) for cells in actions]
            rows.append(tuple(next(nexts[code]) for code in codes))
        return Schedule(tuple(rows), self.microbatches, self.placement, name)

    def fits(self, order: Any) -> bool:
        """Whether every rank keeps its order and its memory limit."""
        return bool(_native.schedule.fits(self.native, order))

    def replay(self, order: Any) -> Replayed | None:
        """What the order costs; None if its ranks wait for each other for ever."""
        found = _native.schedule.replay(self.native, order)
        return None if found is None else Replayed(*found)

    def list(self, **policy: Any) -> Any:
        """The order that a policy makes (csrc/schedule/lister.hpp); None if it gets stuck."""
        return _native.schedule.list(self.native, **policy)

    def anneal(self, order: Any, **how: Any) -> Any:
        """A better order near `order`, or the same (csrc/schedule/anneal.hpp)."""
        return _native.schedule.anneal(self.native, order, **how)


class Replayed(NamedTuple):
    """Seconds: the largest span of a rank, the global span, and the mean of the ranks' spans."""

    stage: float
    sync: float
    mean: float
