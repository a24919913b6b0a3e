"""How runs end whose payloads go through host memory: errors, lost peers, and what they leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from beside import beside
from faking import DeviceRelay, Fake, Gate, cuda_crew, run_relays, threads

from crews import forked, named, shared_files
from replaying import make
from zbpipe.errors import ConfigError, StageError
from zbpipe.program import compile
from zbpipe.runtime.executor import Crew, Loaded
from zbpipe.runtime.link import Link
from zbpipe.runtime.world import World
from zbpipe.schedule.core import Action, Schedule

PROGRAMS = compile(make("1f1b", 3, 4))
WHERE = Action(1, "F", 1)


def apart(world: World, timeout: float = 30.0, transport: str = "tcp") -> tuple[Crew, Loaded]:
    """Each rank on a host of its own."""
    os.environ["ZBPIPE_HOST"] = f"host {world.rank}"
    return cuda_crew(world, PROGRAMS, timeout, transport=transport)


def nothing_is_left(device: Fake) -> None:
    """What was let go by an abort finds anything in its memory, but its memory is there."""
    assert device.calls("cudaHostRegister") == device.calls("cudaHostUnregister")
    assert threads() == shared_files() == []
    expected = ("wrong contents: ", "race: ")
    assert [report for report in device.reports() if not report.startswith(expected)] == []


def boom(action: Action) -> None:
    if action == WHERE:
        raise ValueError("boom")


def failing(world: World, device: Fake) -> None:
    crew, loaded = apart(world)
    run_relays(device, crew, loaded, range(2))
    world.gather(None)  # a rank may be a step ahead, and fail while another ends the last one
    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=boom)
    named(caught.value, 1, WHERE, "ValueError: boom")
    crew.close()
    nothing_is_left(device)


@pytest.mark.parametrize("connections", [1, 8])
def test_an_exception_reaches_separate_ranks_and_the_streams_run_out(fake, connections):
    for outcome in forked(failing, 3, fake(connections, jitter=60)):
        outcome.get()


def test_an_exception_reaches_local_ranks_and_the_streams_run_out(fake, monkeypatch):
    device = fake(1)
    crew, loaded = beside(PROGRAMS, monkeypatch)
    run_relays(device, crew, loaded, range(2))
    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=boom)
    named(caught.value, 1, WHERE, "ValueError: boom")
    crew.close()
    nothing_is_left(device)


def killed(world: World, device: Fake) -> None:
    crew, loaded = apart(world)
    run_relays(device, crew, loaded, range(2))
    world.gather(None)

    def die(action: Action) -> None:
        if world.rank == 1 and action == WHERE:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=die)
    assert caught.value.rank == 1
    crew.close()
    nothing_is_left(device)


def test_a_killed_peer_is_named(fake):
    first, _, last = forked(killed, 3, fake(8))
    first.get()
    last.get()


def test_a_buffer_that_was_outgrown_stays_as_long_as_a_carrier_is_at_it(fake, monkeypatch) -> None:
    """The host has enqueued a larger message in the slot, and an error ends the run meanwhile."""
    device = fake(8)
    programs = compile(make("forward_only", 2, 8), forward_only=True)
    slots = programs.slots[0, 1]
    crew, loaded = beside(programs, monkeypatch)
    small = [1000] * slots + [100_000] * slots
    monkeypatch.setattr(DeviceRelay, "size", lambda self, action: small[action.microbatch])
    links = crew._meeting.links
    sends, receives = links[0].outgoing[-1].stream, links[1].incoming[-1].stream
    real_send, real_receive = sends.send, receives.receive_payload
    begun, ended = threading.Event(), threading.Event()

    def send(*parts: Any) -> None:
        real_send(parts[0])
        if len(parts) > 1:
            assert ended.wait(20)
            real_send(*parts[1:])

    def receive(into: Any) -> None:
        begun.set()
        real_receive(into)

    monkeypatch.setattr(sends, "send", send)
    monkeypatch.setattr(receives, "receive_payload", receive)
    # The other host is slow to hear of the error: no stream is severed before executors stop.
    monkeypatch.setattr(Link, "_warn", lambda self: ended.wait(20))

    def fail(action: Action) -> None:
        if action == Action(1, "F", slots + 1):
            assert begun.wait(20)
            raise ValueError("boom")

    with pytest.raises(StageError):
        run_relays(device, crew, loaded, range(1), at=fail, passes=0.0)
    for executor in crew.executors.values():
        executor.stop()
    ended.set()
    crew.close()
    nothing_is_left(device)


def lost_after_its_step(world: World, device: Fake) -> StageError | None:
    """Rank 1 is through with its step, and dies before its last payloads have been carried off."""
    os.environ["ZBPIPE_HOST"] = f"host {world.rank}"
    crew, loaded = cuda_crew(world, compile(make("1f1b", 2, 2)), 3.0, transport="tcp")
    sizes = {"smallest": 1000}
    run_relays(device, crew, loaded, range(1), **sizes)
    if world.rank == 1:
        (link,) = crew._meeting.links.values()
        stream = link.outgoing[-1].stream
        stream.send = lambda *_: time.sleep(60)
    world.gather(None)
    caught = None
    try:
        run_relays(device, crew, loaded, range(1, 2), **sizes)
        os.kill(os.getpid(), signal.SIGKILL)
    except StageError as error:
        caught = error
    crew.close()
    return caught


def test_a_peer_that_dies_with_payloads_on_their_way_is_named(fake) -> None:
    waits, dead = forked(lost_after_its_step, 2, fake(8))
    assert dead.exitcode == -signal.SIGKILL
    error = waits.get()
    assert error.rank == 1
    assert "on another host, died, or the connection to it broke" in error.cause


def severed(world: World, device: Fake, side: int) -> str:
    """The connection breaks by which rank 0 sends payloads to rank 1, as seen from `side`."""
    crew, loaded = apart(world)
    run_relays(device, crew, loaded, range(2))
    world.gather(None)

    def cut(action: Action) -> None:
        if world.rank == side and action == Action(side, "F", 1):
            link = crew._meeting.links[1 - side]
            _, payloads = link.outgoing if side == 0 else link.incoming
            payloads.stream.sever()

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=cut)
    crew.close()
    nothing_is_left(device)
    return caught.value.cause


@pytest.mark.parametrize("side", [0, 1])
def test_a_connection_of_payloads_that_breaks_alone_is_named(fake, side):
    for outcome in forked(severed, 3, fake(8), side):
        assert "the connection from rank 0 to rank 1 broke" in outcome.get()


def stuck(world: World, device: Fake) -> None:
    crew, loaded = apart(world, timeout=1.0)
    run_relays(device, crew, loaded, range(2))
    gate = Gate(device)

    def hang(action: Action) -> None:
        if action == WHERE:
            gate.hold(crew.executors[1].stream(0))

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=hang)
    named(caught.value, 1, WHERE, "does not return")
    before = device.calls("cudaHostUnregister")
    crew.close()
    # What the device may still use stays where it does not run out, and only there.
    kept = device.calls("cudaHostRegister") - device.calls("cudaHostUnregister") - 1  # the gate's
    assert (kept == 0) == (world.rank != 1)
    assert world.rank != 1 or device.calls("cudaHostUnregister") == before
    assert threads() == []
    gate.open()


def test_an_action_that_hangs_on_the_device_is_named(fake):
    for outcome in forked(stuck, 3, fake(8)):
        outcome.get()


def late(world: World, device: Fake) -> None:
    """Rank 0 is through, and closes, while rank 1's device stands still."""
    os.environ["ZBPIPE_HOST"] = f"host {world.rank}"
    rows = tuple(tuple(Action(stage, "F", i) for i in range(6)) for stage in range(2))
    programs = compile(Schedule(rows, 6, (0, 1)), forward_only=True)
    crew, loaded = cuda_crew(world, programs, transport="tcp")
    run_relays(device, crew, loaded, range(2))
    gate = Gate(device)
    (other,) = [peer for peer in world.peers if peer is not None]

    def open_late() -> None:
        assert other[0].poll(60) and other[0].recv() == "closes"
        time.sleep(0.3)
        gate.open()

    if world.rank == 1:
        gate.hold(crew.executors[1].stream(0))
        threading.Thread(target=open_late, daemon=True).start()
    run_relays(device, crew, loaded, range(2, 3))
    if world.rank == 0:
        other[1].send("closes")
    crew.close()
    assert device.calls("cudaHostRegister") == device.calls("cudaHostUnregister") + 1  # the gate's
    assert device.reports() == threads() == shared_files() == []


