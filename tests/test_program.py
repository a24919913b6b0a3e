"""Programs: lanes, waits and slots of every family; no slot is overwritten under a reader."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaying import Replay, make, only_forward
from zbpipe.errors import ScheduleError
from zbpipe.program import PREFETCH, Op, Programs, compile, cosimulate, virtual
from zbpipe.schedule import FAMILIES
from zbpipe.schedule.check import check
from zbpipe.schedule.core import Action, Schedule
from zbpipe.schedule.simulate import microbatches_held

RUN = tuple(name for name in FAMILIES if name != "dualpipe")  # which cannot be compiled
NAMES = (*RUN, "forward_only", "v", "v_forward_only")
SIZES = [(p, m) for p in (1, 2, 4, 8) for m in (1, max(1, p - 1), p, 2 * p + 1)]


def compiled(name: str, ranks: int, microbatches: int, **options: int) -> tuple[Schedule, Programs]:
    schedule = make(name, ranks, microbatches)
    return schedule, compile(schedule, forward_only=only_forward(name), **options)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_lanes_hold_the_schedule_and_its_messages(name, ranks, microbatches):
    schedule, programs = compiled(name, ranks, microbatches)
    if not only_forward(name):
        check(schedule)
    for program in programs.ranks:
        lanes = [
            [entry for entry in program.instructions if entry.lane == lane]
            for lane in range(len(program.lanes))
        ]
        assert tuple(e.action for e in lanes[0]) == schedule.rows[program.rank]
        assert {e.op for e in lanes[0]} == {Op.CALLBACK}
        out, into = program.destinations, program.sources
        names = ["compute", *(f"send:{q}" for q in out), *(f"recv:{q}" for q in into)]
        assert list(program.lanes) == names
        for lane, entries in zip(names[1:], lanes[1:], strict=True):
            way, peer = lane.split(":")
            assert {e.op for e in entries} == {Op.SEND if way == "send" else Op.RECEIVE}
            pair = (program.rank, int(peer)) if way == "send" else (int(peer), program.rank)
            assert [e.action for e in entries] == messages(schedule, *pair)
            assert {e.slot for e in entries} == set(range(programs.slots[pair]))


def messages(schedule: Schedule, source: int, target: int) -> list[Action]:
    """What `source` sends to `target`, in the order it makes it."""
    sent = []
    for action in schedule.rows[source]:
        stage = action.stage + {"F": 1, "I": -1, "B": -1, "W": 10**6}[action.kind]
        if 0 <= stage < schedule.stages and schedule.placement[stage] == target != source:
            sent.append(action)
    return sent


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_waits_are_the_dependencies_between_lanes(name, ranks, microbatches):
    _, programs = compiled(name, ranks, microbatches)
    for program in programs.ranks:
        entries = program.instructions
        waited = {w for entry in entries for w in entry.waits}
        assert {i for i, entry in enumerate(entries) if entry.signals} == waited
        for i, entry in enumerate(entries):
            assert all(entries[w].lane != entry.lane for w in entry.waits)
            if entry.op == Op.SEND:
                (maker,) = entry.waits
                assert entries[maker].op == Op.CALLBACK
                assert entries[maker].action == entry.action
                assert program.sends[maker] == i
            elif entry.op == Op.CALLBACK:
                need = program.needs.get(i)
                assert entry.waits == (() if need is None else (need,))
                if need is not None:
                    made_by = entries[need].action
                    step = -1 if entry.action.kind == "F" else 1
                    assert made_by.stage == entry.action.stage + step
                    assert made_by.microbatch == entry.action.microbatch


@settings(max_examples=120)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 8),
    st.integers(1, 18),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_no_slot_changes_under_a_reader(name, ranks, microbatches, prefetch, random):
    schedule, programs = compiled(name, ranks, microbatches, prefetch=prefetch)
    Replay(schedule, programs, random).run()


@settings(max_examples=120)
@given(
    st.sampled_from((*RUN, "v")),
    st.integers(1, 6),
    st.integers(1, 13),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_tied_gradients_are_handed_over_after_the_last_weight_gradient(
    name, ranks, microbatches, prefetch, random
):
    schedule, programs = compiled(name, ranks, microbatches, prefetch=prefetch, tied=True)
    Replay(schedule, programs, random).run()
    first, last = schedule.placement[0], schedule.placement[-1]
    assert cosimulate(programs) is None
    for program in programs.ranks:
        entries = program.instructions
        assert tuple(e.action for e in entries if e.lane == 0) == schedule.rows[program.rank]
        extra = [e for e in entries if e.op == Op.CALLBACK and e.lane != 0]
        assert ("tied" in program.lanes) == bool(extra) == (program.rank in (first, last))
        assert {program.lanes[e.lane] for e in extra} <= {"tied"}
        ends = {0: first, schedule.stages - 1: last}
        own = [stage for stage, rank in ends.items() if rank == program.rank]
        if not own:
            continue
        if first == last:
            assert [str(e.action) for e in extra] == ["0S0"]
            (sums,) = extra
            waited = {entries[w].action for w in sums.waits}
        else:
            assert [str(e.action) for e in extra] == [f"{s}{kind}0" for s in own for kind in "RS"]
            waited = {entries[w].action for e in extra[::2] for w in e.waits}
            for e in extra[1::2]:
                (need,) = e.waits
                assert entries[need].op == Op.RECEIVE and entries[need].action.kind == "R"
        for stage in own:
            done = [a for a in schedule.rows[program.rank] if a.stage == stage and a.kind in "WB"]
            assert done[-1] in waited


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_the_replay_notices_a_sum_that_does_not_wait(name):
    schedule, programs = compiled(name, 3, 5, tied=True)
    with pytest.raises(AssertionError):
        for seed in range(20):
            Replay(schedule, without_wait(programs, Op.CALLBACK), Random(seed)).run()


def without_wait(programs: Programs, op: Op) -> Programs:
    """The same Programs where instructions of `op` wait for nothing."""
    ranks = [
        replace(
            program,
            instructions=tuple(
                replace(entry, waits=()) if entry.op == op else entry
                for entry in program.instructions
            ),
        )
        for program in programs.ranks
    ]
    return replace(programs, ranks=tuple(ranks))


@pytest.mark.parametrize("op", [Op.CALLBACK, Op.SEND, Op.RECEIVE])
@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "v"])
def test_the_replay_notices_a_missing_wait(name, op):
    # Without messages ahead of time, since with them credits alone keep 1F1B's slots apart.
    schedule, programs = compiled(name, 4, 12, prefetch=0)
    with pytest.raises(AssertionError):
        for seed in range(20):
            Replay(schedule, without_wait(programs, op), Random(seed)).run()


@settings(max_examples=40)
@given(st.sampled_from(NAMES), st.integers(2, 8), st.integers(1, 40))
def test_slots_are_bounded_by_work_in_flight(name, ranks, microbatches):
    schedule, programs = compiled(name, ranks, microbatches)
    for pair, slots in programs.slots.items():
        sent = messages(schedule, *pair)
        assert slots <= len(sent)
        target = pair[1]
        live = peak = 0
        row = schedule.rows[target]
        first = 1 if schedule.stages == schedule.ranks else 2  # stages a rank
        for action in row:
            # A message of a microbatch is held at most from its F to its last action there.
            live += action.kind == "F"
            peak = max(peak, live)
            live -= action.kind in ("I" if only_forward(name) else "WB")
        assert slots <= first * peak + PREFETCH


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "gpipe"])
def test_slots_do_not_grow_with_the_microbatches(name, ranks):
    few = compiled(name, ranks, 5 * ranks)[1].slots
    many = compiled(name, ranks, 25 * ranks)[1].slots
    assert few == many


def test_1f1b_has_a_slot_a_microbatch_held_and_the_prefetch():
    schedule, programs = compiled("1f1b", 4, 40)
    for rank in range(1, 4):
        assert programs.slots[rank - 1, rank] == microbatches_held(schedule)[rank] + PREFETCH


def rows(*lines: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(cell) for cell in line.split()) for line in lines)


def test_ranks_that_wait_for_each_other_are_named():
    # Rank 0 wants the gradient of 0 before it sends F1; rank 1 wants F1 before it makes it.
    order = rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError) as caught:
        compile(Schedule(order, 2, (0, 1)))
    text = str(caught.value)
    for lane in ("rank 0 compute at 0B0", "rank 1 compute at 1F1", "rank 0 send:1 at 0F1"):
        assert lane in text
    assert "rank 1 recv:0 at 0F1" in text


def test_too_few_slots_are_a_deadlock():
    _, programs = compiled("gpipe", 2, 4)

    def narrowed(n: int) -> Programs:
        ranks = []
        for program in programs.ranks:
            entries = []
            for entry in program.instructions:
                pair = None
                if entry.op == Op.SEND:
                    pair = (program.rank, program.destinations[entry.channel])
                elif entry.op == Op.RECEIVE:
                    pair = (program.sources[entry.channel], program.rank)
                if pair == (0, 1):
                    entry = replace(entry, slot=entry.action.microbatch % n, waits=entry.waits)
                    if entry.op == Op.RECEIVE and entry.action.microbatch >= n:
                        before = Action(1, "B", entry.action.microbatch - n)
                        index = [e.action for e in program.instructions].index(before)
                        entry = replace(entry, waits=(index,))
                entries.append(entry)
            ranks.append(replace(program, instructions=tuple(entries)))
        return replace(programs, ranks=tuple(ranks), slots={(0, 1): n, (1, 0): 4})

    cosimulate(narrowed(4))
    with pytest.raises(ScheduleError, match=r"rank 0 send:1 at 0F3.*rank 1 recv:0 at 0F3"):
        cosimulate(narrowed(3))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "v"])
def test_sends_in_another_order_than_receives_are_a_deadlock(name):
    _, programs = compiled(name, 2, 6)
    program = programs.ranks[0]
    sends = [i for i, e in enumerate(program.instructions) if e.lane == 1]
    entries = list(program.instructions)
    first, last = sends[0], sends[-1]
    entries[first], entries[last] = entries[last], entries[first]
    swapped = replace(program, instructions=tuple(entries))
    with pytest.raises(ScheduleError, match="rank 0 send:1 at"):
        cosimulate(replace(programs, ranks=(swapped, *programs.ranks[1:])))


def test_virtual_programs_sleep_and_send_bytes():
    _, programs = compiled("zb_h1", 2, 3)
    seconds = {"F": 0.001, "I": 0.002, "W": 0.0035}
    slept = virtual(programs, lambda a: seconds[a.kind], lambda a: 100 + a.microbatch)
    for before, after in zip(programs.ranks, slept.ranks, strict=True):
        for old, new in zip(before.instructions, after.instructions, strict=True):
            if old.op == Op.CALLBACK:
                assert (new.op, new.amount) == (Op.SLEEP, round(seconds[old.action.kind] * 1e9))
            elif old.op == Op.SEND:
                assert (new.op, new.amount) == (Op.SEND, 100 + old.action.microbatch)
            else:
                assert new == old
            assert (new.waits, new.slot, new.signals) == (old.waits, old.slot, old.signals)


# Rank 1 takes the batch in two halves, and W's of the first stand next to each other.
HALVES = """0F0,0F1,0I0,0I1,0W0,0W1,0F2,0F3,0I2,0W2,0I3,0W3
1F0,1I0,1F1,1I1,1W0,1W1,1F2,1I2,1F3,1I3,1W2,1W3
"""


def test_what_ws_of_a_run_read_is_kept_until_its_end():
    schedule = Schedule.from_csv(HALVES)
    run = (Action(1, "W", 0), Action(1, "W", 1))
    for runs in ((), (run,)):
        program = compile(replace(schedule, runs=runs), prefetch=0).ranks[1]
        at = {e.action: i for i, e in enumerate(program.instructions) if e.lane == 0}
        waits = [
            w
            for e in program.instructions
            if e.op == Op.RECEIVE and e.action.microbatch >= 2
            for w in e.waits
            if program.instructions[w].lane == 0
        ]
        assert waits == [at[run[1]]] * 2 if runs else [at[run[0]], at[run[1]]]
        assert program.together == ({at[run[0]]: (), at[run[1]]: (0, 1)} if runs else {})
        assert not compile(replace(schedule, runs=runs)).ranks[0].together


@pytest.mark.parametrize(
    "run",
    [
        (),
        (Action(1, "W", 1), Action(1, "W", 0)),
        (Action(1, "W", 1), Action(1, "W", 2)),
        (Action(1, "I", 1), Action(1, "W", 0)),
        (Action(1, "W", 7), Action(1, "W", 8)),
        (Action(2, "W", 0), Action(2, "W", 1)),
        (Action(-1, "W", 0), Action(-1, "W", 1)),
    ],
)
def test_a_run_that_is_none_is_refused(run):
    schedule = replace(Schedule.from_csv(HALVES), runs=(run,))
    with pytest.raises(ScheduleError, match="W's of one stage that stand next to each other"):
        compile(schedule)


@pytest.mark.parametrize("second", [(1, 2), (0, 1), (1,)])
def test_runs_that_overlap_are_refused(second):
    """At the last W of a run all its microbatches are computed: of two ends, only one is kept."""
    text = "0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2\n1F0,1F1,1F2,1I0,1I1,1I2,1W0,1W1,1W2\n"
    runs = tuple(tuple(Action(0, "W", m) for m in run) for run in ((0, 1), second))
    with pytest.raises(ScheduleError, match=f"runs has 0W{second[0]} in two runs"):
        compile(replace(Schedule.from_csv(text), runs=runs))
