"""`check` against an independent test of validity, on schedules with one mutation."""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from listing import problems
from zbpipe.costs import Costs
from zbpipe.errors import ConfigError, MemoryBudgetError, ScheduleError
from zbpipe.schedule import LINEAR, Action, Schedule, build
from zbpipe.schedule.check import check
from zbpipe.schedule.search import search
from zbpipe.schedule.simulate import microbatches_held, planned_peak


def valid(schedule):
    """By definition: each stage's actions are there once, on its rank, and one order of all
    actions satisfies every need, found by trying every rank's next one until nothing moves."""
    m, last = schedule.microbatches, schedule.stages - 1
    for stage, rank in enumerate(schedule.placement):
        for i in range(m):
            mine = sorted(
                (at, action.kind)
                for at, row in enumerate(schedule.rows)
                for action in row
                if (action.stage, action.microbatch) == (stage, i)
            )
            if mine not in ([(rank, "B"), (rank, "F")], [(rank, k) for k in "FIW"]):
                return False
    if sum(map(len, schedule.rows)) != len({a for row in schedule.rows for a in row}):
        return False
    done, queues = set(), [list(row) for row in schedule.rows]
    moved = True
    while moved:
        moved = False
        for queue in queues:
            if queue and needs_met(queue[0], done, last):
                done.add(queue.pop(0))
                moved = True
    return not any(queues)


def needs_met(action, done, last):
    stage, kind, i = action
    if kind == "F":
        return stage == 0 or Action(stage - 1, "F", i) in done
    if kind == "W":
        return Action(stage, "I", i) in done
    above = stage == last or {Action(stage + 1, "I", i), Action(stage + 1, "B", i)} & done
    return Action(stage, "F", i) in done and bool(above)


def accepted(schedule):
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


@st.composite
def mutated(draw):
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(LINEAR)))
        schedule = build(name, draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    else:
        costs, placed, m, budget = draw(problems(most_microbatches=5))
        schedule = search(costs, placed, m, budget, time_limit=0.001)
    rows = [list(row) for row in schedule.rows]
    row = rows[draw(st.integers(0, len(rows) - 1))]
    at = draw(st.integers(0, len(row) - 1))
    how = draw(st.sampled_from(["drop", "duplicate", "swap", "move", "rekind", "renumber"]))
    if how == "drop":
        row.pop(at)
    elif how == "duplicate":
        row.insert(draw(st.integers(0, len(row))), row[at])
    elif how == "swap":
        other = draw(st.integers(0, len(row) - 1))
        row[at], row[other] = row[other], row[at]
    elif how == "move":
        target = rows[draw(st.integers(0, len(rows) - 1))]
        action = row.pop(at)
        target.insert(draw(st.integers(0, len(target))), action)
    elif how == "rekind":
        row[at] = row[at]._replace(kind=draw(st.sampled_from("FIWBX")))
    else:
        row[at] = row[at]._replace(microbatch=draw(st.integers(-1, schedule.microbatches)))
    return how, replace(schedule, rows=tuple(map(tuple, rows)))


@settings(derandomize=True, max_examples=1500)
@given(mutated())
def test_a_mutated_schedule_is_refused_or_truly_valid(case):
    how, schedule = case
    event(f"{how}: {'valid' if valid(schedule) else 'not valid'}")
    assert accepted(schedule) == valid(schedule)


@settings(derandomize=True, max_examples=300)
@given(st.data())
def test_cells_in_any_order_are_refused_or_truly_valid(data):
    schedule = build(data.draw(st.sampled_from(["1f1b", "zb_h1"])), 2, 2)
    rows = tuple(tuple(data.draw(st.permutations(row))) for row in schedule.rows)
    shuffled = replace(schedule, rows=rows)
    assert accepted(shuffled) == valid(shuffled)


@pytest.mark.parametrize("name", LINEAR)
def test_the_independent_test_accepts_the_families(name):
    assert valid(build(name, 4, 6))


def error(text, **arguments):
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.from_csv(text, **arguments))
    return str(caught.value)


def test_the_bad_cell_is_marked_in_the_grid():
    assert (
        error("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0")
        == """\
rank 1, 1B1: comes before 1F1
rank 0 | 0F0  0F1  0B0  0B1
rank 1 | 1F0 >1B1< 1F1  1B0"""
    )


def test_a_missing_cell_is_marked_at_the_end_of_its_row():
    assert (
        error("0F0,0I0,0F1,0I1,0W1\n1F0,1B0,1F1,1B1")
        == """\
rank 0 lacks W of stage 0, microbatch 0
rank 0 | 0F0  0I0  0F1  0I1  0W1 >?<
rank 1 | 1F0  1B0  1F1  1B1"""
    )


