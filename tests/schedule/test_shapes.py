"""Shapes of several chunks a rank: interleaved, V and bidirectional."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpipe import ConfigError, ScheduleError
from zbpipe.costs import Costs
from zbpipe.program import compile
from zbpipe.schedule import FAMILIES, build
from zbpipe.schedule.check import check
from zbpipe.schedule.looped import interleaved, interleaved_zb
from zbpipe.schedule.render import text
from zbpipe.schedule.simulate import microbatches_held, simulate
from zbpipe.schedule.vshape import v_placement

TABLES = {
    ("interleaved", 2, 3): """
rank 0 |0F0 0F1 0F2 2F0 2F1 2F2 .   2B0==== .   2B1==== .   2B2==== 0B0==== 0B1==== 0B2====
rank 1 |.   1F0 1F1 1F2 3F0 3B0==== 3F1 3B1==== 3F2 3B2==== 1B0==== 1B1==== 1B2==== .   .
""",
    ("interleaved_zb", 2, 3): """
rank 0 |0F0 0F1 0F2 2F0 2F1 2F2 2I0 2W0 2I1 2W1 .   2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
rank 1 |.   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2
""",
    ("zb_v", 2, 3): """
rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
rank 1 |.   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
""",
    ("dualpipe_v", 2, 3): """
rank 0 |0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1==== 3F2 .   0B0==== 3I2 .   0I1 3W2 0I2 0W1 0W2
rank 1 |.   1F0 2F0 1F1 2F1 1F2 2B0==== 2F2 1B0==== 2B1==== 1B1==== 2I2 1I2 2W2 1W2 .
""",
    ("v_min", 3, 2): """
rank 0 |0F0 0F1 .   .   .   5F0 5I0 5W0 .   .   .   5F1 5I1 0I0 0W0 5W1 .   .   0I1 0W1
rank 1 |.   1F0 .   .   4F0 1F1 .   4I0 4W0 .   4F1 .   1I0 4I1 1W0 4W1 .   1I1 1W1 .
rank 2 |.   .   2F0 3F0 .   .   2F1 .   3I0 3F1 3W0 2I0 2W0 .   3I1 3W1 2I1 2W1 .   .
""",
    ("v_half", 3, 2): """
rank 0 |0F0 0F1 .   .   .   5F0 5I0 5W0 .   .   5F1 5I1 0I0 0W0 5W1 .   0I1 0W1
rank 1 |.   1F0 .   .   4F0 1F1 .   4I0 4W0 4F1 1I0 1W0 4I1 4W1 .   1I1 1W1 .
rank 2 |.   .   2F0 3F0 .   .   2F1 3F1 3I0 2I0 2W0 3W0 .   3I1 2I1 2W1 3W1 .
""",
    ("dualpipe", 4, 6): """
