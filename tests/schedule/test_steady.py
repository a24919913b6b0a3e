"""Short orders stretched: complete, in order, in the same memory, at the same steady pace."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpipe.costs import Costs
from zbpipe.errors import ScheduleError
from zbpipe.schedule import build
from zbpipe.schedule.check import check
from zbpipe.schedule.placements import placement
from zbpipe.schedule.search import find
from zbpipe.schedule.simulate import microbatches_held, simulate
from zbpipe.schedule.steady import short, stretch, stretched


def rows(schedule) -> list[str]:
    return [" ".join(str(action)[1:] for action in row) for row in schedule.rows]


def test_the_period_of_the_picture() -> None:
    longer = next(iter(stretch(build("zb_h1", 1, 4), 6)))
    assert rows(longer) == ["F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4 F5 I5 W5"]
    found = {tuple(rows(one)) for one in stretch(build("zb_h1", 3, 7), 9)}
    assert tuple(rows(build("zb_h1", 3, 9))) in found


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_a_shape_stretches_to_itself(name, ranks) -> None:
    few = short(ranks, 100)
    found = [one.rows for one in stretch(build(name, ranks, few), 100)]
    assert build(name, ranks, 100).rows in found


@settings(max_examples=40)
@given(
    st.sampled_from(["linear", "v"]),
    st.integers(1, 3),
    st.floats(1.0, 2.5),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.integers(0, 12),
)
def test_what_runs_keeps_memory_and_the_steady_pace(kind, ranks, times, seconds, more) -> None:
    placed = placement(kind, ranks)
    costs = Costs.uniform(len(placed), *map(float, seconds), 0.25)
    few = short(len(placed), 10**6)
    start = find(costs, placed, few, times * len(placed), time_limit=0.2).schedule
    m = 2 * few + more
    before = simulate(start, costs).cost()
    for longer in itertools.islice(stretch(start, m), 6):
        assert longer.microbatches == m
        try:
            check(longer)
        except ScheduleError:
            continue  # the ranks' periods do not fit together
        held, was = microbatches_held(longer, "W"), microbatches_held(start, "W")
        assert all(a <= b + 1e-9 for a, b in zip(held, was, strict=True))
        work = max(
            sum(costs.work(s) for s in longer.stages_of(rank)) for rank in range(longer.ranks)
        )
        assert simulate(longer, costs).cost() >= before + (m - few) * work - 1e-6


def test_no_short_order_for_few_microbatches() -> None:
    assert short(4, 23) is None
    assert short(4, 24) == 12
    assert short(64, 512) == 192


def test_long_searches_are_no_worse_than_what_was_stretched() -> None:
    costs = Costs.uniform(8, 2.0, 2.0, 1.0, 0.1, 1.0, 0.5)
    placed = placement("v", 4)
    few = find(costs, placed, short(8, 96), 5.0, time_limit=0.5)
    long = find(costs, placed, 96, 5.0, time_limit=2.0)
    for one in stretched(few.schedule, 96):
        try:
            check(one, costs, 5.0)
        except ScheduleError:
            continue
        assert long.cost <= simulate(one, costs).cost() * (1 + 1e-9)