def test_a_deadlock_names_and_marks_every_stuck_action():
    assert (
        error("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
        == """\
deadlock: rank 0 waits at 0B0 for the gradient of 1F0; rank 1 waits at 1F1 for 0F1
rank 0 | 0F0 >0B0< 0F1  0B1
rank 1 |>1F1< 1B1  1F0  1B0"""
    )


def test_the_grid_is_a_window_on_a_big_schedule():
    schedule = build("zb_h1", 32, 64)
    rows = [list(row) for row in schedule.rows]
    rows[16][100] = rows[16][90]
    with pytest.raises(ScheduleError, match="comes twice") as caught:
        check(replace(schedule, rows=tuple(map(tuple, rows))))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 9
    assert all(len(line) < 100 for line in lines)
    assert f">{rows[16][90]}<" in lines[5]
    assert lines[5].startswith("rank 16 |…")


@pytest.mark.parametrize(
    ("text", "placement", "message"),
    [
        ("0F0,0B0,0B0", None, "comes twice"),
        ("0F0,0I0,0B0", None, "0I0 has already made this gradient"),
        ("0F0,0B0,0I0", None, "0B0 has already made this gradient"),
        ("0F0,0W0,0I0", None, "comes before 0I0"),
        ("0F0,0B0\n1F0,1B0", (1, 0), "stage 0 lives on rank 1"),
        ("0F0,0B0\n1F0,1B0", (0,), "no such stage"),
        ("0F0", None, "lacks B, or I and W,"),
        ("0F1,0B1", None, "lacks F of stage 0, microbatch 0"),
    ],
)
def test_each_fault_has_its_words(text, placement, message):
    assert message in error(text, placement=placement)


@settings(derandomize=True)
@given(
    st.sampled_from(sorted(LINEAR)),
    st.integers(1, 6),
    st.integers(1, 12),
    st.floats(0.1, 1e12),
    st.floats(0, 1),
)
def test_a_budget_of_the_peak_fits_and_one_just_below_does_not(name, ranks, m, act, share):
    schedule = build(name, ranks, m)
    costs = Costs.uniform(ranks, act=act, stash=share * act)
    peaks = [planned_peak(schedule, costs, rank) for rank in range(ranks)]
    check(schedule, costs, peaks)
    check(schedule, costs, max(peaks))
    with pytest.raises(MemoryBudgetError, match=f"rank {peaks.index(max(peaks))} "):
        check(schedule, costs, 0.999 * max(peaks))


def test_one_p_is_enough_for_zb_h1_in_bytes():
    for stash in (0.4, 0.94, 1.0):
        costs = Costs.uniform(8, act=0.1, stash=0.1 * stash)
        check(build("zb_h1", 8, 24), costs, budget=8 * 0.1)
        with pytest.raises(MemoryBudgetError):
            check(build("zb_h2", 8, 24), costs, budget=8 * 0.1)


def test_what_lacks_and_what_would_fit_is_said():
    with pytest.raises(MemoryBudgetError) as caught:
        check(build("1f1b", 3, 8), Costs.uniform(3, act=100.0), [250, 1000, 1000])
    message = str(caught.value)
    assert "rank 0 (stage 0) lacks 50 bytes, it needs 300 of 250" in message
    assert "a budget of 300 bytes for all, or per rank [300, 200, 100]" in message


def test_the_largest_transient_counts():
    costs = replace(Costs.uniform(2, act=10.0), transient=(0.0, 25.0))
    schedule = build("1f1b", 2, 4)
    check(schedule, costs, [20, 35])
    with pytest.raises(MemoryBudgetError, match=r"rank 1 \(stage 1\) lacks 1 bytes"):
        check(schedule, costs, [20, 34])


@pytest.mark.parametrize("budget", [[1.0], float("nan"), -1.0])
def test_a_budget_that_cannot_be_right_is_refused(budget):
    with pytest.raises(ConfigError, match="budget"):
        check(build("1f1b", 2, 2), Costs.uniform(2), budget)


def test_costs_are_needed_for_a_budget_and_must_be_of_the_same_stages():
    with pytest.raises(ConfigError, match="needs costs"):
        check(build("1f1b", 2, 2), budget=3)
    with pytest.raises(ConfigError, match="costs are for 3 stages: want 2"):
        check(build("1f1b", 2, 2), Costs.uniform(3))


def test_the_peak_of_microbatches_follows_the_order_not_the_family():
    v = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    check(v)
    assert microbatches_held(v) == (1.0, 1.0)
