"""A rank that raises, dies, stalls or does not come is named on every rank, and nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from crews import Outcome, Relay, crew_of, forked, local, named, process_state, spawned
from zbpipe.errors import ConfigError, StageError
from zbpipe.program import Op, compile, virtual
from zbpipe.runtime.world import join
from zbpipe.schedule import build
from zbpipe.schedule.core import Action

PROGRAMS = compile(build("1f1b", 3, 4))
WHERE = Action(1, "F", 1)  # every other rank needs what comes of it


def enter(world, at, programs=PROGRAMS, timeout=30.0, runs=3):
    """Run the Programs; `at(crew)` happens in WHERE of the last run. Raises what the run raises."""
    crew = crew_of(world, programs, timeout)
    loaded = crew.load(programs)
    for run in range(runs):
        callbacks = {}
        for rank in world.local:
            relay = Relay(crew, loaded, rank, 0, 5000).begin(run)

            def callback(index, relay=relay, run=run):
                relay(index)
                if run == runs - 1 and relay.order[-1] == WHERE:
                    at(crew)

            callbacks[rank] = callback
        crew.run(loaded, callbacks)


def boom(crew):
    raise ValueError("boom")


def test_an_exception_reaches_every_separate_rank():
    for outcome in forked(enter, 3, boom):
        named(outcome.error, 1, WHERE, "ValueError: boom")
        assert outcome.exitcode == 0


def test_an_exception_reaches_the_caller_of_local_ranks():
    crew, loaded = local(PROGRAMS)
    relays = {rank: Relay(crew, loaded, rank, 0, 5000).begin(0) for rank in range(3)}
    error = ValueError("boom")

    def callback(index):
        relays[1](index)
        if relays[1].order[-1] == WHERE:
            raise error

    for _ in range(2):  # the second time it has not even started
        with pytest.raises(StageError) as caught:
            crew.run(loaded, relays | {1: callback})
        named(caught.value, 1, WHERE, "ValueError: boom")
        assert caught.value.__cause__ is error
    crew.close()


def spawned_boom(rank):
    with pytest.raises(StageError) as caught:
        enter(join(None), boom)
    named(caught.value, 1, WHERE, "ValueError: boom")


def test_an_exception_reaches_every_spawned_rank():
    spawned(spawned_boom, 3)


def bad_input(crew):
    raise ConfigError("batch is odd")


def test_bad_input_is_a_config_error_on_every_rank():
    for outcome in forked(enter, 3, bad_input):
        assert type(outcome.error) is ConfigError
        assert str(outcome.error) == "rank 1: batch is odd"


class UnprintableError(Exception):
    def __str__(self):
        raise TypeError("no words")


def unprintable(crew):
    raise UnprintableError


def long_text(crew):
    raise ValueError("\u20ac" * 5000)


@pytest.mark.parametrize(("at", "cause"), [(unprintable, "no words"), (long_text, "\u20ac" * 1000)])
def test_an_exception_that_does_not_fit_is_an_error_all_the_same(at, cause):
    for outcome in forked(enter, 3, at):
        named(outcome.error, 1, WHERE, cause)


def die(crew):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_what_it_did():
    killed, others = split(forked(enter, 3, die), 1)
    assert killed.exitcode == -signal.SIGKILL
    for outcome in others:
        named(outcome.error, 1, WHERE, "died")


def split(outcomes: list[Outcome], rank: int) -> tuple[Outcome, list[Outcome]]:
    return outcomes[rank], [outcome for outcome in outcomes if outcome.rank != rank]


def stall(crew):
    threading.Event().wait()


def test_a_stalled_rank_is_named_and_raises_itself():
    for outcome in forked(enter, 3, stall, PROGRAMS, 1.5):
        named(outcome.error, 1, WHERE, "no progress for 1.5 s: this action does not return")
        assert outcome.exitcode == 0


def test_a_rank_alone_does_not_wait_for_ever():
    crew, loaded = local(compile(build("gpipe", 1, 2)), timeout=0.4)
    stalled = threading.Event()
    with pytest.raises(StageError) as caught:
        crew.run(loaded, {0: lambda index: index != 1 or (stalled.wait() and None)})
    named(caught.value, 0, Action(0, "F", 1), "does not return")
    stalled.set()
    crew.close()


def absent(world, timeout):
    crew = crew_of(world, PROGRAMS, timeout)
    loaded = crew.load(PROGRAMS)
    if world.rank == 2:
        while crew.board.failure() is None:
            time.sleep(0.01)
    crew.run(loaded, {world.rank: Relay(crew, loaded, world.rank, 0, 10)})


def test_a_rank_that_does_not_enter_the_step_is_named():
    for outcome in forked(absent, 3, 1.0):
        named(outcome.error, 2, None, "this rank has not entered step 0")


def leaves(world, how):
    crew = crew_of(world, PROGRAMS)
    loaded = crew.load(PROGRAMS)
    for run in range(3):
        if world.rank == 2 and run == 2:
            if how == "close":
                crew.close()
                world.gather(None)
                return
            os.kill(os.getpid(), signal.SIGKILL)
        crew.run(loaded, {world.rank: Relay(crew, loaded, world.rank, 0, 10).begin(run)})


@pytest.mark.parametrize(
    ("how", "cause"), [("close", "closed its pipeline before step 2"), ("kill", "died")]
)
def test_a_rank_that_went_between_steps_is_named(how, cause):
    def body(world):
        try:
            leaves(world, how)
        finally:
            if how == "close" and world.rank != 2:
                world.gather(None)

    for outcome in split(forked(body, 3), 2)[1]:
        named(outcome.error, 2, None, cause)


def interrupt(crew):
    os.kill(os.getpid(), signal.SIGINT)
    while crew.board.failure() is None:  # the step must not be over before it is seen
        time.sleep(0.001)


def test_ctrl_c_ends_the_step_there_and_is_named_elsewhere():
    hit, others = split(forked(enter, 3, interrupt), 1)
    assert type(hit.error) is KeyboardInterrupt
    for outcome in others:
        named(outcome.error, 1, None, "interrupted in step()")


def second_failure(world):
    programs = compile(build("1f1b", 2, 4))
    crew = crew_of(world, programs)
    loaded = crew.load(programs)
    relay = Relay(crew, loaded, world.rank, 0, 10).begin(0)

    def callback(index):
        relay(index)
        if world.rank == 0 and relay.order[-1] == Action(0, "F", 1):
            raise ValueError("first")
        if world.rank == 1:
            while crew.board.failure() is None:
                time.sleep(0.001)
            raise ValueError("second")

    crew.run(loaded, {world.rank: callback})


def test_a_second_failure_does_not_replace_the_first():
    for outcome in forked(second_failure, 2):
        named(outcome.error, 0, Action(0, "F", 1), "ValueError: first")


def frozen(world, timeout):
    programs = compile(build("1f1b", 2, 4))
    crew = crew_of(world, programs, timeout)
    loaded = crew.load(programs)
    peer = world.gather(os.getpid())[1]
    relay = Relay(crew, loaded, world.rank, 0, 10)
    instructions = loaded.programs[world.rank].instructions
    second = [i for i, one in enumerate(instructions) if one.op == Op.RECEIVE][1]

    def callback(index):
        relay(index)
        if world.rank == 0 and relay.run == 1 and relay.order[-1] == Action(0, "B", 0):
            # What the peer can do without our F2 it has done, once this message is here.
            while not crew.executors[0].finished(second):
                time.sleep(0.001)
            os.kill(peer, signal.SIGSTOP)
            while process_state(peer) != "T":
                time.sleep(0.001)

    try:
        for run in range(2):
            relay.begin(run)
            crew.run(loaded, {world.rank: callback})
    finally:
        if world.rank == 0:
            os.kill(peer, signal.SIGCONT)


def test_a_process_that_does_not_run_is_named_not_its_peer():
    # It waits for a message when it is stopped, so no action of it is under way.
    for outcome in forked(frozen, 2, 2.5):
        named(outcome.error, 1, None, "the process of this rank does not run")


def finishes_late(world):
    programs = compile(build("zb_h1", 2, 3))
    crew = crew_of(world, programs)
    loaded = crew.load(programs)
    peer = world.gather(os.getpid())[0]
    relay = Relay(crew, loaded, world.rank, 0, 10)

    def callback(index):
        relay(index)
        if world.rank == 1 and relay.order[-1] == Action(1, "W", 2):
            while process_state(peer) not in ("", "Z"):
                time.sleep(0.001)
            time.sleep(0.5)  # some looks at who is still there

    crew.run(loaded, {world.rank: callback})


def test_a_rank_that_finished_and_went_is_not_dead():
    for outcome in forked(finishes_late, 2):
        outcome.get()


def test_a_long_step_that_moves_is_no_stall():
    programs = virtual(compile(build("zb_h1", 2, 8)), lambda _: 0.1, lambda _: 0)
    crew, loaded = local(programs, timeout=1.2)
    crew.run(loaded, {0: None, 1: None})
    assert crew.timeline(loaded).makespan() > 2 * 1.2
    crew.close()


def test_closing_in_a_step_ends_it():
    crew, loaded = local(compile(build("1f1b", 2, 2)))
    entered = threading.Event()
    errors = []

    def callback(index):
        entered.set()
        while crew.board.failure() is None:
            time.sleep(0.001)

    def drive():
        try:
            crew.run(loaded, {0: callback, 1: callback})
        except StageError as error:
            errors.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    entered.wait()
    crew.close()
    thread.join()
    (error,) = errors
    named(error, 0, None, "closed in a step")
