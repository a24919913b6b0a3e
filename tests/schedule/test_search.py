"""What search and solve promise: whole, inside the budget, never worse nor below the bound."""

import csv
import importlib
import math
from itertools import cycle, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from listing import best_of_all, problems
from zbpipe.costs import Costs, layer_bytes
from zbpipe.errors import ConfigError, MemoryBudgetError, ScheduleError
from zbpipe.program import compile
from zbpipe.schedule import FAMILIES, build
from zbpipe.schedule.bounds import lower_bound
from zbpipe.schedule.check import check
from zbpipe.schedule.limits import least_budget
from zbpipe.schedule.placements import chunked, placement
from zbpipe.schedule.search import find, search
from zbpipe.schedule.simulate import simulate
from zbpipe.schedule.solve import solve

OBJECTIVES = st.sampled_from(["stage", "sync"])
SEARCH = importlib.import_module("zbpipe.schedule.search")
PAPER = Path(__file__).parents[2] / "bench" / "zb_costs.csv"
# So little that a case takes no time; the effort is counted, so that results repeat.
BRIEF = 0.02
# Sums are made in other orders: a rounding error is no failure.
EQUAL = 1 + 1e-9


RUN = sorted(name for name in FAMILIES if name != "dualpipe")  # which has two copies


def families_that_fit(costs, placed, m, budget):
    for name in RUN:
        schedule = build(name, max(placed) + 1, m)
        if schedule.placement == placed:
            try:
                check(schedule, costs, budget)
            except MemoryBudgetError:
                continue
            yield schedule


@settings(max_examples=120)
@given(problems(), OBJECTIVES, st.integers(0, 3))
def test_found_schedules_are_right(case, objective, seed):
    costs, placed, m, budget = case
    found = find(costs, placed, m, budget, objective, seed=seed, time_limit=BRIEF)
    check(found.schedule, costs, budget)
    compile(found.schedule)
    for stage in range(len(placed)):
        for kind in "FIW":
            row = found.schedule.rows[placed[stage]]
            order = [i for s, k, i in row if (s, k) == (stage, kind)]
            assert order == list(range(m))
    cost = simulate(found.schedule, costs).cost(objective)
    assert found.cost == pytest.approx(cost, abs=1e-9)
    assert found.bound <= cost * EQUAL
    assert (found.status == "optimal") == (found.cost <= found.bound * EQUAL)
    for schedule in families_that_fit(costs, placed, m, budget):
        assert cost <= simulate(schedule, costs).cost(objective) * EQUAL


@settings(max_examples=25)
@given(problems(), OBJECTIVES, st.integers(0, 3))
def test_equal_seeds_give_equal_schedules(case, objective, seed):
    costs, placed, m, budget = case
    with pytest.MonkeyPatch.context() as patch:
        # Little work and a limit that no clock meets before it is done.
        for rate in ("_LISTED", "_MOVED"):
            patch.setattr(SEARCH, rate, getattr(SEARCH, rate) / 100)
        one, other = (
            search(costs, placed, m, budget, objective, seed=seed, time_limit=10) for _ in range(2)
        )
    assert one == other


@given(problems(), st.data())
def test_a_budget_under_the_minimum_names_stage_and_minimum(case, data):
    costs, placed, m, _ = case
    least = least_budget(costs, placed)
    rank = data.draw(st.integers(0, max(placed)))
    budget = [need + (r == rank) * -0.25 for r, need in enumerate(least)]
    stages = [str(s) for s, owner in enumerate(placed) if owner == rank]
    with pytest.raises(
        MemoryBudgetError, match=rf"rank {rank}: stages? {', '.join(stages)}"
    ) as error:
        search(costs, placed, m, budget, time_limit=BRIEF)
    assert f"at least {least[rank]:.15g}" in str(error.value)
    check(search(costs, placed, m, least, time_limit=BRIEF), costs, least)


