"""What a memory budget leaves for activations and stash, and the least that there must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..costs import Costs
from ..errors import ConfigError, MemoryBudgetError


def memory_limits(
    costs: Costs, placement: Sequence[int], budget: float | Sequence[float] | None
) -> list[float]:
    """Bytes each rank has for act and stash: its budget less the largest transient of its stages.

    `budget`: bytes, one number for all or one a rank; None is no limit (inf). Raises ConfigError
    naming the entry that is not a number ≥ 0, or a wrong length.
    """
    ranks = max(placement) + 1
    if budget is None:
        return [math.inf] * ranks
    given = [budget] * ranks if isinstance(budget, int | float) else list(budget)
    if len(given) != ranks:
        raise ConfigError(f"budget has {len(given)} entries: want one number, or {ranks}")
    for rank, value in enumerate(given):
        if not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"budget[{rank}] = {value!r}: want bytes ≥ 0")
    return [value - _transient(costs, placement, rank) for rank, value in enumerate(given)]


def least_budget(costs: Costs, placement: Sequence[int]) -> list[float]:
    """Bytes each rank needs to run at all: one microbatch on every stage it holds, and transients.

    A stage counts the larger of act and stash: the search never admits an F whose I might not fit.
    """
    ranks = max(placement) + 1
    held = [0.0] * ranks
    for stage, rank in enumerate(placement):
        held[rank] += max(costs.act[stage], costs.stash[stage])
    return [held[rank] + _transient(costs, placement, rank) for rank in range(ranks)]


def require_least(
    costs: Costs, placement: Sequence[int], budget: float | Sequence[float] | None
) -> None:
    """Raise MemoryBudgetError naming rank, stages and the minimum if `budget` is under it."""
    limits = memory_limits(costs, placement, budget)
    least = least_budget(costs, placement)
    for rank, (limit, need) in enumerate(zip(limits, least, strict=True)):
        transient = _transient(costs, placement, rank)
        if limit < (need - transient) * (1 - 1e-9):
            stages = [s for s, owner in enumerate(placement) if owner == rank]
            plural = "s" if len(stages) > 1 else ""
            raise MemoryBudgetError(
                f"budget of {limit + transient:.15g} bytes on rank {rank}: stage{plural} "
                f"{', '.join(map(str, stages))} need{'' if plural else 's'} at least {need:.15g} "
                f"for one microbatch"
            )


def _transient(costs: Costs, placement: Sequence[int], rank: int) -> float:
    return max(
        (costs.transient[s] for s, owner in enumerate(placement) if owner == rank), default=0.0
    )
