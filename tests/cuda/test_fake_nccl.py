"""Payloads by NCCL on the fake device, whose sends and receives wait for each other."""

from __future__ import annotations

import os
import threading

import pytest
from faking import EARLY_RECORD, WAIT_EVENT, Fake, Gate, cuda_crew, run_relays
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crews import forked, named
from replaying import make, only_forward
from zbpipe import _native
from zbpipe.errors import ConfigError, StageError
from zbpipe.program import Programs, compile
from zbpipe.runtime.device_links import DeviceLinks, check_queues
from zbpipe.runtime.world import World
from zbpipe.schedule.core import Action, Schedule
from zbpipe.schedule.families import FAMILIES

NAMES = [*(name for name in FAMILIES if name != "dualpipe"), "v", "forward_only"]
QUEUES = 32
ROWS = tuple(tuple(Action(stage, "F", i) for i in range(8)) for stage in range(3))
FORWARD = compile(Schedule(ROWS, 8, (0, 1, 2)), forward_only=True)


def programs_of(name: str, ranks: int, microbatches: int) -> Programs:
    if name.startswith("interleaved"):
        microbatches = -(-microbatches // ranks) * ranks
    return compile(make(name, ranks, microbatches), forward_only=only_forward(name))


def local(programs: Programs, timeout: float = 30.0, poison: bool = True):
    ranks = len(programs.ranks)
    return cuda_crew(World(ranks, tuple(range(ranks))), programs, timeout, poison, "nccl")


def given_back(device: Fake) -> bool:
    """Every communicator that was made is given back."""
    ended = device.calls("ncclCommDestroy") + device.calls("ncclCommAbort")
    return device.calls("ncclCommInitRankConfig") == ended


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([0, 30, 300]),
    st.integers(0, 1 << 20),
    st.sampled_from([10, 100_000, 3 << 20]),
)
def test_local_ranks_of_any_family_run_without_a_race(
    fake, name, ranks, microbatches, jitter, seed, largest
):
    device = fake(QUEUES, jitter, seed)
    crew, loaded = local(programs_of(name, ranks, microbatches))
    assert set(crew.transports().values()) <= {"nccl"}
    run_relays(device, crew, loaded, range(3), seed=seed, largest=largest)
    crew.close()
    assert device.reports() == []
    assert device.calls("ncclCommAbort") == 0
    assert given_back(device)


def separate(world: World, device: Fake, name: str, microbatches: int, largest: int) -> list[str]:
    programs = programs_of(name, world.size, microbatches)
    crew, loaded = cuda_crew(world, programs, transport="nccl")
    run_relays(device, crew, loaded, range(4), seed=microbatches, largest=largest)
    crew.close()
    world.gather(None)  # reports of both
    return device.reports() + ([] if given_back(device) else ["a communicator is left"])


@pytest.mark.parametrize("name", NAMES)
def test_separate_ranks_of_every_family_run_without_a_race(fake, name):
    for outcome in forked(separate, 2, fake(QUEUES, jitter=60), name, 4, 70_000):
        assert outcome.get() == []


def on_two_hosts(world: World, device: Fake, name: str) -> list[str]:
    """Ranks 0 and 1 on one host, 2 and 3 on another: headers go over a socket between them."""
    os.environ["ZBPIPE_HOST"] = f"host {world.rank // 2}"
    programs = programs_of(name, world.size, 6)
    crew, loaded = cuda_crew(world, programs)
    assert set(crew.transports().values()) == ({"ipc", "nccl"} if world.rank in (1, 2) else {"ipc"})
    run_relays(device, crew, loaded, range(4), largest=200_000)
    crew.close()
    world.gather(None)
    return device.reports() + ([] if given_back(device) else ["a communicator is left"])


@pytest.mark.parametrize("name", ["zb_h1", "1f1b", "forward_only"])
def test_ranks_on_two_hosts(fake, name):
    for outcome in forked(on_two_hosts, 4, fake(QUEUES, jitter=60), name):
        assert outcome.get() == []


def test_more_separate_ranks_and_larger_messages(fake):
    for outcome in forked(separate, 4, fake(QUEUES, jitter=100), "zb_v", 8, 5 << 20):
        assert outcome.get() == []


