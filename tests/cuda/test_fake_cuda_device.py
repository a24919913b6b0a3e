"""The parts of the CUDA device one by one: streams, graphs, times, sleeps, dying processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest
from faking import DeviceRelay, Fake, Gate, Memory, compile_fake, cuda_crew, run_relays

from crews import forked, named, shared_files
from zbpipe import _native
from zbpipe.errors import ConfigError, StageError
from zbpipe.program import Programs, compile, virtual
from zbpipe.runtime.executor import Crew
from zbpipe.runtime.world import World
from zbpipe.schedule import build
from zbpipe.schedule.core import Action, Schedule

GRAPH = 4  # zb::Work::kGraph
ONE = World(1, (0,))
PROGRAMS = compile(build("zb_h1", 2, 4))


def two(programs: Programs = PROGRAMS, timeout: float = 30.0, **options):
    return cuda_crew(World(2, (0, 1)), programs, timeout, **options)


def test_lanes_are_streams_and_transfers_have_priority(fake):
    fake()
    crew, loaded = two()
    streams = [crew.executors[0].stream(i) for i in range(len(loaded.programs[0].lanes))]
    assert len({*streams}) == 3
    assert [crew.executors[0].stream(i) for i in range(3)] == streams
    crew.close()


def test_the_cpu_has_no_streams_and_no_graphs():
    board = _native.Board.create(1)
    executor = _native.Executor(board, 0, 30.0)
    with pytest.raises(RuntimeError, match="has no streams"):
        executor.stream(0)
    program = _native.Program(1, [(0, GRAPH, -1, -1, 7, 0, "F", 0, [], False)])
    assert _native.run(board, 0, [(executor, program, None)], 10**9) is False
    assert "the CPU launches no graphs" in board.failure()[-1]
    executor.stop()


def test_a_graph_instruction_launches_on_its_lanes_stream(fake):
    device = fake()
    crew = Crew(ONE, 30.0, devices={0: 0})
    crew.connect({})
    made, doubled = device.malloc(4096), device.malloc(4096)
    exec_ = device.graph("graph", [Memory(made, 4096, 5)], [Memory(doubled, 4096, 6)])
    rows = [
        (0, 0, -1, -1, 0, 0, "F", 0, [], False),
        (0, GRAPH, -1, -1, exec_, 0, "I", 0, [], True),
        (1, 0, -1, -1, 0, 0, "W", 0, [1], False),
    ]
    streams = [crew.executors[0].stream(lane) for lane in (0, 1)]

    def callback(index: int) -> bool:
        if index == 0:
            device.kernel(streams[0], "make", [], [Memory(made, 4096, 5)])
        else:
            device.kernel(streams[1], "read", [Memory(doubled, 4096, 6)], [])
        return True

    program = _native.Program(2, rows)
    assert _native.run(crew.board, 0, [(crew.executors[0], program, callback)], 10**9)
    crew.close()
    assert device.reports() == []


def test_a_run_begins_after_the_stream_it_is_told_to(fake):
    device = fake()
    crew, loaded = cuda_crew(ONE, compile(build("gpipe", 1, 1)))
    stream = ctypes.c_void_p()
    assert device.lib.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    batch = Memory(device.malloc(4096), 4096, 3)

    def read(index: int) -> None:
        device.kernel(crew.executors[0].stream(0), "read", [batch], [])

    device.kernel(stream.value, "load", [], [batch], us=500)
    crew.cuda[0].after(stream.value)
    crew.run(loaded, {0: read})
    assert device.reports() == []
    device.kernel(stream.value, "load", [], [batch], us=500)
    crew.run(loaded, {0: read})
    crew.close()
    assert any(report.startswith("race") for report in device.reports())


def test_sleeps_and_times_are_the_devices(fake):
    device = fake(32)
    seconds = {"F": 0.004, "I": 0.003, "W": 0.002}
    slept = virtual(PROGRAMS, lambda a: seconds[a.kind], lambda _: 100_000)
    crew, loaded = two(slept)
    for _ in range(2):
        crew.run(loaded, {0: None, 1: None})
    timeline = crew.timeline(loaded, "virtual")
    assert len(timeline.spans) == sum(len(p.instructions) for p in slept.ranks)
    ends = {(s.rank, s.lane, s.action): s.end for s in timeline.spans}
    slack = 20e-6  # single-precision milliseconds, and two clocks put side by side
    latest: dict[tuple[int, str], float] = {}
    for span in timeline.spans:
        assert latest.get((span.rank, span.lane), 0.0) <= span.start <= span.end
        latest[span.rank, span.lane] = span.end
        if span.lane == "compute":
            assert span.end - span.start >= seconds[span.action.kind] - slack
        elif span.lane.startswith("send"):
            assert span.start >= ends[span.rank, "compute", span.action] - slack
    crew.close()
    assert device.reports() == []


def test_a_message_that_outgrows_its_slot_costs_no_wait_within_the_step(fake):
    device = fake()
    crew, loaded = two()
    run_relays(device, crew, loaded, range(1), smallest=1000, largest=2000)
    before = device.blocking()
    run_relays(device, crew, loaded, range(1, 2), smallest=3 << 20, largest=3 << 20)
    assert device.blocking() == before
    run_relays(device, crew, loaded, range(2, 3), smallest=1000, largest=2000)
    assert device.blocking() > before  # what was outgrown is freed between steps
    crew.close()
    assert device.reports() == []


ROWS = tuple(tuple(Action(stage, "F", i) for i in range(9)) for stage in range(2))
FORWARD = compile(Schedule(ROWS, 9, (0, 1)), forward_only=True)


class Growing(DeviceRelay):
    """Each message is larger than all before it, so that slots grow while they are in use."""

    def size(self, action: Action) -> int:
        return (1 << 20) * (1 + action.microbatch)


def growing(world: World, device: Fake) -> None:
    """The device stands still until all is enqueued: nothing outgrown may be given back before."""
    crew, loaded = cuda_crew(world, FORWARD)
    gate = Gate(device)
    left = [sum(i.lane == 0 for p in loaded.programs.values() for i in p.instructions)]

    def count(relay: DeviceRelay) -> None:
        left[0] -= 1
        if left[0] == 0:
            gate.open()

    relays = {
        rank: Growing(device, crew, loaded, rank, 0, 1, after=count) for rank in crew.executors
    }
    for executor in crew.executors.values():
        gate.hold(executor.stream(0))
    crew.run(loaded, {rank: relay.begin(0) for rank, relay in relays.items()})
    crew.run(loaded, {rank: relay.begin(1) for rank, relay in relays.items()})
    crew.close()
    world.gather(None)
    assert device.reports() == []


@pytest.mark.parametrize("connections", [1, 8])
def test_slots_grow_while_the_device_stands_still(fake, connections):
    growing(World(2, (0, 1)), fake(connections))
    for outcome in forked(growing, 2, fake(connections)):
        outcome.get()


@pytest.mark.parametrize(
    ("device", "cause"), [(2, "no CUDA device 2: this process sees 2"), (-1, "no CUDA device -1")]
)
def test_a_device_that_is_not_there_is_refused(fake, device, cause):
    fake()
    with pytest.raises(RuntimeError, match=cause):
        _native.cuda.Device(_native.Board.create(1), 0, device)


def test_without_a_runtime_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setenv("ZBPIPE_CUDART", "/nowhere/libcudart.so")
    with pytest.raises(RuntimeError, match=r"set ZBPIPE_CUDART.*tried: /nowhere"):
        _native.cuda.Device(_native.Board.create(1), 0, 0)


def test_the_runtime_that_is_loaded_already_is_taken(tmp_path):
    library = compile_fake(tmp_path, "-Wl,-soname,libcudart.so.12")
    code = (
        f"import ctypes; held = ctypes.CDLL({str(library)!r}); from zbpipe import _native; "
        "probe = _native.cuda.probe(); print(probe['library'], len(probe['devices']))"
    )
    settings = {name: value for name, value in os.environ.items() if name != "ZBPIPE_CUDART"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=True
    )
    assert done.stdout == "libcudart.so.12 2\n"


def test_links_and_programs_must_fit(fake):
    fake()
    board = _native.Board.create(2)
    device = _native.cuda.Device(board, 0, 0)
    executor = _native.Executor(board, 0, 30.0, device)
    executor.add_sender(_native.Sender(2))
    program = _native.Program(1, [(0, 2, 0, 0, 8, 0, "F", 0, [], False)])
    with pytest.raises(RuntimeError, match="a link or a slot that is not there"):
        _native.run(board, 0, [(executor, program, None)], 10**9)
    with pytest.raises(RuntimeError, match="at least one slot"):
        _native.cuda.IpcOut(board, 0, 1, 0)
    with pytest.raises(RuntimeError, match="peer is not on the board"):
        _native.cuda.IpcOut(board, 0, 2, 1)
    executor.stop()


def test_waits_flush_remote_writes_where_the_device_can(fake, monkeypatch):
    monkeypatch.setenv("ZBPIPE_FAKE_FLUSH", "1")
    device = fake()
    crew, loaded = two()
    run_relays(device, crew, loaded, range(2))
    crew.close()
    assert device.reports() == []


def mixed(world: World) -> None:
    Crew(world, 30.0, devices={1: 0} if world.rank == 1 else None)


def test_ranks_on_cuda_and_on_the_cpu_are_not_mixed(fake):
    fake()
    for outcome in forked(mixed, 2):
        assert "rank 1 is on CUDA, rank 0 is not" in str(outcome.error)
    with pytest.raises(ConfigError, match=r"devices = \{0: 0\}: want a CUDA device for each"):
        Crew(World(2, (0, 1)), 30.0, devices={0: 0})


def ahead(world: World, device: Fake) -> None:
    """Rank 1's last action ends only when rank 0 is through with the step."""
    crew, loaded = cuda_crew(world, PROGRAMS)
    run_relays(device, crew, loaded, range(2))
    if world.rank == 0:
        run_relays(device, crew, loaded, range(2, 3))
        world.peers[1][1].send("through")
        run_relays(device, crew, loaded, range(3, 4))
    else:
        gate = Gate(device)

        def wait() -> None:
            world.peers[0][0].recv()
            gate.open()

        def hold(action: Action) -> None:
            if action == Action(1, "W", 3):
                gate.hold(crew.executors[1].stream(0))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        run_relays(device, crew, loaded, range(2, 3), at=hold)
        thread.join()
        run_relays(device, crew, loaded, range(3, 4))
    crew.close()
    world.gather(None)
    assert device.reports() == []


