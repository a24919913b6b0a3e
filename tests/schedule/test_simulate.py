"""The simulator against a second one that works backwards from each action."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpipe.costs import Costs
from zbpipe.errors import ConfigError, ScheduleError
from zbpipe.schedule import LINEAR, Action, Schedule, build
from zbpipe.schedule.simulate import microbatches_held, planned_peak, simulate

V_SHAPE = Schedule.from_csv(
    "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n"
    "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n"
)


@st.composite
def cases(draw):
    """A schedule and whole-number costs, so that every time is exact."""
    name = draw(st.sampled_from([*sorted(LINEAR), "v"]))
    if name == "v":
        schedule = V_SHAPE
    else:
        schedule = build(name, draw(st.integers(1, 5)), draw(st.integers(1, 8)))
    stages = schedule.stages
    whole = st.integers(0, 9).map(float)
    each = st.lists(whole, min_size=stages, max_size=stages)
    comm = draw(st.lists(whole, min_size=stages - 1, max_size=stages - 1))
    f, i, w, act, stash = (draw(each) for _ in range(5))
    return schedule, Costs(f, i, w, comm, act, stash)


def ends(schedule, costs):
    """End of every action, by recursion from the definition; independent of `simulate`."""
    before = {b: a for row in schedule.rows for a, b in pairwise(row)}
    present = {action for row in schedule.rows for action in row}

    def hop(low):
        same = schedule.placement[low] == schedule.placement[low + 1]
        return 0.0 if same else costs.comm[low]

    def backward(stage, i):
        return Action(stage, "I" if Action(stage, "I", i) in present else "B", i)

    def start(action):
        stage, kind, i = action
        inputs = [0.0]
        if action in before:
            inputs.append(end(before[action]))
        if kind == "F" and stage:
            inputs.append(end(Action(stage - 1, "F", i)) + hop(stage - 1))
        if kind in "IB" and stage < schedule.stages - 1:
            inputs.append(end(backward(stage + 1, i)) + hop(stage))
        return max(inputs)

    @cache
    def end(action):
        return start(action) + costs.duration(action)

    return {action: end(action) for action in present}


@settings(derandomize=True, max_examples=300)
@given(cases())
def test_every_action_ends_as_early_as_order_and_inputs_allow(case):
    schedule, costs = case
    timeline = simulate(schedule, costs)
    assert {span.action: span.end for span in timeline.spans} == ends(schedule, costs)
    assert len(timeline.spans) == sum(map(len, schedule.rows))
    for span in timeline.spans:
        assert span.end - span.start == costs.duration(span.action)
        assert schedule.placement[span.action.stage] == span.rank


@settings(derandomize=True, max_examples=300)
@given(cases())
def test_memory_is_that_of_the_actions_in_flight(case):
    """At every point of the curve: + act from F's start, - act + stash and - stash at the ends."""
    schedule, costs = case
    timeline = simulate(schedule, costs)
    for rank in range(schedule.ranks):
        held, curve = 0.0, []
        for action in schedule.rows[rank]:
            act, stash = costs.act[action.stage], costs.stash[action.stage]
            held += {"F": act, "I": stash - act, "W": -stash, "B": -act}[action.kind]
            curve.append(held)
        points = timeline.memory[rank]
        assert [value for _, value in points] == curve
        assert held == 0
        assert [time for time, _ in points] == [
            span.start if span.action.kind == "F" else span.end for span in timeline.compute(rank)
        ]
        assert timeline.peak(rank) == max(curve)
        assert planned_peak(schedule, costs, rank) == timeline.peak(rank)


def test_ends_of_the_curve_are_exactly_zero_for_odd_bytes():
    timeline = simulate(build("zb_h1", 8, 50), Costs.uniform(8, act=0.1, stash=0.07))
    assert [curve[-1][1] for curve in timeline.memory] == [0.0] * 8
    assert timeline.peak(0) == 8 * 0.1


def test_a_hop_inside_a_rank_is_free():
    assert V_SHAPE.placement == (0, 1, 1, 0)
    slow = simulate(V_SHAPE, replace(Costs.uniform(4), comm=(0.0, 1e6, 0.0)))
    assert slow.spans == simulate(V_SHAPE, Costs.uniform(4)).spans


@settings(derandomize=True)
@given(st.integers(1, 8), st.integers(0, 12))
def test_zb_h2_has_no_bubble_when_f_i_and_w_are_equal(ranks, more):
    timeline = simulate(build("zb_h2", ranks, 2 * ranks - 1 + more), Costs.uniform(ranks))
    assert timeline.bubble("stage") == 0
    assert timeline.makespan() == timeline.span(0) + ranks - 1


def test_a_big_schedule_is_simulated_in_full():
    timeline = simulate(build("zb_h2", 64, 512), Costs.uniform(64))
    assert len(timeline.spans) == 3 * 64 * 512
    assert timeline.makespan() == 3 * 512 + 63
    assert timeline.peak(0) == 2 * 64 - 1


def test_what_cannot_run_names_the_action_of_each_stuck_rank():
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1")
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, Costs.uniform(3))
    message = str(caught.value)
    assert "rank 0 waits at 0B0 for the gradient of 1F0" in message
    assert "rank 1 waits at 1F1 for 0F1" in message
    assert "rank 2 waits at 2F0 for 1F0" in message


@pytest.mark.parametrize(
    ("text", "waits"),
    [("0W0,0F0,0I0", "0W0 for 0I0"), ("0B0,0F0", "0B0 for 0F0")],
)
def test_an_order_within_a_rank_that_cannot_run_is_named(text, waits):
    with pytest.raises(ScheduleError, match=f"rank 0 waits at {waits}"):
        simulate(Schedule.from_csv(text), Costs.uniform(1))


@pytest.mark.parametrize("action", [Action(1, "F", 0), Action(0, "F", 1), Action(0, "X", 0)])
def test_an_action_of_nothing_is_refused(action):
    with pytest.raises(ScheduleError, match=f"rank 0 has an action {action}"):
        simulate(Schedule(((action,),), 1, (0,)), Costs.uniform(1))


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ConfigError, match="costs are for 3 stages: want 2"):
        simulate(build("1f1b", 2, 2), Costs.uniform(3))


def test_microbatches_held_until_w_and_per_chunk():
    assert microbatches_held(V_SHAPE) == (1.5, 2.0)
    assert microbatches_held(V_SHAPE, "W") == (2.0, 2.0)
    with pytest.raises(ConfigError, match="released = 'F'"):
        microbatches_held(V_SHAPE, "F")
