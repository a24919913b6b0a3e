"""The fake device finds what it is there to find: faults planted one at a time, without luck.

Each fault is a missing edge of the order, which vector clocks see whatever the timing; so it must
be found under every jitter, and in each of several runs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from faking import EARLY_RECORD, WAIT_EVENT, WAIT_VALUE, Fake, cuda_crew, run_relays

from crews import forked
from zbpipe.program import Instruction, Op, Program, Programs, compile
from zbpipe.runtime.world import World
from zbpipe.schedule import build
from zbpipe.schedule.core import Action, Schedule

TIMINGS = [(1, 0), (8, 0), (8, 40), (8, 400)]  # hardware queues, jitter in microseconds
TRAIN = compile(build("zb_h1", 2, 6))
# Where nothing comes back, only the slots' flags hold the sender; else much of what they say
# follows from the gradients' messages too, and a fault there is none.
ROWS = tuple(tuple(Action(stage, "F", i) for i in range(8)) for stage in range(3))
FORWARD = compile(Schedule(ROWS, 8, (0, 1, 2)), forward_only=True)


def lane(programs: Programs, rank: int, name: str) -> int:
    return programs.ranks[rank].lanes.index(name)


def races(device: Fake) -> list[str]:
    return [report for report in device.reports() if report.startswith("race")]


Fault = tuple[Programs, int, str, int, int]


def plant(device: Fake, crew, fault: Fault) -> None:
    programs, rank, name, kind, call = fault
    if rank in crew.executors:
        device.fault(crew.executors[rank].stream(lane(programs, rank, name)), kind, call)


def faulty(device: Fake, programs: Programs, fault: Fault | None, **options) -> list[str]:
    """The races that the fake finds in three runs, of which the last has the fault."""
    ranks = len(programs.ranks)
    crew, loaded = cuda_crew(World(ranks, tuple(range(ranks))), programs, poison=False)
    options = {"smallest": 1} | options
    run_relays(device, crew, loaded, range(2), **options)
    if fault is not None:
        assert device.reports() == []
        plant(device, crew, fault)
    run_relays(device, crew, loaded, range(2, 3), **options)
    crew.close()
    return races(device)


# Program, rank, lane, kind, which call of the run (-2: all).
FAULTS: dict[str, Fault] = {
    "ready-wait": (TRAIN, 1, "recv:0", WAIT_VALUE, 2),
    "ready-wait of a gradient": (TRAIN, 0, "recv:1", WAIT_VALUE, 3),
    "free-wait": (FORWARD, 0, "send:1", WAIT_VALUE, 5),
    "free-waits between steps": (TRAIN, 0, "send:1", WAIT_VALUE, -2),
    "send's wait for its action": (TRAIN, 0, "send:1", WAIT_EVENT, 2),
    "action's wait for its message": (TRAIN, 1, "compute", WAIT_EVENT, 2),
    "receive's wait for the slot's readers": (FORWARD, 1, "recv:0", WAIT_EVENT, -2),
    "end of an action, recorded before its kernel": (TRAIN, 0, "compute", EARLY_RECORD, 3),
    "end of a receive, recorded before it": (TRAIN, 1, "compute", EARLY_RECORD, -2),
}


@pytest.mark.parametrize(("connections", "jitter"), TIMINGS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_edge_is_found(fake, fault, connections, jitter):
    for seed in (1, 2):
        device = fake(connections, jitter, seed)
        assert faulty(device, FAULTS[fault][0], FAULTS[fault]) != []


@pytest.mark.parametrize(("connections", "jitter"), TIMINGS)
@pytest.mark.parametrize("programs", [TRAIN, FORWARD], ids=["train", "forward"])
def test_without_a_fault_nothing_is_found(fake, programs, connections, jitter):
    device = fake(connections, jitter)
    never = (programs, 0, "send:1", WAIT_VALUE, 1000)
    assert faulty(device, programs, never) == []
    assert device.reports() == []


@pytest.mark.parametrize(("connections", "jitter"), TIMINGS)
def test_a_slot_that_is_used_again_too_soon_is_found(fake, connections, jitter):
    """The Program forgets that a slot may be read by the send of what its reader passed on."""

    def forget(program: Program, entry: Instruction) -> Instruction:
        if entry.op != Op.RECEIVE:
            return entry
        kept = tuple(w for w in entry.waits if program.instructions[w].op != Op.SEND)
        return replace(entry, waits=kept)

    ranks = tuple(
        replace(program, instructions=tuple(forget(program, i) for i in program.instructions))
        for program in FORWARD.ranks
    )
    assert faulty(fake(connections, jitter), FORWARD, None, passes=1.0) == []
    mutant = replace(FORWARD, ranks=ranks)
    assert faulty(fake(connections, jitter), mutant, None, passes=1.0) != []


@pytest.mark.parametrize(("connections", "jitter"), TIMINGS)
def test_a_tensor_that_is_not_held_until_it_is_sent_is_found(fake, connections, jitter):
    assert faulty(fake(connections, jitter), TRAIN, None, hold=False) != []


def separate(world: World, device: Fake, fault: Fault) -> list[str]:
    crew, loaded = cuda_crew(world, fault[0], poison=False)
    run_relays(device, crew, loaded, range(2), smallest=1)
    plant(device, crew, fault)
    world.gather(None)
    run_relays(device, crew, loaded, range(2, 3), smallest=1)
    crew.close()
    world.gather(None)
    return races(device)


@pytest.mark.parametrize(("connections", "jitter"), TIMINGS)
@pytest.mark.parametrize("fault", ["ready-wait", "free-wait"])
def test_a_missing_edge_between_processes_is_found(fake, fault, connections, jitter):
    ranks = len(FAULTS[fault][0].ranks)
    for outcome in forked(separate, ranks, fake(connections, jitter), FAULTS[fault]):
        assert outcome.get() != []