@pytest.mark.parametrize("budget", [-1, math.nan, [1, 2, 3], [2, "x"]])
def test_a_budget_that_cannot_be_right(budget):
    with pytest.raises(ConfigError, match="budget"):
        search(Costs.uniform(2), (0, 1), 2, budget)


def test_other_arguments_that_cannot_be_right():
    for wrong, named in (
        ({"time_limit": 0}, "time_limit"),
        ({"objective": "step"}, "objective = 'step'"),
        ({"microbatches": 0}, "microbatches = 0"),
        ({"placement": (0, 1, 2)}, "2 stages: want 3"),
    ):
        arguments = {"costs": Costs.uniform(2), "placement": (0, 1), "microbatches": 2} | wrong
        with pytest.raises(ConfigError, match=named):
            search(**arguments)


def paper_costs(index):
    lines = [line for line in PAPER.read_text().splitlines() if not line.startswith("#")]
    row = list(csv.DictReader(lines))[index]
    f, i, w, comm = (1e-6 * int(row[key]) for key in ("tf_us", "tb_us", "tw_us", "tcomm_us"))
    act, stash = layer_bytes(int(row["s"]), 1, int(row["h"]), int(row["a"]))
    p, m = int(row["p"]), int(row["m"])
    return Costs.uniform(p, f, i, w, comm, 1.0, stash / act), m, row


@pytest.mark.parametrize("index", range(12))
@pytest.mark.parametrize("name", ["zb1p", "zb2p"])
def test_no_row_of_the_paper_is_better(index, name):
    costs, m, row = paper_costs(index)
    found = solve(name, costs, m, time_limit=1.0)
    times = {"zb1p": 1, "zb2p": 2}[name]
    check(found.schedule, costs, times * costs.stages)
    rate = simulate(found.schedule, costs).bubble("stage")
    assert rate <= float(row[f"paper_zb_{times}p"]) + 0.00005
    if name == "zb1p":
        assert found.status == "optimal"


@pytest.mark.parametrize(
    ("p", "m", "times", "rate"), [(4, 12, 1.5, 0.0364), (4, 12, 2.0, 0.0191), (8, 24, 1.5, 0.0524)]
)
def test_between_1p_and_2p_the_bound_is_met(p, m, times, rate):
    whole, _, _ = paper_costs(0)
    costs = Costs.uniform(
        p,
        whole.forward[0],
        whole.input_grad[0],
        whole.weight_grad[0],
        whole.comm[0],
        1.0,
        whole.stash[0],
    )
    found = solve("search", costs, m, times * p)
    assert found.status == "optimal"
    assert simulate(found.schedule, costs).bubble("stage") == pytest.approx(rate, abs=5e-5)


def test_auto_takes_the_placement_that_is_best():
    costs, m, _ = paper_costs(3)
    flash = Costs.uniform(
        8, costs.forward[0], costs.input_grad[0], costs.weight_grad[0], costs.comm[0], 1.0, 0.94
    )
    limits = {"time_limit": 0.5, "placements": ("linear", "v")}
    tight = solve("auto", flash, m, 8.0, **limits)
    assert tight.schedule.placement == placement("v", 8)
    linear = solve("search", flash, m, 8.0, time_limit=0.5)
    assert tight.cost < linear.cost
    # Two chunks cost twice the latency: where memory is no matter, one stage a rank is as good.
    slow = Costs.uniform(2, comm=3.0)
    assert solve("auto", slow, 8, None, **limits).schedule.placement == (0, 1)


def test_a_family_by_name_is_the_family_and_is_held_to_the_budget():
    costs = Costs.uniform(4)
    found = solve("ZB-H1", costs, 6)
    assert found.schedule == build("zb_h1", 4, 6)
    assert found.cost == simulate(found.schedule, costs).cost("stage")
    with pytest.raises(MemoryBudgetError, match="zb_h2 does not fit"):
        solve("zb_h2", costs, 6, 4.0)
    with pytest.raises(ScheduleError, match="zb2p"):
        solve("zb3p", costs, 6)


