"""Actions, schedules and the text they travel in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbpipe.errors import ScheduleError
from zbpipe.schedule import LINEAR, Action, Schedule, build, linear_placement

TEXT = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@settings(derandomize=True)
@given(st.integers(0, 999), st.sampled_from("FIWB"), st.integers(0, 9999))
def test_an_action_reads_what_it_writes(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert str(action) == f"{stage}{kind}{microbatch}"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2R0", "2f0", "-1F0", "2F0F", "2 F0", "٢F0"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="no action"):
        Action.parse(text)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 5), (4, 3)])
def test_csv_round_trip(name, ranks, microbatches):
    schedule = build(name, ranks, microbatches)
    again = Schedule.from_csv(schedule.to_csv(), name=name)
    assert again == schedule
    assert again.digest() == schedule.digest()


def test_csv_is_one_line_a_rank_and_no_header():
    assert build("1f1b", 2, 2).to_csv() == TEXT


def test_empty_cells_and_torchs_overlap_are_read():
    torch_text = "0F0, ,(0F1;0B0)OVERLAP_F_B,,0B1,\r\n,1F0,1B0,1F1,1B1\r\n\r\n"
    assert Schedule.from_csv(torch_text).to_csv() == TEXT


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("0F0,0B0\n1F0,oops", "line 2, cell 2"),
        ("0F0,,0Z0", "line 1, cell 3"),
        ("0F0,(0F1;0X0)OVERLAP_F_B", "line 1, cell 2"),
        ("0F0,(0F1;0B0)", "line 1, cell 2"),
        ("0F0,(0F1;0B0)OVERLAP_F_B;0F2", "line 1, cell 2"),
    ],
)
def test_a_malformed_cell_is_named(text, where):
    with pytest.raises(ScheduleError, match=where):
        Schedule.from_csv(text)


def test_placement_is_inferred_from_the_rows():
    v = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert v.placement == (0, 1, 1, 0)
    assert [v.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert (v.ranks, v.stages, v.microbatches) == (2, 4, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,0F1", r"line 2, action 2 \(0F1\): stage 0 is already on line 1"),
        ("0F0,0B0\n2F0,2B0", "stage 1"),
        ("", "no action"),
        ("\n,,\n", "no action"),
    ],
)
def test_rows_that_make_no_placement_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_the_digest_is_of_rows_and_placement_only():
    schedule = build("zb_h1", 2, 3)
    digests = {
        schedule.digest(),
        build("zb_h2", 2, 3).digest(),
        Schedule(schedule.rows, 3, (1, 0)).digest(),
    }
    assert len(digests) == 3
    assert Schedule(schedule.rows, 3, schedule.placement, "other").digest() == schedule.digest()
    # Ranks compare digests across processes and runs, so the value itself is an interface.
    assert Schedule.from_csv(TEXT).digest() == "59a91c6e74a9169ef74bfcca7db8a26c"


@pytest.mark.parametrize(
    ("microbatches", "placement", "message"),
    [(0, (0,), "microbatches = 0"), (1, (1,), r"placement\[0\] = 1"), (1, (), "one stage")],
)
def test_a_schedule_of_nothing_is_refused(microbatches, placement, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule(((),), microbatches, placement)


def test_linear_placement():
    assert linear_placement(3) == (0, 1, 2)
