"""The plain integer program, through HiGHS: a second opinion on tiny cases that shares nothing.

One binary a pair of actions of a rank says which comes first, as in arXiv 2401.10241, appendix G;
starts follow by big-M, memory is the sum over all that came before. It knows no tricks: use it to
check the other searches, not in their stead. Needs highspy, part of the extra `zbpipe[solver]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from ..costs import Costs
from ..errors import ConfigError, MemoryBudgetError
from .core import Action
from .limits import memory_limits

MOST_ACTIONS = 60


def least_cost(
    costs: Costs,
    placement: Sequence[int],
    microbatches: int,
    budget: float | Sequence[float] | None = None,
    objective: str = "stage",
    seconds: float = 60.0,
) -> float:
    """The least cost of any order, in seconds, if HiGHS proves it within `seconds`.

    The microbatches need not ascend. Raises ConfigError if highspy is missing, if there are more
    than 60 actions, or if time ran out; MemoryBudgetError where no order fits `budget`.
    """
    count = 3 * len(placement) * microbatches
    if count > MOST_ACTIONS:
        raise ConfigError(f"{count} actions are too many for the plain ILP: want {MOST_ACTIONS}")
    try:
        import highspy
    except ImportError:
        raise ConfigError(
            "the ILP needs highspy, which is not there: pip install 'zbpipe[solver]'"
        ) from None
    program = _Program(highspy, costs, placement, microbatches)
    program.order_ranks()
    program.pass_messages()
    program.limit_memory(memory_limits(costs, placement, budget))
    return program.solve(objective, seconds)


class _Program:
    """The variables: a start an action, a binary a pair of one rank, a position in its rank."""

    def __init__(self, highspy: Any, costs: Costs, placement: Sequence[int], m: int) -> None:
        self._highspy, self._costs, self._placement, self._m = highspy, costs, placement, m
        self._solver = highspy.Highs()
        self._solver.setOptionValue("output_flag", False)
        self._late = m * sum(map(costs.work, range(costs.stages))) + 2 * m * sum(costs.comm)
        self._ranks: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
        for stage, rank in enumerate(placement):
            self._ranks[rank] += [Action(stage, kind, i) for kind in "FIW" for i in range(m)]
        self._start = {
            action: self._solver.addVariable(0, max(1.0, self._late))
            for row in self._ranks
            for action in row
        }
        self._before: dict[tuple[Action, Action], Any] = {}

    def order_ranks(self) -> None:
        """Of two actions of a rank one comes before the other, and no circle closes."""
        add, late = self._solver.addConstr, max(1.0, self._late)
        for row in self._ranks:
            place = {action: self._solver.addVariable(0, len(row) - 1) for action in row}
            for a, b in combinations(row, 2):
                first = self._solver.addBinary()
                self._before[a, b], self._before[b, a] = first, 1 - first
                for x, y in ((a, b), (b, a)):
                    x_first = self._before[x, y]
                    gap = self._costs.duration(x)
                    add(self._start[y] >= self._start[x] + gap - late * (1 - x_first))
                    add(place[y] >= place[x] + 1 - len(row) * (1 - x_first))

    def pass_messages(self) -> None:
        """What needs what, as the simulator has it."""
        for stage, rank in enumerate(self._placement):
            for i in range(self._m):
                f, i_, w = (Action(stage, kind, i) for kind in "FIW")
                self._needs(i_, f, 0.0)
                self._needs(w, i_, 0.0)
                if stage:
                    near = self._placement[stage - 1] == rank
                    hop = 0.0 if near else self._costs.comm[stage - 1]
                    self._needs(f, Action(stage - 1, "F", i), hop)
                    self._needs(Action(stage - 1, "I", i), i_, hop)

    def _needs(self, action: Action, other: Action, hop: float) -> None:
        wait = self._costs.duration(other) + hop
        self._solver.addConstr(self._start[action] >= self._start[other] + wait)
        if (other, action) in self._before:
            self._solver.addConstr(self._before[other, action] >= 1)

    def limit_memory(self, limits: Sequence[float]) -> None:
        """Before each action that adds to its rank's memory, the rest of it has room."""
        costs = self._costs
        for row, limit in zip(self._ranks, limits, strict=True):
            if math.isinf(limit):
                continue
            adds = {
                "F": {s: costs.act[s] for s in range(costs.stages)},
                "I": {s: costs.stash[s] - costs.act[s] for s in range(costs.stages)},
                "W": {s: -costs.stash[s] for s in range(costs.stages)},
            }
            for action in row:
                own = adds[action.kind][action.stage]
                if own <= 0:
                    continue
                others = [other for other in row if other != action]
                held = sum(
                    adds[other.kind][other.stage] * self._before[other, action] for other in others
                )
                self._solver.addConstr(held + own <= limit * (1 + 1e-9) + 1e-9)

    def solve(self, objective: str, seconds: float) -> float:
        """The least cost that is proven."""
        cost = self._solver.addVariable(0, self._solver.inf)
        starts = self._first_starts() if objective == "stage" else {}
        for rank, row in enumerate(self._ranks):
            firsts = [self._start[a] for a in row if a.kind == "F"]
            froms = [starts[rank]] if rank in starts else firsts
            for last in row:
                end = self._start[last] + self._costs.duration(last)
                for first in froms if objective == "stage" else [0.0]:
                    self._solver.addConstr(cost >= end - first)
        self._solver.setOptionValue("time_limit", seconds)
        self._solver.setOptionValue("mip_rel_gap", 0.0)
        self._solver.minimize(cost)
        status = self._solver.getModelStatus()
        known = self._highspy.HighsModelStatus
        if status == known.kInfeasible:
            raise MemoryBudgetError("no order of any kind fits the budget")
        if status != known.kOptimal:
            raise ConfigError(f"HiGHS did not finish in {seconds:g} s: {status}")
        return float(self._solver.val(cost))

    def _first_starts(self) -> dict[int, float]:
        """When ranks start in a replay: as the first microbatch comes down, if nothing is above."""
        starts: dict[int, float] = {}
        clock = 0.0
        for stage, rank in enumerate(self._placement):
            if rank in starts:
                break
            if stage:
                clock += self._costs.comm[stage - 1]
            starts[rank] = clock
            clock += self._costs.forward[stage]
        return starts
