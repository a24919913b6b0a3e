"""Exact search: CP-SAT improves a heuristic schedule, and proves how good any schedule can be.

Every action has a start; a rank runs one at a time; messages take their hop. Microbatches are
alike, so that F, I and W of a stage may ascend in them (sorting a stage's starts keeps every
precedence and every count, and so loses nothing). Memory is a reservoir that F fills at its start
and I and W empty at their ends, with the precedences that follow from it written out. A rank whose
first action is the first microbatch's F starts when that one has come down, as in a replay.

Needs ortools, the extra `zbpipe[solver]`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..costs import Costs
from ..errors import ConfigError, MemoryBudgetError, ScheduleError
from .check import check
from .core import Action, Schedule
from .limits import memory_limits
from .search import Found, find
from .simulate import simulate
from .steady import short, stretched

# Times and bytes become integers: multiples of a power of ten where they are (nearly) that.
_FINEST = 9
_NEAR = 1e-6
_TOLERANCE = 1e-9
_MET = 1e-8  # ticks are sums of other roundings than seconds
_STEPS = 10**6  # of the longest time or the budget, where there is no such power


def improve(
    found: Found,
    costs: Costs,
    budget: float | Sequence[float] | None = None,
    seconds: float = 60.0,
    *,
    seed: int = 0,
    workers: int | None = None,
) -> Found:
    """The best schedule CP-SAT finds within `seconds`, starting from `found`: never a worse one.

    `costs`: of the stages of found's placement; `budget`: bytes, one number or one a rank. Of many
    microbatches the ramps are solved first, in half of the time, around a steady state that
    repeats. The bound is the better one of found's and the solver's; `status` is "optimal" where
    the cost meets it. `workers`: threads, by default one a core. Raises ConfigError if ortools is
    missing or `seconds` is not positive.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds = {seconds!r}: want a number > 0")
    if found.status == "optimal":
        return found
    started = time.perf_counter()
    best = _around_a_steady_state(found, costs, budget, seconds / 2, seed, workers)
    if best is not found:
        seconds /= 2
    model = _Model(best, costs, budget)
    starts, proven = model.solve(seconds, seed, workers or os.cpu_count() or 1)
    if starts is not None:
        schedule = _ordered(found.schedule, costs, starts)
        if _usable(schedule, costs, budget):
            cost = simulate(schedule, costs).cost(found.objective)
            if cost < best.cost:
                best = replace(found, schedule=schedule, cost=cost)
    bound = max(found.bound, min(proven, best.cost))
    met = best.cost <= bound * (1 + _MET)
    return replace(
        best,
        bound=best.cost if met else bound,
        status="optimal" if met else "feasible",
        seconds=found.seconds + time.perf_counter() - started,
    )


def _around_a_steady_state(
    found: Found,
    costs: Costs,
    budget: float | Sequence[float] | None,
    seconds: float,
    seed: int,
    workers: int | None,
) -> Found:
    """`found`, or a better order whose ramps were solved for few microbatches (steady.py)."""
    schedule = found.schedule
    few = short(schedule.stages, schedule.microbatches)
    if few is None:
        return found
    start = find(
        costs,
        schedule.placement,
        few,
        budget,
        found.objective,
        seed=seed,
        time_limit=seconds / 4,
    )
    small = improve(start, costs, budget, seconds * 3 / 4, seed=seed, workers=workers)
    best = found
    for longer in stretched(small.schedule, schedule.microbatches):
        if _usable(longer, costs, budget):
            cost = simulate(longer, costs).cost(found.objective)
            if cost < best.cost:
                best = replace(found, schedule=replace(longer, name=schedule.name), cost=cost)
    return best


def _usable(schedule: Schedule, costs: Costs, budget: float | Sequence[float] | None) -> bool:
    """Whether the order runs and fits: what takes less than a tick may have come out of order."""
    try:
        check(schedule, costs, budget)
    except (ScheduleError, MemoryBudgetError):
        return False
    return True


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ConfigError(
            "an exact search needs ortools, which is not there: pip install 'zbpipe[solver]'"
        ) from None
    return cp_model


def tick(values: Iterable[float]) -> tuple[float, bool]:
    """A unit for `values`, and whether they all are whole multiples of it (but for rounding).

    Powers of ten from 1 down to 1e-9 are tried; where none divides them, the unit is a millionth
    of the largest.
    """
    given = [value for value in values if value > 0]
    for digits in range(_FINEST + 1):
        scaled = [value * 10**digits for value in given]
        if all(abs(x - round(x)) <= _NEAR * min(1.0, x) for x in scaled):
            return 10.0**-digits, True
    return max(given) / _STEPS, False


