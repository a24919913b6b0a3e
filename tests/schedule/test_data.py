"""Costs, Timeline, Plan and the errors: plain data that must survive JSON and refuse nonsense."""

import json
import math
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpipe.costs import Costs, layer_bytes
from zbpipe.errors import ConfigError, ScheduleError, StageError, ZbpipeError
from zbpipe.plan import Plan
from zbpipe.schedule import LINEAR, Action, build
from zbpipe.timeline import Span, Timeline

COSTS = Costs((1, 2), [3, 4], (5, 6), (0.5,), (10, 20), (1, 2), (0, 7), (64,), "profiled")
PLANS = st.builds(
    lambda name, p, m, times: Plan.make(build(name, p, m), Costs.uniform(p, *times)),
    st.sampled_from(sorted(LINEAR)),
    st.integers(1, 4),
    st.integers(1, 6),
    st.tuples(*[st.floats(0, 10)] * 4),
)


def through_json(data):
    return json.loads(json.dumps(data))


def test_costs_round_trip_and_durations():
    assert Costs.from_dict(through_json(COSTS.to_dict())) == COSTS
    assert COSTS.stages == 2
    assert [COSTS.duration(Action(1, kind, 0)) for kind in "FIWB"] == [2, 4, 6, 10]
    assert COSTS.work(1) == 12
    assert hash(COSTS) == hash(replace(COSTS))


def test_defaults_of_costs():
    costs = Costs.uniform(3)
    assert (costs.transient, costs.boundary, costs.source) == ((0.0,) * 3, (0.0,) * 2, "unit")
    assert Costs.uniform(1).comm == ()


FIELDS = ("input_grad", "weight_grad", "comm", "act", "stash", "transient", "boundary")


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("name", ["forward", *FIELDS])
def test_a_cost_that_cannot_be_right_is_named_with_its_index(name, value):
    good = getattr(Costs.uniform(4), name)
    with pytest.raises(ConfigError, match=rf"{name}\[2\] = "):
        replace(Costs.uniform(4), **{name: (*good[:2], value, *good[3:])})


@pytest.mark.parametrize("name", FIELDS)
def test_costs_of_a_wrong_length_are_named(name):
    good = getattr(Costs.uniform(4), name)
    for wrong in ((*good, 1.0), good[1:], 1.0):
        with pytest.raises(ConfigError, match=rf"{name} .* want {len(good)}"):
            replace(Costs.uniform(4), **{name: wrong})


def test_other_costs_that_cannot_be_right():
    for nothing in ((), 1.0):
        with pytest.raises(ConfigError, match=r"forward = .* want one number a stage"):
            Costs(nothing, (), (), (), (), ())
    with pytest.raises(ConfigError, match="source = 'guess'"):
        replace(COSTS, source="guess")
    with pytest.raises(ConfigError, match="stages = 0"):
        Costs.uniform(0)
    with pytest.raises(ConfigError, match="no field 'fwd'"):
        Costs.from_dict({**COSTS.to_dict(), "fwd": []})
    with pytest.raises(ConfigError, match="lack the field 'comm'"):
        Costs.from_dict({k: v for k, v in COSTS.to_dict().items() if k != "comm"})


def test_bytes_of_a_layer():
    act, stash = layer_bytes(sequence=1024, batch=6, hidden=2304, heads=24)
    assert act == 1024 * 6 * (34 * 2304 + 5 * 24 * 1024)
    assert stash == 32 * 1024 * 6 * 2304


def measured():
    """Two ranks on a clock that started long ago; rank 1 starts 1 s later and ends first."""
    spans = (
        Span(1, "recv:0", None, 1000.5, 1001.0),
        Span(0, "compute", Action(0, "B", 0), 1005.0, 1007.0),
        Span(0, "compute", Action(0, "F", 0), 1000.0, 1001.0),
        Span(1, "compute", Action(1, "F", 0), 1001.0, 1002.0),
        Span(1, "compute", Action(1, "B", 0), 1002.0, 1005.0),
        Span(1, "tied", Action(1, "R", 0), 1005.0, 1005.5),
    )
    memory = (((1000.0, 8.0), (1007.0, 0.0)), ((1001.0, 5.0), (1005.0, 0.0)))
    return Timeline(spans, 2, memory, "measured")


def test_figures_of_a_timeline():
    timeline = measured()
    assert [str(span.action) for span in timeline.compute(0)] == ["0F0", "0B0"]
    assert [timeline.span(rank) for rank in range(2)] == [7, 4]
    assert [timeline.busy(rank) for rank in range(2)] == [3, 4]
    assert [timeline.peak(rank) for rank in range(2)] == [8, 5]
    assert timeline.makespan() == 7
    assert timeline.bubble() == timeline.bubble("sync") == 1 - 7 / 14
    assert timeline.overhead() == 14 / 7 - 1


def test_the_two_objectives_differ_where_ranks_end_apart():
    spans = [Span(r, "compute", Action(r, "F", 0), float(r), r + 2.0) for r in range(3)]
    timeline = Timeline(tuple(spans), 3)
    assert (timeline.cost("stage"), timeline.cost("sync")) == (2, 4)
    assert (timeline.bubble("stage"), timeline.bubble("sync")) == (0, 0.5)
    with pytest.raises(ConfigError, match="objective = 'step'"):
        timeline.bubble("step")