def test_what_was_sent_before_a_close_still_arrives(fake):
    for outcome in forked(late, 2, fake(8)):
        outcome.get()


def test_closed_while_peers_wait(fake):
    """A pipeline that never ran, and one that only one rank has left."""
    for outcome in forked(idle, 3, fake(8)):
        outcome.get()


def idle(world: World, device: Fake) -> None:
    crew, _ = apart(world)
    time.sleep(0.1 * world.rank)
    crew.close()
    nothing_is_left(device)


def on_the_cpu(world: World) -> None:
    forced = dict.fromkeys(PROGRAMS.slots, "nccl")
    crew = Crew(world, 30.0, forced=forced)
    with pytest.raises(
        ConfigError, match="= 'nccl': the ranks are on the CPU, want 'tcp' or 'torch'"
    ):
        crew.connect(PROGRAMS.slots)
    crew.close()


def test_nccl_is_for_cuda():
    for outcome in forked(on_the_cpu, 3):
        outcome.get()


def mailed(world: World, device: Fake, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=3)
    crew, loaded = apart(world, transport="torch")
    assert set(crew.transports().values()) == {"torch"}
    run_relays(device, crew, loaded, range(4), largest=300_000)
    assert device.reports() == []
    world.gather(None)
    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(4, 5), at=boom)
    named(caught.value, 1, WHERE, "ValueError: boom")
    crew.close()
    nothing_is_left(device)
    world.gather(None)
    dist.destroy_process_group()


def test_payloads_by_torch_distributed_and_an_exception(fake, tmp_path):
    for outcome in forked(mailed, 3, fake(8, jitter=60), str(tmp_path / "store")):
        outcome.get()