def test_there_is_no_barrier_between_steps(fake):
    # A queue a stream: behind the gate, a queue that streams share would hold up more than W.
    for outcome in forked(ahead, 2, fake(8)):
        outcome.get()


def killed(world: World, device: Fake) -> None:
    crew, loaded = cuda_crew(world, PROGRAMS)
    run_relays(device, crew, loaded, range(2))
    world.gather(None)
    where = Action(1, "I", 1)

    def die(action: Action) -> None:
        if action == where:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=die)
    named(caught.value, 1, where, "died")
    crew.close()


@pytest.mark.parametrize("connections", [1, 8])
def test_a_killed_process_is_named_and_the_others_streams_run_out(fake, connections):
    first, second = forked(killed, 2, fake(connections))
    first.get()
    assert second.exitcode == -signal.SIGKILL


def test_streams_that_do_not_run_out_are_left_alone(fake):
    """After an abort a kernel that never ends must not be waited for, nor its memory given back."""
    device = fake()
    files = shared_files()
    crew, loaded = two(timeout=0.8)
    run_relays(device, crew, loaded, range(2))
    gate = Gate(device)
    frees = device.calls("cudaFree")
    streams = [executor.stream(i) for executor in crew.executors.values() for i in range(3)]

    def hang(action: Action) -> None:
        if action == Action(0, "F", 1):
            gate.hold(crew.executors[0].stream(0))

    with pytest.raises(StageError):
        run_relays(device, crew, loaded, range(2, 3), at=hang)
    crew.close()
    assert device.calls("cudaFree") == frees
    assert shared_files() == files
    gate.open()
    device.settle(streams)


