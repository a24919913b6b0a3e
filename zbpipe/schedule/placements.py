"""Which rank runs which stage, by name, and what a chunk of a rank's layers costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..costs import Costs
from ..errors import ConfigError
from .core import linear_placement

PLACEMENTS = ("linear", "v")


def placement(name: str, ranks: int) -> tuple[int, ...]:
    """`linear`: one stage a rank; `v`: stage s < p on rank s, else on rank 2p - 1 - s.

    Raises ConfigError on another name.
    """
    if name == "linear":
        return linear_placement(ranks)
    if name == "v":
        return (*range(ranks), *reversed(range(ranks)))
    raise ConfigError(f"placement = {name!r}: want one of {', '.join(PLACEMENTS)}")


def chunked(costs: Costs, placed: Sequence[int]) -> Costs:
    """Costs of the stages of `placed`, from those of one whole stage a rank (`costs`).

    Of the v stages that a rank holds each takes 1/v of the rank's seconds and bytes; a hop takes
    what it takes between its two ranks, and nothing within one. Raises ConfigError if `costs` are
    of another number of ranks.
    """
    ranks = max(placed) + 1
    if costs.stages != ranks:
        raise ConfigError(f"costs are for {costs.stages} stages: want {ranks}, one a rank")
    if tuple(placed) == linear_placement(ranks):
        return costs
    held = [sum(owner == rank for owner in placed) for rank in range(ranks)]

    def share(whole: Sequence[float]) -> tuple[float, ...]:
        return tuple(whole[rank] / held[rank] for rank in placed)

    def across(whole: Sequence[float]) -> tuple[float, ...]:
        # A message passes every boundary between its ranks; around the ring it takes the slowest.
        return tuple(
            whole[min(a, b)] if abs(a - b) == 1 else (0.0 if a == b else max(whole))
            for a, b in pairwise(placed)
        )

    return replace(
        costs,
        forward=share(costs.forward),
        input_grad=share(costs.input_grad),
        weight_grad=share(costs.weight_grad),
        act=share(costs.act),
        stash=share(costs.stash),
        transient=tuple(costs.transient[rank] for rank in placed),
        comm=across(costs.comm),
        boundary=across(costs.boundary),
    )
