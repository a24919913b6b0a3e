"""Search for the best order under a memory budget: list scheduling by many rules, then annealing.

Rules (rules.py) are drawn and varied by an evolution in which the better ones have more offspring;
each makes an order by memory-limited list scheduling. The best few orders are then annealed: single
actions, runs of them, and the same action of many microbatches move within their rank. For many
microbatches an order found for few joins in, its steady state repeated (steady.py). The search ends
early where the cost meets the proven bound. Both loops are native (csrc/schedule).
"""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..costs import Costs
from ..errors import ConfigError, MemoryBudgetError, ScheduleError
from . import families
from .bounds import lower_bound
from .core import Schedule
from .limits import require_least
from .native import Problem, Replayed
from .rules import Rule, draw, vary
from .steady import short, stretched

# Seconds: of any search, and of zb1p and zb2p, whose answers are nearer at hand.
TIME_LIMIT, SHORT_LIMIT = 10.0, 1.5

# How much work a second of `time_limit` stands for. The effort is a count, so that the clock of a
# busy machine does not change the result; measured on two shared cores, with half to spare.
_LISTED = 8.0e6  # actions listed a second
_MOVED = 3.0e8  # actions × moves annealed a second
# What a list or a move takes beside its actions, in actions.
_LIST_COST, _MOVE_COST = 1000, 300
_LIST_SHARE = 0.2
_POOL = 24
# Orders that a round anneals for the first time, and how often it then anneals the best.
_FRESH, _AGAIN = 6, 2
# Each round lists, then anneals, with so many shares of the effort: what is easy ends early.
_ROUNDS = (1, 4, 9)
# Share of the time limit that a short order to stretch is searched with.
_STEADY_SHARE = 0.25
# Share of the mean span in what is compared: leads over plateaus of the largest span.
_MEAN = 0.05
_MET = 1e-9


@dataclass(frozen=True)
class Found:
    """A schedule with what it costs and what none can beat, in seconds, for `objective`.

    `status`: "optimal" where the two meet, else "feasible"; `seconds`: spent on finding it.
    """

    schedule: Schedule
    objective: str
    cost: float
    bound: float
    status: str
    seconds: float

    @property
    def gap(self) -> float:
        """(cost - bound) / bound; 0 where there is nothing to do."""
        return (self.cost - self.bound) / self.bound if self.bound > 0 else 0.0


def search(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    budget: float | Sequence[float] | None = None,
    objective: str = "stage",
    seed: int = 0,
    time_limit: float = TIME_LIMIT,
) -> Schedule:
    """The schedule that `find` finds."""
    return find(
        costs, placement, microbatches, budget, objective, seed=seed, time_limit=time_limit
    ).schedule


def find(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    budget: float | Sequence[float] | None = None,
    objective: str = "stage",
    *,
    starts: Iterable[Schedule] | None = None,
    seed: int = 0,
    time_limit: float = TIME_LIMIT,
    name: str = "search",
) -> Found:
    """The best schedule found for `costs` on `placement` inside `budget` bytes.

    `budget`: one number, or one a rank, of act, stash and transients; None is no limit.
    `objective`: "stage" (largest span of a rank) or "sync" (global span). `starts`: schedules it
    shall be no worse than, where they fit; by default the families' of this placement. The result
    depends on `seed` and `time_limit` (seconds) alone: the effort is a count of work that takes
    about half of `time_limit`, and the clock stops the search only on a machine that is much
    slower.

    F, I and W of a stage ascend in microbatches and are never fused. Raises MemoryBudgetError
    naming rank, stages and the minimum where the budget cannot hold a single microbatch,
    ConfigError on arguments that do not match.
    """
    started = time.perf_counter()
    if not time_limit > 0:
        raise ConfigError(f"time_limit = {time_limit!r}: want seconds > 0")
    bound = lower_bound(costs, placement, microbatches, budget, objective)
    require_least(costs, placement, budget)
    problem = Problem(costs, placement, microbatches, budget)
    hunt = _Hunt(problem, objective, bound, seed, started + time_limit)
    for schedule in shapes(problem.placement, microbatches) if starts is None else starts:
        hunt.offer(problem.order(schedule), None)
    effort = time_limit / 2 / sum(_ROUNDS)
    for share in _ROUNDS:
        if share == _ROUNDS[1] and not hunt.met:
            for schedule in _stretched(
                costs, placement, microbatches, budget, objective, seed, time_limit * _STEADY_SHARE
            ):
                hunt.offer(problem.order(schedule), None)
        listing, annealing = effort * share * _LIST_SHARE, effort * share * (1 - _LIST_SHARE)
        hunt.list(int(listing * _LISTED / (problem.actions + _LIST_COST)))
        hunt.anneal(annealing * _MOVED / (problem.actions + _MOVE_COST))
    best = hunt.best()
    cost = best.cost(objective)
    return Found(
        problem.schedule(best.order, name),
        objective,
        cost,
        bound,
        "optimal" if hunt.met else "feasible",
        time.perf_counter() - started,
    )