def test_a_timeline_of_nothing():
    timeline = Timeline((), 2)
    assert timeline.memory == ((), ())
    assert (timeline.makespan(), timeline.bubble(), timeline.overhead()) == (0, 0, 0)
    assert timeline.peak(1) == timeline.span(1) == timeline.busy(1) == 0
    assert timeline.zeroed() == timeline


def test_zeroed_moves_spans_and_memory_alike():
    moved = measured().zeroed()
    assert min(span.start for span in moved.spans) == 0
    assert moved.memory == (((0.0, 8.0), (7.0, 0.0)), ((1.0, 5.0), (5.0, 0.0)))
    assert moved.bubble() == measured().bubble()


def test_merge_puts_the_ranks_together():
    whole = measured()
    parts = [
        Timeline(
            tuple(span for span in whole.spans if span.rank == rank),
            2,
            tuple(curve if rank == at else () for at, curve in enumerate(whole.memory)),
            "measured",
        )
        for rank in range(2)
    ]
    merged = Timeline.merge(reversed(parts))
    assert merged.memory == whole.memory
    assert set(merged.spans) == set(whole.spans)
    assert merged.bubble() == whole.bubble()
    assert Timeline.merge(parts) == merged


def test_merge_refuses_what_does_not_belong_together():
    with pytest.raises(ConfigError, match="at least one"):
        Timeline.merge([])
    with pytest.raises(ConfigError, match="parts 0 and 1 both tell of rank 0"):
        Timeline.merge([measured(), measured()])
    with pytest.raises(ConfigError, match="measured over 2 ranks with simulated over 2"):
        Timeline.merge([measured(), Timeline((), 2)])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (((), 0), "ranks = 0"),
        (((), 2, ((),)), "memory has 1 curves: want 2"),
        (((), 1, (), "guessed"), "kind = 'guessed'"),
        (((Span(2, "compute", None, 0.0, 1.0),), 2), "want a rank from 0 to 1"),
    ],
)
def test_a_timeline_that_cannot_be_right_is_refused(arguments, named):
    with pytest.raises(ConfigError, match=named):
        Timeline(*arguments)


@settings(derandomize=True)
@given(PLANS)
def test_a_plan_survives_json_and_keeps_its_bound(plan):
    assert Plan.from_dict(through_json(plan.to_dict())) == plan
    assert Timeline.from_dict(through_json(measured().to_dict())) == measured()
    assert plan.cost >= plan.bound * (1 - 1e-12)
    assert plan.gap >= -1e-12
    busiest = max(plan.timeline.busy(rank) for rank in range(plan.schedule.ranks))
    assert plan.bound >= busiest * (1 - 1e-12)


def test_a_plan_knows_its_peak_with_the_largest_transient():
    plan = Plan.make(build("1f1b", 2, 4), COSTS)
    assert [plan.timeline.peak(rank) for rank in range(2)] == [20, 20]
    assert [plan.peak(rank) for rank in range(2)] == [20, 27]


def test_the_gap_is_what_is_left_over_the_bound():
    plan = Plan.make(build("1f1b", 4, 8), Costs.uniform(4))
    assert (plan.bound, plan.cost, plan.gap) == (24, 33, 9 / 24)
    assert Plan.make(build("zb2p", 4, 8), Costs.uniform(4)).gap == 0


def test_the_summary_shows_the_picture_and_the_figures():
    lines = Plan.make(build("1f1b", 2, 2), Costs.uniform(2)).summary().splitlines()
    assert lines == [
        "1f1b: 2 stages on 2 ranks, 2 microbatches (unit costs)",
        "rank 0 |F0 F1 .  .  B0=== .  B1===",
        "rank 1 |.  F0 B0=== F1 B1=== .  .",
        "step 9 s; bubble 33.33% (stage), 33.33% (sync)",
        "largest span 9 s, bound 7 s, gap 28.57%",
        "peak 2 bytes on rank 0",
    ]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"rank": 1, "stage": 1, "action": "I", "microbatch": 3}, "rank 1, stage 1, I of mic"),
        ({"rank": 1, "stage": 0, "action": "F"}, "rank 1, stage 0, F: boom"),
        ({"rank": 1, "microbatch": 3}, "rank 1, microbatch 3: boom"),
        ({"rank": 2}, "rank 2: boom"),
    ],
)
def test_a_stage_error_says_where_and_survives_a_pickle(where, message):
    error = StageError("boom", **where)
    assert str(error).startswith(message)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ZbpipeError)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert (again.rank, again.stage) == (where["rank"], where.get("stage"))


def test_callers_can_catch_wrong_arguments_as_value_errors():
    assert issubclass(ScheduleError, ValueError)
    assert issubclass(ConfigError, ValueError)


def test_planning_needs_no_torch():
    modules = "zbpipe.plan, zbpipe.report, zbpipe.schedule.check, zbpipe.schedule.render"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
