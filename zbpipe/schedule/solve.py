"""One entry for every name: a shape, `zb1p`, `zb2p` by search, or "auto" over placements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..costs import Costs
from ..errors import ConfigError, MemoryBudgetError
from . import families
from .bounds import lower_bound
from .check import check
from .core import Schedule
from .placements import chunked, placement
from .search import SHORT_LIMIT, TIME_LIMIT, Found, find
from .simulate import simulate

Budget = float | Sequence[float] | None

# Searched under so many times p microbatches of a rank's act.
SEARCHED = {"zb1p": 1.0, "zb2p": 2.0}


def solve(
    name: str,
    costs: Costs | Mapping[str, Costs],
    microbatches: int,
    budget: Budget = None,
    objective: str = "stage",
    *,
    placements: Sequence[str] = ("linear",),
    seed: int = 0,
    time_limit: float | None = None,
) -> Found:
    """The schedule that `name` stands for, solved for the costs and memory there are.

    `name`: a family (any spelling), which is taken as it is; `zb1p` or `zb2p`, a search under p
    or 2p microbatches of act a rank and under `budget`, linear; `search`, under `budget` alone, or
    `auto`: the same over all `placements`, the best that fits (the first of equals). Searches
    start from the families, so that they are never worse than one that fits.

    `costs`: of one whole stage a rank, from which those of chunks are made, or a mapping from
    placement to the costs of its stages. `budget`: bytes, one number or one a rank. `time_limit`:
    seconds for each placement's search; None is 1.5 for zb1p and zb2p, else 10.

    Raises ScheduleError for an unknown name, MemoryBudgetError where nothing fits (saying what
    would), ConfigError on arguments that cannot be right.
    """
    key = name.lower().replace("_", "").replace("-", "")
    if not placements:
        raise ConfigError("placements = (): want at least one")
    if time_limit is None:
        time_limit = SHORT_LIMIT if key in SEARCHED else TIME_LIMIT
    if key in SEARCHED:
        own = _costs(costs, "linear")
        limits = _tightest(own, SEARCHED[key], budget)
        return _search(own, "linear", microbatches, limits, objective, seed, time_limit, key)
    if key not in ("auto", "search"):
        return _shape(name, costs, microbatches, budget, objective)
    found, refused = [], []
    for kind in placements:
        own = _costs(costs, kind)
        label = "search" if kind == "linear" else f"search_{kind}"
        try:
            found.append(
                _search(own, kind, microbatches, budget, objective, seed, time_limit, label)
            )
        except MemoryBudgetError as error:
            refused.append(f"{kind}: {error}")
    if not found:
        raise MemoryBudgetError(f"no schedule fits memory: {'; '.join(refused)}")
    seconds = sum(one.seconds for one in found)
    return replace(min(found, key=lambda one: one.cost), seconds=seconds)


def _costs(costs: Costs | Mapping[str, Costs], kind: str) -> Costs:
    if isinstance(costs, Costs):
        return chunked(costs, placement(kind, costs.stages))
    if kind not in costs:
        raise ConfigError(f"no costs for placement {kind!r}: there are {', '.join(costs)}")
    return costs[kind]


def _ranks(costs: Costs, kind: str) -> int:
    return costs.stages // (2 if kind == "v" else 1)


def _tightest(costs: Costs, times: float, budget: Budget) -> list[float]:
    """Per rank the smaller of `times` · p microbatches, with transients, and `budget`."""
    p = costs.stages
    # A microbatch holds act until I and stash until W; with biases and norms either may be larger.
    held = [max(pair) for pair in zip(costs.act, costs.stash, strict=True)]
    own = [times * p * held[rank] + costs.transient[rank] for rank in range(p)]
    if budget is None:
        return own
    given = [budget] * p if isinstance(budget, int | float) else list(budget)
    if len(given) != p:
        raise ConfigError(f"budget has {len(given)} entries: want one number, or {p}")
    return [min(pair) for pair in zip(own, given, strict=True)]


def _search(
    costs: Costs,
    kind: str,
    microbatches: int,
    budget: Budget,
    objective: str,
    seed: int,
    time_limit: float,
    label: str,
) -> Found:
    placed = placement(kind, _ranks(costs, kind))
    return find(
        costs,
        placed,
        microbatches,
        budget,
        objective,
        seed=seed,
        time_limit=time_limit,
        name=label,
    )


def _shape(
    name: str,
    costs: Costs | Mapping[str, Costs],
    microbatches: int,
    budget: Budget,
    objective: str,
) -> Found:
    """A family's schedule as it is: checked, simulated, and compared with the bound."""
    if isinstance(costs, Costs):
        schedule = families.build(name, costs.stages, microbatches)
        own = chunked(costs, schedule.placement)
    else:
        schedule, own = _mapped_shape(name, costs, microbatches)
    check(schedule, own, budget)
    cost = simulate(schedule, own).cost(objective)
    bound = lower_bound(own, schedule.placement, microbatches, budget, objective)
    met = math.isclose(cost, bound, rel_tol=1e-9)
    return Found(schedule, objective, cost, bound, "optimal" if met else "feasible", 0.0)


def _mapped_shape(
    name: str, costs: Mapping[str, Costs], microbatches: int
) -> tuple[Schedule, Costs]:
    for kind, own in costs.items():
        ranks = _ranks(own, kind)
        schedule = families.build(name, ranks, microbatches)
        if schedule.placement == placement(kind, ranks):
            return schedule, own
    raise ConfigError(f"no costs for the placement of {name!r}: there are {', '.join(costs)}")