def _stretched(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    budget: float | Sequence[float] | None,
    objective: str,
    seed: int,
    time_limit: float,
) -> Iterator[Schedule]:
    """Orders for many microbatches around the steady state of one that was found for few."""
    few = short(len(placement), microbatches)
    if few is None:
        return
    found = find(costs, placement, few, budget, objective, seed=seed, time_limit=time_limit)
    yield from stretched(found.schedule, microbatches)


def shapes(placed: Sequence[int], microbatches: int) -> Iterator[Schedule]:
    """The families' schedules of a placement."""
    for name in families.FAMILIES:
        try:
            schedule = families.build(name, max(placed) + 1, microbatches)
        except ScheduleError:
            continue  # a shape that does not exist for so many ranks or microbatches
        if schedule.placement == tuple(placed) and schedule.copies == 1:
            yield schedule


@dataclass(order=True)
class _Entry:
    """An order in the pool; sorted by energy, then by age."""

    energy: float
    age: int
    order: Any = field(compare=False)
    rule: Rule | None = field(compare=False)
    replayed: Replayed = field(compare=False)
    annealed: bool = field(compare=False, default=False)

    def cost(self, objective: str) -> float:
        return self.replayed.stage if objective == "stage" else self.replayed.sync


class _Hunt:
    """The pool of the best orders seen, and the two ways to better ones."""

    def __init__(
        self, problem: Problem, objective: str, bound: float, seed: int, deadline: float
    ) -> None:
        self._problem, self._objective = problem, objective
        self._bound, self._seed, self._deadline = bound, seed, deadline
        self._random = random.Random(seed)
        self._passes = -(-len(problem.placement) // problem.ranks)
        self._tried = self._annealings = 0
        self._pool: list[_Entry] = []
        self._age = 0

    @property
    def met(self) -> bool:
        """Whether the best cost is the bound."""
        if not self._pool:
            return False
        cost = min(entry.cost(self._objective) for entry in self._pool)
        return cost <= self._bound * (1 + _MET)

    def best(self) -> _Entry:
        if not self._pool:
            raise MemoryBudgetError("no order was found that fits the budget")
        return min(self._pool, key=lambda entry: (entry.cost(self._objective), entry))

    def offer(self, order: Any, rule: Rule | None, annealed: bool = False) -> None:
        """Take `order` into the pool if it runs, fits, is new and good enough."""
        self._age += 1
        if order is None or (rule is None and not self._problem.fits(order)):
            return
        replayed = self._problem.replay(order)
        if replayed is None:
            return
        cost = replayed.stage if self._objective == "stage" else replayed.sync
        entry = _Entry(cost + _MEAN * replayed.mean, self._age, order, rule, replayed, annealed)
        if any(abs(entry.energy - other.energy) <= 1e-12 * entry.energy for other in self._pool):
            return
        self._pool = sorted([*self._pool, entry])[:_POOL]

    def list(self, count: int) -> None:
        """Try `count` rules more; the first call tries all plain ones at least."""
        fresh = self._tried == 0
        rules = itertools.chain(_plain(self._passes) if fresh else (), self._rules(count))
        for rule in rules:
            if self.met or (
                self._tried > len(PLAIN) + 6 * len(SHAPED) and time.perf_counter() > self._deadline
            ):
                return
            self._tried += 1
            self.offer(self._problem.list(**rule.policy(self._problem)), rule)

    def _rules(self, count: int) -> Iterator[Rule]:
        """`count` rules, drawn where nothing is known yet, else most of them varied."""
        random_, stages = self._random, len(self._problem.placement)
        for number in range(count):
            parents = [entry.rule for entry in self._pool if entry.rule is not None]
            if not parents or number < count // 4 or random_.random() < 0.2:
                yield draw(random_, self._passes)
            else:
                parent = parents[min(int(random_.expovariate(0.7)), len(parents) - 1)]
                yield vary(random_, parent, stages)

    def anneal(self, moves: float) -> None:
        """Anneal orders that were not yet with half of `moves`, then the best with the rest."""
        fresh = [entry for entry in self._pool if not entry.annealed][:_FRESH]
        self._anneal(fresh, moves / 2)
        if self._pool:
            self._anneal([self.best()] * _AGAIN, moves / 2)

    def _anneal(self, entries: Sequence[_Entry], moves: float) -> None:
        """Anneal every one of `entries`, on several threads; the result knows nothing of those."""
        left = self._deadline - time.perf_counter()
        if self.met or left <= 0 or not entries or moves < len(entries):
            return
        times = self._problem.costs
        heat = max(times.weight_grad) or max(times.forward)
        first, self._annealings = self._annealings, self._annealings + len(entries)

        def one(number: int) -> Any:
            return self._problem.anneal(
                entries[number].order,
                sync=self._objective == "sync",
                moves=int(moves / len(entries)),
                seed=self._seed + first + number,
                heat=heat * _HEATS[(first + number) % len(_HEATS)],
                share=_MEAN,
                seconds=left,
            )

        with ThreadPoolExecutor(min(len(entries), os.cpu_count() or 1)) as threads:
            orders = list(threads.map(one, range(len(entries))))
        for entry, order in zip(entries, orders, strict=True):
            entry.annealed = True
            self.offer(order, entry.rule, annealed=True)


def _plain(passes: int) -> Iterator[Rule]:
    """The rules that are tried first: those of PLAIN, and for two passes those of SHAPED."""
    for down, up, turn, pace, patience, gap, slope in PLAIN:
        yield Rule(
            (down,) * passes,
            (up,) * passes,
            turn=turn,
            pace=pace,
            patience=patience,
            gap=gap,
            slope=slope,
        )
    if passes == 2:
        for (first, second), across, gap in itertools.product(SHAPED, (1.0, 3.0, 5.0), (0.0, 0.5)):
            yield Rule(
                (first, second),
                (second, first),
                across=(across, across),
                grid=True,
                patience=math.inf,
                gap=gap,
            )


# Heat of one annealing after the other, in times of W.
_HEATS = (0.1, 0.05, 0.3, 0.02)

# down, up, turn, pace, patience, gap, slope: the rules that were best on the 12 rows of
# arXiv 2401.10241, table 9, under 1p, 1.5p and 2p.
PLAIN = (
    (3.0, 2.0, 1.0, 1.0, 0.5, 0.95, 2),
    (1.0, 2.0, 0.0, 1.0, 0.3, 0.92, 1),
    (2.85, 1.0, -1.0, 1.0, 0.1, 0.7, 0),
    (0.5, 1.5, -1.0, 1.2, 0.03, 0.0, 1),
    (3.0, 2.97, -8.86, 0.87, 0.07, 0.126, 1),
    (1.47, 2.27, 0.0, 0.6, 0.5, 0.137, 1),
    (3.0, 1.07, 0.76, 0.75, 0.165, 0.0, 0),
    (2.0, 3.4, 1.46, 1.0, 1.0, 0.0, 2),
    (0.58, 3.8, 0.52, 0.8, 0.48, 0.3, 0),
    (1.15, 1.5, 0.93, 0.6, 0.11, 0.35, 1),
    (0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0),
)

# Growth of the keys on the first and the second pass, in sixths of the interval: V-Min, V-Half and
# V-ZB (arXiv 2405.15362, section 3) are among them, which hold a third, a half and all of p.
SHAPED = ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (2.0, 2.0), (3.0, 1.0), (3.0, 2.0), (4.0, 2.0))