def test_a_whole_step_is_enqueued_while_the_device_stands_still(fake):
    device = fake(QUEUES)
    crew, loaded = local(programs_of("zb_h1", 3, 6))
    run_relays(device, crew, loaded, range(2))
    gate = Gate(device)
    for executor in crew.executors.values():
        gate.hold(executor.stream(0))
    blocking = device.blocking()
    called = threading.Semaphore(0)
    step = threading.Thread(
        target=run_relays,
        args=(device, crew, loaded, range(2, 3)),
        kwargs={"after": lambda _: called.release()},
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


def test_too_few_hardware_queues_are_refused(fake, monkeypatch):
    fake(5)
    with pytest.raises(ConfigError, match=r"CUDA_DEVICE_MAX_CONNECTIONS = 5: rank 1 has up to 6"):
        local(programs_of("1f1b", 3, 4))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    local(programs_of("1f1b", 3, 4))[0].close()
    every = {(a, b): "nccl" for a in range(5) for b in range(5) if a != b}
    with pytest.raises(ConfigError, match=r"is not set, which means 8: rank 0 has up to 10 lanes"):
        check_queues(every)
    check_queues(dict.fromkeys(every, "ipc"))


def few(world: World) -> None:
    if world.rank == 2:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "5"
    with pytest.raises(ConfigError, match="rank 1 has up to 6 lanes"):
        cuda_crew(world, programs_of("1f1b", 3, 4), transport="nccl")


def test_too_few_hardware_queues_of_one_process_are_refused_on_every_rank(fake):
    fake(QUEUES)
    for outcome in forked(few, 3):
        outcome.get()


def without(world: World) -> None:
    if world.rank == 1:
        os.environ["ZBPIPE_NCCL"] = "/nowhere/libnccl.so.2"
    with pytest.raises(ConfigError, match="NCCL could not be loaded"):
        cuda_crew(world, programs_of("1f1b", 3, 4), transport="nccl")


def test_a_process_without_nccl_is_an_error_on_every_rank(fake):
    fake(QUEUES)
    for outcome in forked(without, 3):
        outcome.get()


# Program, rank, lane, kind, which call of the run (-2: all).
TRAIN = programs_of("zb_h1", 2, 6)
FAULTS = {
    "send's wait for its action": (TRAIN, 0, "send:1", WAIT_EVENT, 2),
    "action's wait for its message": (TRAIN, 1, "compute", WAIT_EVENT, 2),
    "receive's wait for the slot's readers": (FORWARD, 1, "recv:0", WAIT_EVENT, -2),
    "end of a receive, recorded before it": (TRAIN, 1, "compute", EARLY_RECORD, -2),
}


@pytest.mark.parametrize("jitter", [0, 40, 400])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_edge_is_found(fake, fault, jitter):
    programs, rank, lane, kind, call = FAULTS[fault]
    device = fake(QUEUES, jitter)
    crew, loaded = local(programs, poison=False)
    run_relays(device, crew, loaded, range(2), smallest=1)
    assert device.reports() == []
    stream = crew.executors[rank].stream(programs.ranks[rank].lanes.index(lane))
    device.fault(stream, kind, call)
    run_relays(device, crew, loaded, range(2, 3), smallest=1)
    crew.close()
    assert [report for report in device.reports() if report.startswith("race")]


def failing(world: World, device: Fake) -> None:
    crew, loaded = cuda_crew(world, programs_of("1f1b", world.size, 4), transport="nccl")
    run_relays(device, crew, loaded, range(2))
    world.gather(None)
    where = Action(1, "F", 1)

    def fail(action: Action) -> None:
        if action == where:
            raise ValueError("boom")

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=fail)
    named(caught.value, 1, where, "ValueError: boom")
    crew.close()
    assert given_back(device)
    assert [report for report in device.reports() if "ncclCommAbort" in report] == []


def test_an_exception_reaches_separate_ranks_and_the_streams_run_out(fake):
    for outcome in forked(failing, 3, fake(QUEUES)):
        outcome.get()


def test_an_exception_reaches_local_ranks_and_the_streams_run_out(fake):
    failing(World(3, (0, 1, 2)), fake(QUEUES))


def broken(world: World, device: Fake, late: bool) -> None:
    crew, loaded = cuda_crew(world, programs_of("1f1b", world.size, 4), transport="nccl")
    run_relays(device, crew, loaded, range(2))
    world.gather(None)
    gate = Gate(device)

    def cut(action: Action) -> None:
        if late and world.rank == 0 and action == Action(0, "F", 0):
            gate.hold(crew.executors[0].stream(0))  # the others' devices wait for this one
        if world.rank == 1 and action == (Action(1, "B", 3) if late else Action(1, "F", 1)):
            device.lib.fake_nccl_error(6)

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=cut)
    assert caught.value.rank == 1
    assert "NCCL error 6: remote process exited" in caught.value.cause
    assert "between this rank and rank " in caught.value.cause
    gate.open()
    crew.close()
    # What waited on the device was let go.
    assert given_back(device)
    assert [report for report in device.reports() if "ncclCommAbort" in report] == []


@pytest.mark.parametrize("late", [False, True], ids=["enqueueing", "draining"])
def test_a_connection_that_breaks_is_an_error_on_every_rank(fake, late):
    for outcome in forked(broken, 3, fake(QUEUES), late):
        outcome.get()


def test_a_peer_that_does_not_connect_is_named(fake):
    fake(QUEUES)
    board = _native.Board.create(2)
    links = DeviceLinks(board, {0: _native.cuda.Device(board, 0, 0)}, {0: 0}, False)
    links.offer((0, 1), 1, "nccl")
    with pytest.raises(ConfigError, match=r"rank 0 → 1: no connection by NCCL within 0\.05 s"):
        links.connect(0.05, lambda: None)


def test_nccl_must_be_there_and_recent(fake, monkeypatch):
    fake()
    monkeypatch.setenv("ZBPIPE_FAKE_NCCL_VERSION", "21602")
    with pytest.raises(RuntimeError, match=r"is NCCL 21602: want 2\.17 or newer"):
        _native.cuda.NcclOut(0, 1, 1)
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    with pytest.raises(RuntimeError, match=r"NCCL_COMM_BLOCKING = 1: .* unset it"):
        _native.cuda.NcclOut(0, 1, 1)
    monkeypatch.delenv("NCCL_COMM_BLOCKING")
    monkeypatch.setenv("ZBPIPE_NCCL", "/nowhere/libnccl.so.2")
    with pytest.raises(RuntimeError, match=r"NCCL could not be loaded.*ZBPIPE_NCCL.*/nowhere"):
        _native.cuda.NcclOut(0, 1, 1)
    with pytest.raises(RuntimeError, match="a NCCL id has 128 bytes"):
        _native.cuda.NcclIn(0, 1, 1, b"short")
