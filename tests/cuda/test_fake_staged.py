"""Payloads through host memory on the fake device, which hears what the host does with it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import pytest
from beside import beside
from faking import (
    EARLY_RECORD,
    EARLY_WRITE,
    FLAGS,
    TAKEN,
    WAIT_EVENT,
    WAIT_VALUE,
    Fake,
    Gate,
    cuda_crew,
    run_relays,
    threads,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crews import forked, shared_files
from replaying import make, only_forward
from zbpipe import doctor
from zbpipe.program import Instruction, Op, Program, Programs, compile
from zbpipe.runtime import device_links
from zbpipe.runtime.executor import Crew
from zbpipe.runtime.world import World
from zbpipe.schedule.core import Action, Schedule
from zbpipe.schedule.families import FAMILIES

NAMES = [*(name for name in FAMILIES if name != "dualpipe"), "v", "forward_only"]


def programs_of(name: str, ranks: int, microbatches: int) -> Programs:
    if name.startswith("interleaved"):
        microbatches = -(-microbatches // ranks) * ranks
    return compile(make(name, ranks, microbatches), forward_only=only_forward(name))


TRAIN = programs_of("zb_h1", 2, 6)
# Where nothing comes back, only the flags hold a sender.
ROWS = tuple(tuple(Action(stage, "F", i) for i in range(8)) for stage in range(3))
FORWARD = compile(Schedule(ROWS, 8, (0, 1, 2)), forward_only=True)


def registered(device: Fake) -> int:
    return device.calls("cudaHostRegister") - device.calls("cudaHostUnregister")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([1, 8]),
    st.sampled_from([0, 30, 300]),
    st.integers(0, 1 << 20),
    st.sampled_from([10, 100_000, 3 << 20]),
    st.sampled_from([0, 1 << 20, 1 << 30]),
)
def test_ranks_of_any_family_run_without_a_race(
    fake, monkeypatch, name, ranks, microbatches, connections, jitter, seed, largest, ahead
):
    device = fake(connections, jitter, seed)
    monkeypatch.setattr(device_links, "AHEAD", ahead)
    crew, loaded = beside(programs_of(name, ranks, microbatches), monkeypatch)
    assert set(crew.transports().values()) <= {"tcp"}
    run_relays(device, crew, loaded, range(3), seed=seed, largest=largest)
    crew.close()
    assert device.reports() == []
    assert registered(device) == 0
    assert threads() == shared_files() == []


def separate(world: World, device: Fake, name: str, microbatches: int, largest: int) -> list[str]:
    """Each rank on a host of its own: headers and payloads over real connections."""
    os.environ["ZBPIPE_HOST"] = f"host {world.rank}"
    programs = programs_of(name, world.size, microbatches)
    crew, loaded = cuda_crew(world, programs, transport="tcp")
    run_relays(device, crew, loaded, range(4), seed=microbatches, largest=largest)
    crew.close()
    left = [*threads(), *shared_files()]
    return device.reports() + left + ["memory stays registered"] * registered(device)


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_separate_ranks_of_every_family_run_without_a_race(fake, name, connections):
    for outcome in forked(separate, 2, fake(connections, jitter=60), name, 4, 70_000):
        assert outcome.get() == []


def test_more_separate_ranks_and_larger_messages(fake):
    for outcome in forked(separate, 4, fake(2, jitter=100), "zb_v", 8, 5 << 20):
        assert outcome.get() == []


def on_two_hosts(world: World, device: Fake, without: set[int]) -> set[str]:
    """Ranks 0 and 1 on one host, 2 and 3 on another; NCCL is not there for the ranks `without`."""
    os.environ["ZBPIPE_HOST"] = f"host {world.rank // 2}"
    if world.rank in without:
        os.environ["ZBPIPE_NCCL"] = "/nowhere/libnccl.so.2"
    crew, loaded = cuda_crew(world, programs_of("zb_h1", world.size, 6))
    run_relays(device, crew, loaded, range(4), largest=200_000)
    found = set(crew.transports().values())
    crew.close()
    world.gather(None)
    assert device.reports() == []
    return found


@pytest.mark.parametrize(
    ("without", "across"), [(set(), "nccl"), ({2}, "tcp"), ({1, 2}, "tcp"), ({0, 3}, "nccl")]
)
def test_what_cannot_go_by_nccl_is_staged(fake, without, across):
    outcomes = forked(on_two_hosts, 4, fake(32, jitter=60), without)
    assert [o.get() for o in outcomes] == [{"ipc"}, {"ipc", across}, {"ipc", across}, {"ipc"}]


@pytest.mark.parametrize("connections", [1, 8])
def test_a_whole_step_is_enqueued_while_the_devices_stand_still(fake, monkeypatch, connections):
    device = fake(connections)
    crew, loaded = beside(programs_of("zb_h1", 3, 6), monkeypatch)
    run_relays(device, crew, loaded, range(2), smallest=65_537)  # no buffer is outgrown
    gate = Gate(device)
    for executor in crew.executors.values():
        gate.hold(executor.stream(0))
    blocking = device.blocking()
    called = threading.Semaphore(0)
    step = threading.Thread(
        target=run_relays,
        args=(device, crew, loaded, range(2, 3)),
        kwargs={"smallest": 65_537, "after": lambda _: called.release()},
    )
    step.start()
    for _ in range(sum(i.lane == 0 for p in loaded.programs.values() for i in p.instructions)):
        assert called.acquire(timeout=20)
    assert step.is_alive()
    gate.open()
    step.join()
    assert device.blocking() == blocking
    crew.close()
    assert device.reports() == []


def test_a_host_gets_as_far_ahead_as_there_is_memory(fake, monkeypatch):
    """A buffer a slot, and the device stands still: no more than these messages are enqueued."""
    device = fake(8)
    monkeypatch.setattr(device_links, "AHEAD", 0)
    crew, loaded = beside(FORWARD, monkeypatch)
    sizes = {"smallest": 65_537}
    run_relays(device, crew, loaded, range(2), **sizes)
    gate = Gate(device)
    gate.hold(crew.executors[0].stream(0))
    called: list[int] = []
    kwargs = sizes | {"after": lambda relay: called.append(relay.rank)}
    step = threading.Thread(
        target=run_relays, args=(device, crew, loaded, range(2, 3)), kwargs=kwargs
    )
    step.start()
    while called.count(0) < 8:
        time.sleep(0.01)
    time.sleep(0.2)
    # Rank 0's own kernels are all enqueued, the others' for as many messages as it could send.
    assert called.count(1) == called.count(2) == FORWARD.slots[0, 1] < 8
    gate.open()
    step.join()
    assert called.count(1) == called.count(2) == 8
    crew.close()
    assert device.reports() == []


# Program, rank, lane, kind, which call of the run (-2: all).
Fault = tuple[Programs, int, str, int, int]
FAULTS: dict[str, Fault] = {
    "wait for what comes": (TRAIN, 1, "recv:0", WAIT_VALUE, 2),
    "wait for a gradient": (TRAIN, 0, "recv:1", WAIT_VALUE, 3),
    "flag of a copy to the host, before it": (TRAIN, 0, "send:1", EARLY_WRITE, 2),
    "flag of a copy from the host, before it": (FORWARD, 1, "recv:0", EARLY_WRITE, -2),
    "send's wait for its action": (TRAIN, 0, "send:1", WAIT_EVENT, 2),
    "action's wait for its message": (TRAIN, 1, "compute", WAIT_EVENT, 2),
    "receive's wait for the slot's readers": (FORWARD, 1, "recv:0", WAIT_EVENT, -2),
    "end of an action, recorded before its kernel": (TRAIN, 0, "compute", EARLY_RECORD, 3),
    "end of a receive, recorded before it": (TRAIN, 1, "compute", EARLY_RECORD, -2),
}
TIMINGS = [(1, 0), (8, 0), (8, 40), (8, 400)]  # hardware queues, jitter in microseconds


def races(device: Fake) -> list[str]:
    return [report for report in device.reports() if report.startswith("race")]


def plant(device: Fake, crew: Crew, fault: Fault) -> None:
    programs, rank, lane, kind, call = fault
    if rank in crew.executors:
        number = programs.ranks[rank].lanes.index(lane)
        device.fault(crew.executors[rank].stream(number), kind, call)


@pytest.mark.parametrize(("connections", "jitter"), TIMINGS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_edge_is_found(fake, monkeypatch, fault, connections, jitter):
    device = fake(connections, jitter)
    crew, loaded = beside(FAULTS[fault][0], monkeypatch, poison=False)
    run_relays(device, crew, loaded, range(2), smallest=1)
    assert device.reports() == []
    plant(device, crew, FAULTS[fault])
    run_relays(device, crew, loaded, range(2, 3), smallest=1)
    crew.close()
    assert races(device) != []


@pytest.mark.parametrize(("connections", "jitter"), TIMINGS)
@pytest.mark.parametrize("what", [FLAGS, TAKEN], ids=["flags", "free buffers"])
def test_a_host_that_does_not_look_is_found(fake, monkeypatch, what, connections, jitter):
    """A carrier that does not wait for a stream, or a buffer that is used again too soon."""
    device = fake(connections, jitter)
    crew, loaded = beside(FORWARD, monkeypatch, poison=False)
    run_relays(device, crew, loaded, range(2), smallest=1)
    assert device.reports() == []
    device.blind(what)
    run_relays(device, crew, loaded, range(2, 3), smallest=1)
    device.blind(0)
    crew.close()
    assert races(device) != []


@pytest.mark.parametrize(("connections", "jitter"), TIMINGS)
def test_a_slot_that_is_used_again_too_soon_is_found(fake, monkeypatch, connections, jitter):
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
    device = fake(connections, jitter)
    crew, loaded = beside(replace(FORWARD, ranks=ranks), monkeypatch, poison=False)
    run_relays(device, crew, loaded, range(3), smallest=1, passes=1.0)
    crew.close()
    assert races(device) != []


def separate_fault(world: World, device: Fake, fault: Fault) -> list[str]:
    crew, loaded = cuda_crew(world, fault[0], poison=False, transport="tcp")
    run_relays(device, crew, loaded, range(2), smallest=1)
    plant(device, crew, fault)
    world.gather(None)
    run_relays(device, crew, loaded, range(2, 3), smallest=1)
    crew.close()
    world.gather(None)
    return races(device)


@pytest.mark.parametrize(
    "fault", ["wait for what comes", "flag of a copy from the host, before it"]
)
def test_a_missing_edge_between_processes_is_found(fake, fault):
    ranks = len(FAULTS[fault][0].ranks)
    for outcome in forked(separate_fault, ranks, fake(8, 40), FAULTS[fault]):
        assert outcome.get() != []


def test_the_doctor_says_what_is_used_without_nccl(fake, monkeypatch):
    fake()
    monkeypatch.setenv("ZBPIPE_NCCL", "/nowhere/libnccl.so.2")
    monkeypatch.setattr(doctor, "_installed", lambda *packages: None)
    found = {one.name: one for one in doctor.examine().findings}
    assert not found["transport nccl"].ok
    assert "through the host's memory, which is slower" in found["transport nccl"].detail
    assert "where NCCL is missing, on CUDA" in found["transport tcp"].detail