rank 0 |0F0 0F1 0F2 7F3 7I3 7W3 7F4 7B4==== 7F5 .   0B0==== 7I5 .   0I1 7W5 0I2 0W1 0W2
rank 1 |.   1F0 6F3 1F1 6F4 1F2 6B3==== 6F5 1B0==== 6B4==== 1B1==== 6I5 1I2 6W5 1W2 .
rank 2 |.   5F3 2F0 5F4 2F1 5F5 2B0==== 2F2 5B3==== 2B1==== 5B4==== 2I2 5I5 2W2 5W5 .
rank 3 |4F3 4F4 4F5 3F0 3I0 3W0 3F1 3B1==== 3F2 .   4B3==== 3I2 .   4I4 3W2 4I5 4W4 4W5
""",
}


def unit(schedule):
    """Unit costs of a full stage: a chunk takes 1/v of them."""
    chunks = schedule.stages // schedule.ranks // schedule.copies
    return simulate(schedule, Costs.uniform(schedule.stages, *[1 / chunks] * 3))


@pytest.mark.parametrize("key", TABLES, ids=lambda key: key[0])
def test_a_shape_is_its_table(key):
    assert text(build(*key), width=200) == TABLES[key].strip()


V = ("zb_v", "v_half", "v_min", "dualpipe_v")


@given(
    st.sampled_from([*V, "interleaved", "interleaved_zb"]), st.integers(1, 9), st.integers(1, 30)
)
def test_every_size_is_valid_and_ascending(name, ranks, microbatches):
    schedule = build(name, ranks, microbatches)
    check(schedule)
    compile(schedule)  # co-simulates with bounded slots
    for row in schedule.rows:
        for stage in {action.stage for action in row}:
            for kinds in ("F", "IB", "WB"):
                order = [a.microbatch for a in row if a.stage == stage and a.kind in kinds]
                assert order == sorted(order)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_interleaved_takes_any_number_of_chunks_and_microbatches(ranks, microbatches, chunks):
    for family in (interleaved, interleaved_zb):
        schedule = family(ranks, microbatches, chunks)
        check(schedule)
        assert schedule.placement == tuple(s % ranks for s in range(ranks * chunks))


@given(st.integers(1, 4), st.integers(1, 30))
def test_dualpipe_is_valid_for_even_ranks(half, microbatches):
    schedule = build("dualpipe", 2 * half, microbatches)
    check(schedule)
    assert schedule.copies == 2
    assert len(schedule.microbatches_of(0)) == (microbatches + 1) // 2


def test_dualpipe_is_planned_but_never_run():
    with pytest.raises(ScheduleError, match="even number"):
        build("dualpipe", 3, 4)
    schedule = build("dualpipe", 4, 8)
    with pytest.raises(ScheduleError, match=r"2 copies.*dualpipe_v"):
        compile(schedule)
    with pytest.raises(ScheduleError, match="no CSV"):
        schedule.to_csv()
    wrong = schedule.rows[0][0]._replace(microbatch=7)
    rows = ((wrong, *schedule.rows[0][1:]), *schedule.rows[1:])
    with pytest.raises(ScheduleError, match="belongs to another copy"):
        check(type(schedule)(rows, 8, schedule.placement, "dualpipe", 2))


@pytest.mark.parametrize(("ranks", "m", "v", "overhead"), [(4, 8, 3, 0.125), (8, 32, 4, 7 / 128)])
def test_interleaving_divides_the_overhead(ranks, m, v, overhead):
    """Lecture figures: 12.5% (rate 11.1%) and 5.5% (rate 5.2%); (p - 1) / (m v)."""
    timeline = unit(interleaved(ranks, m, v))
    assert timeline.bubble("sync") == pytest.approx(overhead / (1 + overhead))
    assert timeline.makespan() / (3 * m) - 1 == pytest.approx(overhead)


def test_interleaved_memory_is_megatrons():
    """p4 v3: held on ranks 0 to 3 are 5, 4.33, 3.67 and 3 microbatches; factor 1.25 on rank 0."""
    held = microbatches_held(interleaved(4, 16, 3))
    assert [round(h, 2) for h in held] == [5, 4.33, 3.67, 3]
    assert held[0] / 4 == 1 + 3 / (4 * 3)


@pytest.mark.parametrize("m", [9, 10, 11])
def test_a_rest_of_microbatches_costs_no_extra_bubble(m):
    bubble = unit(interleaved(4, m, 2)).bubble("sync")
    assert bubble == pytest.approx((3 / 2) / (m + 3 / 2))


@given(st.integers(2, 9), st.integers(0, 20))
def test_zb_v_has_no_bubble_on_unit_costs(ranks, more):
    schedule = build("zb_v", ranks, 2 * ranks + more)
    timeline = unit(schedule)
    assert timeline.bubble("stage") == pytest.approx(0, abs=1e-9)
    assert timeline.makespan() == pytest.approx(3 * schedule.microbatches + (ranks - 1) / 2)
    assert max(microbatches_held(schedule, "W")) == ranks


@given(st.integers(2, 12), st.integers(0, 20))
def test_v_shapes_hold_what_they_promise(ranks, more):
    m = 2 * ranks + more
    assert max(microbatches_held(build("v_min", ranks, m), "W")) <= (ranks + 4) / 3
    assert max(microbatches_held(build("v_half", ranks, m), "W")) <= ranks / 2 + 1
    assert max(microbatches_held(build("dualpipe_v", ranks, m), "W")) <= ranks + 1
    # Half of 1F1B's memory costs no more than 1F1B's bubble.
    assert unit(build("v_half", ranks, m)).bubble() <= unit(build("1f1b", ranks, m)).bubble() + 1e-9


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_dualpipe_holds_p_plus_one_microbatches(ranks):
    schedule = build("dualpipe", ranks, 4 * ranks)
    assert max(microbatches_held(schedule)) == ranks + 1
    assert len(schedule.stages_of(0)) == 2


def test_placements():
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert build("dualpipe", 4, 8).placement == (0, 1, 2, 3, 3, 2, 1, 0)
    # Layer maps (1-based) of 16 layers, p4 v2 and DualPipe: ranks 0 and its stages.
    assert build("interleaved", 4, 8).stages_of(0) == (0, 4)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "dualpipe"])
def test_sizes_that_cannot_be(name):
    with pytest.raises((ScheduleError, ConfigError), match="ranks = 0"):
        build(name, 0, 4)
    with pytest.raises((ScheduleError, ConfigError), match="microbatches = 0"):
        build(name, 2, 0)
