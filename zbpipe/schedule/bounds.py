"""Proven lower bounds on the cost of any schedule with given costs, placement and memory.

Five arguments, none of which asks in what order a rank works (all times are seconds):

work    a rank computes m · Σ (F + I + W) of its stages
head    until its first input-grad can be there, a rank runs nothing but F, and no more of them
        than its memory holds; what is left of that time is idle
tail    between its last F and the input-grad of that microbatch it runs nothing but what it
        holds at that moment; what is left of that time is idle
held    memory holds only so many microbatches at once, each for its whole way around
chain   stage j runs all its F and I, and the W that memory forces, between the first microbatch
        that comes down to it and the last gradient that goes back up to the rank

Work and chain are the closed form of arXiv 2401.10241, appendix B, for unequal stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..costs import Costs
from ..errors import ConfigError
from .limits import memory_limits

_TOLERANCE = 1e-9


def lower_bound(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    budget: float | Sequence[float] | None = None,
    objective: str = "stage",
) -> float:
    """Seconds that no schedule of `microbatches` on `placement` can beat.

    `budget`: bytes, one number or one a rank; None if memory is no matter. A larger budget never
    raises the bound. `objective`: "stage" bounds the largest span of a rank, "sync" the global
    span. Raises ConfigError on lengths that do not match or an unknown objective.
    """
    if objective not in ("stage", "sync"):
        raise ConfigError(f"objective = {objective!r}: want stage or sync")
    if microbatches < 1:
        raise ConfigError(f"microbatches = {microbatches}: want at least 1")
    if len(placement) != costs.stages:
        raise ConfigError(f"costs are for {costs.stages} stages: want {len(placement)}")
    limits = memory_limits(costs, placement, budget)
    ways = _Ways(costs, placement)
    ranks = [
        _rank(
            costs, ways, [s for s, owner in enumerate(placement) if owner == r], microbatches, limit
        )
        for r, limit in enumerate(limits)
    ]
    ranks = [rank for rank in ranks if rank.stages]
    best = 0.0
    for rank in ranks:
        start = ways.down(0, rank.stages[0]) if objective == "sync" else 0.0
        best = max(best, start + rank.span)
    for above in ranks if objective == "stage" else [r for r in ranks if r.stages[0] == 0]:
        first = above.stages[0]
        for below in ranks:
            for stage, window in below.windows.items():
                if stage >= first:
                    chain = ways.down(first, stage) + window + ways.up(stage, first)
                    best = max(best, chain + costs.weight_grad[first])
    return best


class _Ways:
    """How long a microbatch is on its way at the least, by prefix sums over the stages."""

    def __init__(self, costs: Costs, placement: Sequence[int]) -> None:
        hops = [
            seconds if placement[s] != placement[s + 1] else 0.0
            for s, seconds in enumerate(costs.comm)
        ]
        self._hop = [0.0, *accumulate(hops)]
        self._forward = [0.0, *accumulate(costs.forward)]
        self._backward = [0.0, *accumulate(costs.input_grad)]
        self._last = costs.stages - 1

    def down(self, first: int, stage: int) -> float:
        """From the start of F on `first` to that on `stage`."""
        return self._forward[stage] - self._forward[first] + self._hop[stage] - self._hop[first]

    def up(self, stage: int, first: int) -> float:
        """From the end of I on `stage` to that on `first`."""
        return self._backward[stage] - self._backward[first] + self._hop[stage] - self._hop[first]

    def around(self, first: int, stage: int) -> float:
        """From the start of F on `first` to that of I on `stage`, by way of the last stage."""
        forward = self.down(first, self._last) + self._forward[-1] - self._forward[self._last]
        backward = self._backward[-1] - self._backward[stage + 1]
        return forward + backward + self._hop[self._last] - self._hop[stage]


@dataclass(frozen=True)
class _Rank:
    """`span`: of the rank, at the least; `windows[stage]`: from its first F to its last I's end."""

    stages: tuple[int, ...]
    span: float
    windows: dict[int, float]


def _rank(costs: Costs, ways: _Ways, stages: Sequence[int], m: int, limit: float) -> _Rank:
    if not stages:
        return _Rank((), 0.0, {})
    first, last = stages[0], stages[-1]
    forwards = _forwards_held(costs, stages, m, limit)
    head = max(0.0, ways.around(first, last) - forwards)
    tail = max(0.0, ways.around(first, first) - _tail_work(costs, stages, m, limit))
    # Where memory cannot hold every F of the first stage at once, the first I is before the last
    # of them: then the two gaps are apart.
    apart = costs.act[first] > 0 and limit / costs.act[first] < m - _TOLERANCE * m
    idle = head + tail if apart else max(head, tail)
    work = m * sum(costs.work(s) for s in stages)
    left = min(m * sum(costs.weight_grad[s] for s in stages), _left_over(costs, stages, m, limit))
    held = _held(costs, ways, stages, m, limit)
    windows = {s: m * (costs.forward[s] + costs.input_grad[s]) for s in stages}
    windows[first] = max(work - left + idle, held)
    return _Rank(tuple(stages), max(work + idle, held + costs.weight_grad[first]), windows)


