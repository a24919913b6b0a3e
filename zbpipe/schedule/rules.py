"""Rules that a list scheduler follows, drawn at random and varied: what `search` searches in.

A rule says by which key a rank prefers one action to another. The key of microbatch 0 grows from
stage to stage along the way that a microbatch takes, down and up again, as its time would in a
repeating pattern; a microbatch later, it is one interval later. How steeply it grows on each way
decides how far forwards run ahead, and so the memory; 1F1B, ZB-H1, ZB-H2 and the V-shaped
schedules (arXiv 2405.15362, section 3) are all of this kind.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .native import Problem

# The key's unit on a grid: a stage's F, I or W, if they are equally long and it has two chunks.
_GRID = 6


@dataclass(frozen=True)
class Rule:
    """What `policy` makes keys and limits of.

    `down`, `up`: growth of the key a boundary, one number a pass over the ranks, in times of F
    or I and hop (`grid` False) or in sixths of the interval (`grid` True); `across`: the same
    where the pass turns; `turn`: from the last stage's F to its I, in sixths of the interval.
    `pace`: the interval, in seconds of work of the busiest rank; `patience`, in the same unit,
    and `gap`: see csrc/schedule/lister.hpp; `due`, `slope`: W that may be due, on rank 0 and
    more on every further rank. `strict`: see there.
    `bumps`: (first stage, past the last, down, up), what to
    add to the keys of F and of I of these stages, in sixths of the interval.
    """

    down: tuple[float, ...]
    up: tuple[float, ...]
    across: tuple[float, float] = (1.0, 1.0)
    turn: float = 1.0
    grid: bool = False
    pace: float = 1.0
    patience: float = 0.0
    gap: float = 0.0
    due: int = 1000
    slope: int = 0
    strict: bool = True
    bumps: tuple[tuple[int, int, float, float], ...] = ()

    def policy(self, problem: Problem) -> dict[str, Any]:
        """Arguments of `Problem.list`."""
        costs, placed, ranks = problem.costs, problem.placement, problem.ranks
        load = [0.0] * ranks
        for stage, rank in enumerate(placed):
            load[rank] += costs.work(stage)
        busiest = max(load) or 1.0
        unit = busiest / _GRID
        last = len(placed) - 1

        def step(
            ways: Sequence[float], turn: float, stage: int, boundary: int, own: float
        ) -> float:
            if placed[boundary] == placed[boundary + 1]:
                return turn * (unit if self.grid else own)
            factor = ways[min(stage // ranks, len(ways) - 1)]
            return factor * (unit if self.grid else own + problem.hops[boundary])

        forward, backward = [0.0] * (last + 1), [0.0] * (last + 1)
        for s in range(1, last + 1):
            own = costs.forward[s - 1]
            forward[s] = forward[s - 1] + step(self.down, self.across[0], s, s - 1, own)
        backward[last] = forward[last] + self.turn * unit
        for s in range(last - 1, -1, -1):
            own = costs.input_grad[s + 1]
            backward[s] = backward[s + 1] + step(self.up, self.across[1], s, s, own)
        for first, past, down, up in self.bumps:
            for s in range(first, min(past, last + 1)):
                forward[s] += down * unit
                backward[s] += up * unit
        return {
            "forward_key": forward,
            "backward_key": backward,
            "interval": self.pace * busiest,
            "patience": self.patience * busiest,
            "gap": self.gap,
            "strict": self.strict,
            "flight": [problem.microbatches] * len(placed),
            "backlog": [max(0, self.due + self.slope * rank) for rank in range(ranks)],
        }


def draw(random_: random.Random, passes: int) -> Rule:
    """A rule out of nowhere; every second one of several passes is on the grid."""
    grid = passes > 1 and random_.random() < 0.5

    def growth() -> tuple[float, ...]:
        if grid:
            return tuple(float(random_.randint(1, 4)) for _ in range(passes))
        usual = (0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 3.0)
        return tuple(random_.choice((*usual, random_.uniform(0, 4))) for _ in range(passes))

    waits = (math.inf, math.inf, 0.5, 1.0, 2.0) if grid else (0.0, 0.0, 0.1, 0.2, 0.3, 0.5, 1.0)
    turns = tuple(float(random_.randint(1, 6)) for _ in range(3))
    return Rule(
        down=growth(),
        up=growth(),
        across=(turns[0], turns[1]) if grid else (1.0, 1.0),
        turn=turns[2] if grid else random_.choice((0.0, 1.0, random_.uniform(-20, 20))),
        grid=grid,
        pace=1.0 if grid else random_.choice((1.0, 1.0, 0.8, 0.6, 1.2)),
        patience=random_.choice(waits),
        gap=random_.choice((0.0, 0.0, 0.3, 0.5, 0.7, 0.9, 1.0)),
        due=random_.choice((1000, 1000, 0, 1, 2, 4)),
        slope=random_.choice((0, 0, 1, 2)),
        strict=random_.random() < 0.7,
    )


def vary(random_: random.Random, rule: Rule, stages: int) -> Rule:
    """A rule near `rule`: one or two of its numbers drawn anew or shifted."""
    if random_.random() < 0.6:
        first = random_.randrange(stages)
        past = first + random_.choice((1, 1, 2, 4, stages))
        size = random_.choice((0.2, 1.0, 3.0))
        way = random_.choice(((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)))
        down, up = (factor * random_.gauss(0, size) for factor in way)
        return replace(rule, bumps=(*rule.bumps, (first, past, down, up)))
    other = draw(random_, len(rule.down))
    while other.grid != rule.grid:
        other = draw(random_, len(rule.down))
    names = [field.name for field in fields(Rule) if field.name not in ("grid", "bumps")]
    changes: dict[str, Any] = {}
    for name in random_.sample(names, random_.choice((1, 1, 2))):
        old, new = getattr(rule, name), getattr(other, name)
        if name in ("down", "up", "across"):
            at = random_.randrange(len(old))
            near = max(0.0, old[at] + random_.gauss(0, 0.25))
            changes[name] = (*old[:at], random_.choice((new[at], near)), *old[at + 1 :])
        elif name in ("turn", "patience", "gap", "pace") and random_.random() < 0.5:
            near = old + random_.gauss(0, 1.0 if name == "turn" else 0.1)
            changes[name] = near if name == "turn" else max(0.05 if name == "pace" else 0.0, near)
        else:
            changes[name] = new
    return replace(rule, **changes)
