"""The native lister and replay against plain Python, and the local search against its promises."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from listing import Lister, problems
from zbpipe.schedule.limits import memory_limits
from zbpipe.schedule.native import Problem
from zbpipe.schedule.rules import draw, vary
from zbpipe.schedule.simulate import simulate


def policy_of(problem, seed):
    """A rule's policy, now and then with caps on the work in flight."""
    random_ = random.Random(seed)
    rule = draw(random_, 1 + (len(problem.placement) > problem.ranks))
    for _ in range(random_.randrange(4)):
        rule = vary(random_, rule, len(problem.placement))
    policy = rule.policy(problem)
    if random_.random() < 0.3:
        policy["flight"] = [random_.randint(1, 3) for _ in policy["flight"]]
    return policy


@settings(max_examples=300)
@given(problems(), st.integers(0, 10**6))
def test_native_listing_is_the_plain_one(case, seed):
    costs, placed, m, budget = case
    problem = Problem(costs, placed, m, budget)
    policy = policy_of(problem, seed)
    order = problem.list(**policy)
    plain = Lister(costs, placed, m, memory_limits(costs, placed, budget), policy).run()
    if plain is None:
        assert order is None
    else:
        assert [list(map(tuple, row)) for row in problem.schedule(order, "").rows] == plain


@settings(max_examples=150)
@given(problems(), st.integers(0, 10**6))
def test_without_waiting_the_lister_never_gets_stuck(case, seed):
    costs, placed, m, budget = case
    problem = Problem(costs, placed, m, budget)
    policy = policy_of(problem, seed) | {"patience": 0.0, "flight": [m] * len(placed)}
    assert problem.list(**policy) is not None


@settings(max_examples=150)
@given(problems(), st.integers(0, 10**6))
def test_native_replay_is_the_simulator(case, seed):
    costs, placed, m, budget = case
    problem = Problem(costs, placed, m, budget)
    order = problem.list(**policy_of(problem, seed))
    assume(order is not None)
    timeline = simulate(problem.schedule(order, ""), costs)
    replayed = problem.replay(order)
    ranks = range(problem.ranks)
    assert replayed.stage == pytest.approx(timeline.cost("stage"), abs=1e-9)
    assert replayed.sync == pytest.approx(timeline.cost("sync"), abs=1e-9)
    assert replayed.mean == pytest.approx(sum(map(timeline.span, ranks)) / problem.ranks, abs=1e-9)


@settings(max_examples=60)
@given(problems(), st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 0.5, 4.0]))
def test_annealing_never_loses_and_keeps_memory(case, seed, sync, heat):
    costs, placed, m, budget = case
    problem = Problem(costs, placed, m, budget)
    order = problem.list(**policy_of(problem, seed))
    assume(order is not None)
    how = {"sync": sync, "moves": 500, "seed": seed, "heat": heat, "share": 0.05, "seconds": 1e9}
    better = problem.anneal(order, **how)
    before, after = (problem.replay(one) for one in (order, better))
    assert problem.fits(better)
    assert (after.sync <= before.sync) if sync else (after.stage <= before.stage)
    assert problem.anneal(order, **how).rows == better.rows


@given(problems(), st.integers(0, 10**6))
def test_an_order_goes_to_a_schedule_and_back(case, seed):
    costs, placed, m, budget = case
    problem = Problem(costs, placed, m, budget)
    order = problem.list(**policy_of(problem, seed))
    assume(order is not None)
    assert problem.order(problem.schedule(order, "")).rows == order.rows