def test_an_action_that_waits_for_the_device_is_let_go_on_after_an_abort(fake):
    """Rank 0's callback synchronises with its stream, which waits for a kernel that never ends."""
    device = fake()
    crew, loaded = two(compile(build("1f1b", 2, 3)), timeout=0.8)
    run_relays(device, crew, loaded, range(2))
    gate = Gate(device)
    streams = [executor.stream(i) for executor in crew.executors.values() for i in range(3)]
    returned = []

    def at(action: Action) -> None:
        if action == Action(1, "B", 0):
            gate.hold(crew.executors[1].stream(0))

    def wait(relay: DeviceRelay) -> None:
        if relay.rank == 0 and relay.order[-1] == Action(0, "B", 0):
            device.settle([relay.stream])
            returned.append(relay.rank)

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=at, after=wait)
    assert caught.value.rank in (0, 1)
    assert returned == [0]
    gate.open()
    device.settle(streams)
    crew.close()


def test_a_run_may_come_after_several_streams(fake):
    device = fake()
    crew, loaded = cuda_crew(ONE, compile(build("gpipe", 1, 1)))
    batches = [Memory(device.malloc(4096), 4096, 3 + i) for i in range(2)]
    for batch in batches:
        stream = ctypes.c_void_p()
        assert device.lib.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        device.kernel(stream.value, "load", [], [batch], us=300)
        crew.cuda[0].after(stream.value)
    crew.run(loaded, {0: lambda _: device.kernel(crew.executors[0].stream(0), "read", batches, [])})
    crew.close()
    assert device.reports() == []


def test_a_crew_gives_everything_back(fake):
    device = fake()
    held = device.calls("cudaMalloc") - device.calls("cudaFree")
    crew, loaded = two(virtual(PROGRAMS, lambda _: 0.0, lambda _: 5000))
    for _ in range(3):
        crew.run(loaded, {0: None, 1: None})
    assert device.calls("cudaMalloc") - device.calls("cudaFree") > held
    crew.close()
    assert device.calls("cudaMalloc") - device.calls("cudaFree") == held
    assert device.reports() == []