class _Model:
    """The CP-SAT model of one placement and one number of microbatches."""

    def __init__(self, found: Found, costs: Costs, budget: float | Sequence[float] | None) -> None:
        self._cp = _cp_model()
        self._found, self._costs = found, costs
        schedule = found.schedule
        self._placed, self._m = schedule.placement, schedule.microbatches
        self._limits = memory_limits(costs, self._placed, budget)
        times = (*costs.forward, *costs.input_grad, *costs.weight_grad, *costs.comm)
        self._tick, self._whole_ticks = tick(times)
        self._whole_bytes = True
        self._model = self._cp.CpModel()
        self._starts: dict[Action, Any] = {}
        self._horizon = self._rounded(2 * simulate(schedule, costs).makespan()) + 1
        self._declare()
        self._connect()
        for rank, limit in enumerate(self._limits):
            self._remember(schedule.stages_of(rank), limit)
        self._aim()

    def _rounded(self, seconds: float) -> int:
        """Ticks, rounded down where they are no whole number: then the bound stays a bound."""
        return math.floor(seconds / self._tick + _NEAR)

    def _length(self, action: Action) -> int:
        return self._rounded(self._costs.duration(action))

    def _end(self, action: Action) -> Any:
        return self._starts[action] + self._length(action)

    def _declare(self) -> None:
        """A start for every action, one action at a time on a rank, microbatches ascending."""
        intervals: list[list[Any]] = [[] for _ in self._found.schedule.rows]
        for stage, rank in enumerate(self._placed):
            for kind in "FIW":
                for i in range(self._m):
                    action = Action(stage, kind, i)
                    start = self._model.new_int_var(0, self._horizon, str(action))
                    self._starts[action] = start
                    length = self._length(action)
                    intervals[rank].append(
                        self._model.new_fixed_size_interval_var(start, length, f"[{action}]")
                    )
                    if i:
                        self._model.add(self._end(Action(stage, kind, i - 1)) <= start)
        for row in intervals:
            self._model.add_no_overlap(row)

    def _connect(self) -> None:
        costs, placed = self._costs, self._placed
        for stage in range(len(placed)):
            hop = 0
            if stage and placed[stage - 1] != placed[stage]:
                hop = self._rounded(costs.comm[stage - 1])
            for i in range(self._m):
                f, i_, w = (Action(stage, kind, i) for kind in "FIW")
                self._model.add(self._end(f) <= self._starts[i_])
                self._model.add(self._end(i_) <= self._starts[w])
                if stage:
                    above, gradient = Action(stage - 1, "F", i), Action(stage - 1, "I", i)
                    self._model.add(self._end(above) + hop <= self._starts[f])
                    self._model.add(self._end(i_) + hop <= self._starts[gradient])
        clock = 0
        for stage, rank in enumerate(placed):
            # Only while every stage is the first of its rank does nothing hold its first F up.
            if placed.index(rank) != stage:
                break
            if stage and placed[stage - 1] != rank:
                clock += self._rounded(costs.comm[stage - 1])
            self._model.add(self._starts[Action(stage, "F", 0)] == clock)
            clock += self._length(Action(stage, "F", 0))

    def _remember(self, stages: Sequence[int], limit: float) -> None:
        """The memory of one rank."""
        costs = self._costs
        whole = sum(max(costs.act[s], costs.stash[s]) for s in stages) * self._m
        if whole <= limit or not stages:
            return
        unit, exact = tick([*(costs.act[s] for s in stages), *(costs.stash[s] for s in stages)])
        if not exact:
            unit = limit / _STEPS
            self._whole_bytes = False
        scaled = {
            s: tuple(math.ceil(bytes_ / unit - _NEAR) for bytes_ in (costs.act[s], costs.stash[s]))
            for s in stages
        }
        times, changes = [], []
        for s in stages:
            act, stash = scaled[s]
            for i in range(self._m):
                f, i_, w = (Action(s, kind, i) for kind in "FIW")
                times += [self._starts[f], self._end(i_), self._end(w)]
                changes += [act, stash - act, -stash]
        most = math.floor(limit * (1 + _TOLERANCE) / unit + _NEAR)
        self._model.add_reservoir_constraint(times, changes, 0, most)
        for s in stages:
            act = scaled[s][0]
            room = self._m if act == 0 else most // act
            for i in range(room, self._m):
                self._model.add(
                    self._end(Action(s, "I", i - room)) <= self._starts[Action(s, "F", i)]
                )

    def _aim(self) -> None:
        """The objective between what is proven and what is there, and the hint."""
        schedule, found = self._found.schedule, self._found
        least = self._rounded(found.bound) - (0 if self._whole_ticks else 1)
        most = math.ceil(found.cost / self._tick + _NEAR)
        cost = self._model.new_int_var(max(0, least), most, "cost")
        for rank in range(schedule.ranks):
            stages = schedule.stages_of(rank)
            if not stages:
                continue
            first = self._starts[Action(stages[0], "F", 0)] if found.objective == "stage" else 0
            for stage in stages:
                self._model.add(self._end(Action(stage, "W", self._m - 1)) - first <= cost)
        self._model.minimize(cost)
        for span in simulate(schedule, self._costs).spans:
            if span.action in self._starts:
                self._model.add_hint(self._starts[span.action], self._rounded(span.start))

    def solve(
        self, seconds: float, seed: int, workers: int
    ) -> tuple[dict[Action, int] | None, float]:
        """The starts in ticks if there are any, and the proven bound in seconds."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = workers
        status = solver.solve(self._model)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return None, 0.0
        starts = {action: solver.value(start) for action, start in self._starts.items()}
        # Memory that was rounded up may forbid what is allowed: then nothing is proven.
        proven = solver.best_objective_bound * self._tick if self._whole_bytes else 0.0
        return starts, proven


def _ordered(schedule: Schedule, costs: Costs, starts: dict[Action, int]) -> Schedule:
    """The schedule whose ranks run their actions by start."""

    def key(action: Action) -> tuple[int, float, int, int, int]:
        # Of two that start together one takes no time: it comes first, else the one needed first.
        stage, kind, microbatch = action
        way = stage if kind == "F" else -stage
        return starts[action], costs.duration(action), "FIW".index(kind), way, microbatch

    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for action in sorted(starts, key=key):
        rows[schedule.placement[action.stage]].append(action)
    return replace(schedule, rows=tuple(map(tuple, rows)))