def _held(costs: Costs, ways: _Ways, stages: Sequence[int], m: int, limit: float) -> float:
    """Seconds from the rank's first F to its last I, for memory holds so many at a time.

    Of one stage in whole microbatches, one after the other in each place that there is for them;
    of all its stages as bytes times seconds.
    """
    if math.isinf(limit):
        return 0.0
    best = area = 0.0
    for s in stages:
        stay = ways.around(s, s) + costs.input_grad[s]
        area += costs.act[s] * stay
        if costs.act[s] > 0:
            places = max(1, _floor(limit / costs.act[s]))
            best = max(best, -(-m // places) * stay)
    return max(best, m * area / (limit * (1 + _TOLERANCE)) if limit > 0 else 0.0)


def _floor(value: float) -> int:
    return math.floor(value * (1 + _TOLERANCE) + _TOLERANCE)


def _forwards_held(costs: Costs, stages: Sequence[int], m: int, limit: float) -> float:
    """Seconds of F that a rank can run before its first I, at the most."""
    if len({costs.act[s] for s in stages}) == 1:
        act = costs.act[stages[0]]
        left = len(stages) * m
        if act > 0 and limit < math.inf:
            left = min(left, _floor(limit / act))
        seconds = 0.0
        for length in sorted((costs.forward[s] for s in stages), reverse=True):
            seconds += min(m, left) * length
            left -= min(m, left)
        return seconds
    # A knapsack with fractions of a microbatch, which can only hold more.
    seconds, room = 0.0, limit * (1 + _TOLERANCE)
    for s in sorted(stages, key=lambda s: costs.act[s] / max(costs.forward[s], 1e-300)):
        fit = float(m) if costs.act[s] <= 0 else min(float(m), room / costs.act[s])
        seconds, room = seconds + fit * costs.forward[s], room - fit * costs.act[s]
    return seconds


def _tail_work(costs: Costs, stages: Sequence[int], m: int, limit: float) -> float:
    """Seconds of work that a rank can have between its last F on its first stage and that one's I.

    Its own of the later stages, and what memory lets others leave to do: a microbatch that holds
    act has all its work but F of the first stage to come, one that holds stash a W at least of
    each stage it holds it for.
    """
    first = stages[0]
    own = sum(costs.work(s) for s in stages[1:]) + costs.forward[first]
    whole = sum(costs.work(s) for s in stages) - costs.forward[first]
    room = (limit - costs.act[first]) * (1 + _TOLERANCE)
    if math.isinf(limit) or costs.act[first] <= 0:
        return own + (m - 1) * whole
    weights = sum(costs.weight_grad[s] for s in stages)
    stash = min(costs.stash[s] for s in stages)
    best = 0.0
    for held in range(min(m - 1, max(0, _floor(room / costs.act[first]))) + 1):
        left = max(0.0, room - held * costs.act[first])
        if len(stages) == 1:
            rest = m - 1 - held if stash <= 0 else min(m - 1 - held, _floor(left / stash))
            best = max(best, held * whole + rest * weights)
        else:
            densest = max(_density(costs, s) for s in stages)
            best = max(best, held * whole + min((m - 1 - held) * weights, left * densest))
    return own + best


def _density(costs: Costs, stage: int) -> float:
    """Seconds of W that a byte of stash stands for."""
    if costs.weight_grad[stage] <= 0:
        return 0.0
    return costs.weight_grad[stage] / costs.stash[stage] if costs.stash[stage] > 0 else math.inf


def _left_over(costs: Costs, stages: Sequence[int], m: int, limit: float) -> float:
    """Seconds of W that can be left when the rank's last I of its first stage ends."""
    first = stages[0]
    if math.isinf(limit):
        return math.inf
    room = max(0.0, (limit - costs.act[first]) * (1 + _TOLERANCE))
    if len({(costs.stash[s], costs.weight_grad[s]) for s in stages}) == 1:
        stash = costs.stash[first]
        number = math.inf if stash <= 0 else 1 + _floor(room / stash)
        return min(number, len(stages) * m) * costs.weight_grad[first]
    densest = max(_density(costs, s) for s in stages)
    more = 0.0 if densest <= 0 else (math.inf if math.isinf(densest) else room * densest)
    return costs.weight_grad[first] + more
