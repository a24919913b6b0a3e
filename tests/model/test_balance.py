"""Partitions for a schedule: never worse than the smallest slowest stage, and inside the budget."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpipe.costs import Costs
from zbpipe.model.balance import balance, stage_costs
from zbpipe.model.partition import partition
from zbpipe.schedule import build
from zbpipe.schedule.simulate import planned_peak, simulate

SHAPES = [("1f1b", 2, 4), ("zb_h1", 3, 7), ("zb_h2", 4, 5), ("interleaved", 2, 6), ("zb_v", 2, 4)]
times = st.integers(1, 9).map(float)


@st.composite
def layers(draw, least: int = 8, most: int = 10) -> Costs:
    n = draw(st.integers(least, most))
    row = st.lists(times, min_size=n, max_size=n)
    rest = st.lists(times, min_size=n - 1, max_size=n - 1)
    act = draw(row)
    return Costs(
        draw(row), draw(row), draw(row), [0.125] * (n - 1), act, [a / 2 for a in act],
        draw(row), draw(rest), "profiled",
    )  # fmt: skip


def test_stages_add_layers_up() -> None:
    found = stage_costs(
        Costs([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 20], [1, 2, 4], [1, 1, 2], [5, 9, 7], [64, 32]),
        (2, 1),
    )
    assert found == Costs([3, 3], [9, 6], [15, 9], [20], [3, 4], [2, 2], [9, 7], [32])


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), layers(), st.data())
def test_never_slower_than_the_smallest_slowest_stage(shape, costs, data) -> None:
    schedule = build(*shape)
    fixed = {}
    if data.draw(st.booleans()):
        fixed = {data.draw(st.integers(0, schedule.stages - 1)): data.draw(st.integers(1, 2))}
    work = [costs.work(i) for i in range(costs.stages)]
    start = partition(work, schedule.stages, fixed)
    found = balance(costs, schedule, fixed=fixed)
    assert sum(found.sizes) == costs.stages and min(found.sizes) >= 1
    assert all(found.sizes[stage] == count for stage, count in fixed.items())
    assert found.cost == simulate(schedule, stage_costs(costs, found.sizes)).cost()
    assert found.cost <= simulate(schedule, stage_costs(costs, start)).cost() * (1 + 1e-8)
    assert balance(costs, schedule, fixed=fixed) == found


@settings(max_examples=30)
@given(st.sampled_from(SHAPES[:3]), layers(most=9), st.floats(0.6, 1.1))
def test_the_budget_comes_before_the_time(shape, costs, share) -> None:
    schedule = build(*shape)

    def lacks(sizes) -> float:
        own = stage_costs(costs, sizes)
        return max(planned_peak(schedule, own, rank) for rank in range(schedule.ranks))

    free = balance(costs, schedule)
    budget = [lacks(free.sizes) * share] * schedule.ranks
    found = balance(costs, schedule, budget)
    assert found.lacking == pytest.approx(max(0.0, lacks(found.sizes) - budget[0]))
    work = [costs.work(i) for i in range(costs.stages)]
    assert lacks(found.sizes) <= max(budget[0], lacks(partition(work, schedule.stages)))


def test_the_best_of_all_partitions_where_single_moves_lead_there() -> None:
    # A head as dear as three layers: 1F1B is best off with less on the later stages throughout.
    n = 15
    row = (1.0,) * (n - 1) + (3.0,)
    costs = Costs(row, row, row, (0.05,) * (n - 1), row, row, (0.0,) * n, (0.0,) * (n - 1))
    schedule = build("1f1b", 4, 8)
    ways = (
        tuple(b - a for a, b in pairwise((0, *inner, n))) for inner in combinations(range(1, n), 3)
    )
    best = min(simulate(schedule, stage_costs(costs, way)).cost() for way in ways)
    found = balance(costs, schedule)
    assert math.isclose(found.cost, best)
    slowest = partition([costs.work(i) for i in range(n)], 4)
    assert found.cost < 0.99 * simulate(schedule, stage_costs(costs, slowest)).cost()
