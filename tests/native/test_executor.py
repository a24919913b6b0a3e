"""The executor on local and on separate ranks: order, messages, slots, sleeps and times."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crews import Relay, crew_of, forked, lane_threads, local, shared_files, spawned
from replaying import make, only_forward
from zbpipe.errors import StageError
from zbpipe.program import Programs, compile, virtual
from zbpipe.runtime.world import World, join
from zbpipe.schedule import build

NAMES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "forward_only", "v")


def programs_of(name: str, ranks: int, microbatches: int) -> Programs:
    return compile(make(name, ranks, microbatches), forward_only=only_forward(name))


def relay_runs(world: World, name: str, size: int, seed: int, runs: int, largest: int) -> None:
    """Many runs one after the other, every message checked, every order the schedule's."""
    ranks, microbatches = world.size, size
    programs = programs_of(name, ranks, microbatches)
    crew = crew_of(world, programs)
    loaded = crew.load(programs)
    relays = {rank: Relay(crew, loaded, rank, seed, largest) for rank in world.local}
    rows = make(name, ranks, microbatches).rows
    for run in range(runs):
        crew.run(loaded, {rank: relay.begin(run) for rank, relay in relays.items()})
        for rank, relay in relays.items():
            assert tuple(relay.order) == rows[rank]
            assert crew.board.steps(rank) == run + 1
    crew.close()


@settings(max_examples=25)
@given(
    st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31), st.data()
)
def test_local_ranks_relay_messages_in_order(name, ranks, microbatches, seed, data):
    largest = data.draw(st.sampled_from([65_537, 3 << 20]))
    runs = 3 if largest > 1 << 20 else 8
    relay_runs(World(ranks, tuple(range(ranks))), name, microbatches, seed, runs, largest)


@pytest.mark.parametrize(("name", "ranks"), [("zb_h2", 2), ("1f1b", 3), ("v", 2)])
def test_separate_ranks_relay_messages_in_order(name, ranks):
    for outcome in forked(relay_runs, ranks, name, 6, 7, 40, 200_000):
        outcome.get()


def test_extents_grow_and_shrink_between_separate_ranks():
    for outcome in forked(relay_runs, 2, "zb_h1", 5, 11, 12, 3 << 20):
        outcome.get()


def spawned_relay(rank: int, name: str) -> None:
    world = join(None)
    assert (world.rank, world.size) == (rank, 2)
    relay_runs(world, name, 6, 3, 30, 1 << 20)


def test_spawned_ranks_meet_over_torch_distributed():
    spawned(spawned_relay, 2, "zb_h1")


def no_barrier(world: World, runs: int) -> None:
    """The last action of rank 1 ends only when rank 0 is through with the step already."""
    programs = programs_of("zb_h1", 2, 3)
    crew = crew_of(world, programs)
    loaded = crew.load(programs)
    last = len(programs.ranks[1].instructions)
    while programs.ranks[1].instructions[last - 1].lane != 0:
        last -= 1
    relay = Relay(crew, loaded, world.rank, 0, 1000)

    def callback(index: int) -> None:
        relay(index)
        while world.rank == 1 and index == last - 1 and crew.board.steps(0) <= relay.run:
            time.sleep(0.0005)

    for run in range(runs):
        relay.begin(run)
        crew.run(loaded, {world.rank: callback})


def test_no_barrier_between_steps():
    for outcome in forked(no_barrier, 2, 20):
        outcome.get()


@pytest.mark.parametrize("poison", [True, False])
def test_freed_slots_are_poisoned(poison):
    programs = programs_of("1f1b", 2, 6)
    crew, loaded = local(programs, poison=poison)
    seen: dict[int, list[np.ndarray]] = {}
    sent = np.arange(1000, dtype=np.uint8)

    def sender(index: int) -> None:
        send = programs.ranks[0].sends.get(index)
        if send is not None:
            crew.executors[0].post(send, b"F", [(sent.ctypes.data, sent.size, 0)], sent.size)

    def receiver(index: int) -> None:
        program = programs.ranks[1]
        need = program.needs.get(index)
        if need is not None:
            receive = program.instructions[need]
            _, slot = crew.executors[1].message(receive.channel, receive.slot)
            held = np.frombuffer(slot, dtype=np.uint8)
            assert np.array_equal(held, sent)
            seen.setdefault(receive.slot, []).append(held)
        send = program.sends.get(index)
        if send is not None:
            crew.executors[1].post(send, b"B", [], 0)

    crew.run(loaded, {0: sender, 1: receiver})
    assert sum(map(len, seen.values())) == 6
    for views in seen.values():
        for held in views:
            assert np.array_equal(held, np.full_like(sent, 0xFF) if poison else sent)
    crew.close()
    assert all(held.size == sent.size for views in seen.values() for held in views)