def test_zb1p_takes_each_ranks_own_act_and_the_tighter_budget():
    costs = Costs((1, 1), (1, 1), (1, 1), (0,), (1, 4), (1, 4), (2, 0))
    check(solve("zb1p", costs, 6).schedule, costs, [2 * 1 + 2, 2 * 4])
    check(solve("zb2p", costs, 6, [3.0, 8.0]).schedule, costs, [3.0, 8.0])


def test_chunks_share_the_whole_stage():
    whole = Costs((2, 4), (6, 8), (1, 3), (5,), (10, 20), (4, 8), (1, 2), (7,))
    costs = chunked(whole, placement("v", 2))
    assert costs.forward == (1, 2, 2, 1)
    assert costs.act == (5, 10, 10, 5)
    assert (costs.comm, costs.boundary) == ((5, 0, 5), (7, 0, 7))
    assert costs.transient == (1, 2, 2, 1)
    with pytest.raises(ConfigError, match="2 stages: want 3"):
        chunked(whole, (0, 1, 2))


@settings(max_examples=300)
@given(problems(most_ranks=5, most_microbatches=9), st.sampled_from(RUN), OBJECTIVES)
def test_no_family_is_below_the_bound(case, name, objective):
    costs, placed, m, _ = case
    schedule = build(name, max(placed) + 1, m)
    if schedule.placement != placed:
        # The same entries again and again, for as many stages as the family has.
        def stages(field, count=schedule.stages):
            return tuple(islice(cycle(getattr(costs, field) or (0.0,)), count))

        costs = Costs(
            *map(stages, ("forward", "input_grad", "weight_grad")),
            stages("comm", schedule.stages - 1),
            *map(stages, ("act", "stash")),
        )
    timeline = simulate(schedule, costs)
    peaks = [timeline.peak(rank) for rank in range(schedule.ranks)]
    loaded = [
        peak + max(costs.transient[s] for s in schedule.stages_of(rank))
        for rank, peak in enumerate(peaks)
    ]
    for budget in (None, loaded):
        bound = lower_bound(costs, schedule.placement, m, budget, objective)
        assert bound <= timeline.cost(objective) * EQUAL


@settings(max_examples=200)
@given(problems(), OBJECTIVES, st.floats(1, 3))
def test_more_memory_never_raises_the_bound(case, objective, factor):
    costs, placed, m, _ = case
    least = least_budget(costs, placed)
    bounds = [
        lower_bound(costs, placed, m, budget, objective)
        for budget in (least, [factor * need for need in least], None)
    ]
    assert bounds[0] * EQUAL >= bounds[1] >= bounds[2] / EQUAL


@given(problems(), OBJECTIVES)
def test_longer_actions_never_lower_the_bound(case, objective):
    costs, placed, m, budget = case
    longer = Costs.from_dict(
        costs.to_dict()
        | {name: [2 * x + 1 for x in getattr(costs, name)] for name in ("forward", "weight_grad")}
    )
    bound = lower_bound(costs, placed, m, budget, objective)
    assert bound <= lower_bound(longer, placed, m, budget, objective) * EQUAL


@settings(max_examples=12)
@given(problems(most_ranks=2, most_microbatches=2), OBJECTIVES)
def test_the_best_of_all_orders_is_found_where_there_are_few(case, objective):
    costs, placed, m, budget = case
    if len(placed) > 2:
        placed, m = placed[:1] + placed[:1], 1
        costs = Costs.uniform(2)
        budget = 2.0
    best = best_of_all(costs, placed, m, budget, objective)
    found = find(costs, placed, m, budget, objective, time_limit=0.2)
    assert found.bound <= best * EQUAL
    assert found.cost == pytest.approx(best, abs=1e-9)
