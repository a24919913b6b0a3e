"""The exact search against trying everything; without ortools it says what is missing."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from listing import best_of_all, problems
from zbpipe.costs import Costs
from zbpipe.errors import ConfigError
from zbpipe.schedule import build
from zbpipe.schedule import exact as solver
from zbpipe.schedule.check import check
from zbpipe.schedule.exact import improve, tick
from zbpipe.schedule.ilp import least_cost
from zbpipe.schedule.search import find
from zbpipe.schedule.simulate import simulate

SOLVER = find_spec("ortools") is not None and find_spec("highspy") is not None
OBJECTIVES = st.sampled_from(["stage", "sync"])


def open_case():
    """A schedule that the search's own bound does not settle."""
    costs = Costs.uniform(4, act=2, stash=1)
    found = find(costs, (0, 1, 1, 0), 3, 4.0, time_limit=0.02)
    assert found.status == "feasible"
    return found, costs


def proves_the_optimum():
    found, costs = open_case()
    exact = improve(found, costs, 4.0, 60.0)
    check(exact.schedule, costs, 4.0)
    assert exact.status == "optimal"
    assert exact.cost == exact.bound <= found.cost
    assert exact.cost == simulate(exact.schedule, costs).cost("stage")


@settings(max_examples=15)
@given(problems(most_ranks=2, most_microbatches=2), OBJECTIVES)
def agrees_with_trying_everything(case, objective):
    costs, placed, m, budget = case
    if len(placed) > 2:
        return
    found = find(costs, placed, m, budget, objective, time_limit=0.001)
    exact = improve(found, costs, budget, 30.0, workers=1)
    check(exact.schedule, costs, budget)
    assert exact.status == "optimal"
    assert exact.cost == pytest.approx(best_of_all(costs, placed, m, budget, objective), abs=1e-9)


@settings(max_examples=12)
@given(problems(most_ranks=2, most_microbatches=2), OBJECTIVES)
def agrees_with_the_plain_ilp(case, objective):
    costs, placed, m, budget = case
    if len(placed) * m > 6:
        return  # the plain ILP may take a minute
    found = find(costs, placed, m, budget, objective, time_limit=0.001)
    exact = improve(found, costs, budget, 30.0, workers=1)
    assert exact.status == "optimal"
    least = least_cost(costs, placed, m, budget, objective)
    assert exact.cost == pytest.approx(least, rel=1e-6, abs=1e-5)


def many_microbatches_repeat_an_exact_steady_state():
    costs = Costs.uniform(3, 3.0, 2.0, 2.0, 0.5, 1.0, 0.5)
    poor = replace(
        find(costs, (0, 1, 2), 40, 3.0, starts=[build("1f1b", 3, 40)], time_limit=1e-6),
        status="feasible",
    )
    few = improve(find(costs, (0, 1, 2), 9, 3.0), costs, 3.0, 20.0)
    with pytest.MonkeyPatch.context() as patch:
        # The whole problem's model finds nothing: what comes is from the short one.
        solve = solver._Model.solve
        patch.setattr(
            solver._Model, "solve", lambda m, *a: solve(m, *a) if m._m == 9 else (None, 0.0)
        )
        found = improve(replace(poor, schedule=build("1f1b", 3, 40), cost=1e9), costs, 3.0, 40.0)
    check(found.schedule, costs, 3.0)
    assert found.schedule.microbatches == 40
    assert found.cost == pytest.approx(few.cost + 31 * costs.work(0))


def says_what_is_missing():
    found, costs = open_case()
    with pytest.raises(ConfigError, match=r"needs highspy.*zbpipe\[solver\]"):
        least_cost(costs, (0, 1, 1, 0), 3, 4.0)
    with pytest.raises(ConfigError, match=r"needs ortools.*zbpipe\[solver\]"):
        improve(found, costs, 4.0, 1.0)


def test_the_exact_search():
    """What there is to test depends on the extra, and never on nothing."""
    if SOLVER:
        proves_the_optimum()
        agrees_with_trying_everything()
        agrees_with_the_plain_ilp()
        many_microbatches_repeat_an_exact_steady_state()
    else:
        says_what_is_missing()


def test_the_ilp_refuses_what_is_too_big():
    with pytest.raises(ConfigError, match="96 actions are too many"):
        least_cost(Costs.uniform(4), (0, 1, 2, 3), 8)


def test_seconds_that_cannot_be_right():
    found, costs = open_case()
    with pytest.raises(ConfigError, match="seconds = 0"):
        improve(found, costs, 4.0, 0)


@pytest.mark.parametrize(
    ("values", "unit", "whole"),
    [
        ((3, 6, 0), 1.0, True),
        ((18.522, 18.086), 1e-3, True),
        ((0.018522, 0.000601), 1e-6, True),
        ((1 / 3, 2.0), 2e-6, False),
    ],
)
def test_a_tick_divides_what_it_can(values, unit, whole):
    assert tick(values) == (pytest.approx(unit), whole)