def test_virtual_sleeps_and_times_are_sane():
    programs = programs_of("zb_h1", 3, 5)
    seconds = {"F": 0.004, "I": 0.003, "W": 0.002}
    slept = virtual(programs, lambda a: seconds[a.kind], lambda _: 100_000)
    crew, loaded = local(slept)
    for _ in range(3):
        before = time.monotonic()
        crew.run(loaded, dict.fromkeys(range(3)))
        after = time.monotonic()
        timeline = crew.timeline(loaded, "virtual")
        assert len(timeline.spans) == sum(len(p.instructions) for p in slept.ranks)
        ends = {(s.rank, s.lane, s.action): s.end for s in timeline.spans}
        latest: dict[tuple[int, str], float] = {}
        for span in timeline.spans:  # in each lane's order
            assert before <= span.start <= span.end <= after
            assert latest.get((span.rank, span.lane), 0.0) <= span.start
            latest[span.rank, span.lane] = span.end
            if span.lane == "compute":
                assert span.end - span.start >= seconds[span.action.kind]
            elif span.lane.startswith("send"):
                assert span.start >= ends[span.rank, "compute", span.action]
            else:
                # One clock for all ranks: a message cannot be in before it was made.
                maker = int(span.lane.split(":")[1])
                assert span.end >= ends[maker, "compute", span.action]
        for program in slept.ranks:
            for index, need in program.needs.items():
                action = program.instructions[index].action
                source = program.instructions[need]
                lane = program.lanes[source.lane]
                (start,) = [
                    s.start
                    for s in timeline.spans
                    if (s.rank, s.lane, s.action) == (program.rank, "compute", action)
                ]
                assert start >= ends[program.rank, lane, source.action]
    crew.close()


def test_steps_are_counted_before_a_run_is_seen_to_end():
    crew, loaded = local(virtual(compile(build("gpipe", 1, 1)), lambda _: 0.0, lambda _: 0))
    for run in range(10_000):
        crew.run(loaded, {0: None})
        assert crew.board.steps(0) == run + 1
    crew.close()


def test_programs_may_alternate():
    train, evaluate = programs_of("zb_h1", 3, 7), programs_of("forward_only", 3, 7)
    slots = {p: max(g.slots.get(p, 1) for g in (train, evaluate)) for p in train.slots}
    crew = crew_of(World(3, (0, 1, 2)), Programs(train.ranks, slots))
    for run in range(10):
        programs = (train, evaluate)[run % 2]
        loaded = crew.load(programs)
        relays = {r: Relay(crew, loaded, r, 5, 70_000).begin(run) for r in range(3)}
        crew.run(loaded, relays)
    crew.close()


def test_two_crews_in_one_process_do_not_meet():
    first, second = local(programs_of("zb_h2", 3, 6)), local(programs_of("1f1b", 2, 4))
    errors: list[BaseException] = []

    def drive(crew, loaded, ranks, fail_at):
        relays = {r: Relay(crew, loaded, r, ranks, 100_000) for r in range(ranks)}
        for run in range(30):
            for relay in relays.values():
                relay.begin(run)

            def callback(index, relay=relays[0], run=run):
                relay(index)
                if run == fail_at and index == 2:
                    raise ValueError("only this crew")

            try:
                crew.run(loaded, relays | {0: callback})
            except StageError as error:
                errors.append(error)
                return

    threads = [
        threading.Thread(target=drive, args=(*first, 3, None)),
        threading.Thread(target=drive, args=(*second, 2, 10)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["only this crew" in str(error) for error in errors] == [True]
    assert first[0].board.steps(0) == 30
    assert first[0].board.failure() is None
    for crew, _ in (first, second):
        crew.close()


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_left_of_a_crew(closed):
    gc.collect()
    lanes, files = lane_threads(), sorted(shared_files())
    programs = compile(build("zb_h1", 3, 4))
    crew, loaded = local(programs)
    crew.run(loaded, {r: Relay(crew, loaded, r, 0, 70_000).begin(0) for r in range(3)})
    assert len(lane_threads()) - len(lanes) == sum(len(p.lanes) for p in programs.ranks)
    assert sorted(shared_files()) != files
    if closed:
        crew.close()
    gone = weakref.ref(crew)
    if not closed:
        # A run's callback knows the crew: the executor must not keep it.
        del crew, loaded
        gc.collect()
        assert gone() is None
    assert (len(lane_threads()), sorted(shared_files())) == (len(lanes), files)
