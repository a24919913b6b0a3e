"""How runs end whose payloads go through host memory: errors, lost peers, and what they leave."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist
from beside import beside
from faking import Fake, Gate, cuda_crew, run_relays, threads

from crews import forked, named, shared_files
from replaying import make
from zbpipe.errors import ConfigError, StageError
from zbpipe.program import compile
from zbpipe.runtime.executor import Crew, Loaded
from zbpipe.runtime.world import World
from zbpipe.schedule.core import Action

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
    programs = compile(make("forward_only", 2, 6), forward_only=True)
    crew, loaded = cuda_crew(world, programs, transport="tcp")
    run_relays(device, crew, loaded, range(2))
    gate = Gate(device)
    if world.rank == 1:
        gate.hold(crew.executors[1].stream(0))
        threading.Timer(0.5, gate.open).start()
    run_relays(device, crew, loaded, range(2, 3))
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
