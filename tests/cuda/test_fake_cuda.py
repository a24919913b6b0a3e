"""The executor's CUDA side on the fake device: every family, local and by IPC, without a race."""

from __future__ import annotations

import threading

import pytest
from faking import Fake, Gate, cuda_crew, run_relays
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crews import forked, named
from replaying import make, only_forward
from zbpipe.errors import StageError
from zbpipe.program import Programs, compile
from zbpipe.runtime.world import World
from zbpipe.schedule.core import Action
from zbpipe.schedule.families import FAMILIES

NAMES = [*(name for name in FAMILIES if name != "dualpipe"), "v", "forward_only"]
SIZES = [(2, 3), (3, 7), (4, 8)]


def programs_of(name: str, ranks: int, microbatches: int) -> Programs:
    return compile(make(name, ranks, microbatches), forward_only=only_forward(name))


def rounded(name: str, ranks: int, microbatches: int) -> int:
    """Interleaved orders want a multiple of the ranks."""
    return -(-microbatches // ranks) * ranks if name.startswith("interleaved") else microbatches


def local(programs: Programs, timeout: float = 30.0):
    ranks = len(programs.ranks)
    return cuda_crew(World(ranks, tuple(range(ranks))), programs, timeout)


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_local_ranks_of_every_family_run_without_a_race(
    fake, name, ranks, microbatches, connections
):
    device = fake(connections, jitter=60, seed=ranks)
    crew, loaded = local(programs_of(name, ranks, rounded(name, ranks, microbatches)))
    assert set(crew.transports().values()) <= {"local"}
    run_relays(device, crew, loaded, range(3), seed=microbatches)
    crew.close()
    assert device.reports() == []


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([1, 2, 3, 8, 32]),
    st.sampled_from([0, 30, 300]),
    st.integers(0, 1 << 20),
    st.sampled_from([10, 100_000, 3 << 20]),
)
def test_any_size_of_anything_runs_without_a_race(
    fake, name, ranks, microbatches, connections, jitter, seed, largest
):
    device = fake(connections, jitter, seed)
    crew, loaded = local(programs_of(name, ranks, rounded(name, ranks, microbatches)))
    run_relays(device, crew, loaded, range(3), seed=seed, largest=largest)
    crew.close()
    assert device.reports() == []


def separate(world: World, device: Fake, name: str, microbatches: int, largest: int) -> list[str]:
    crew, loaded = cuda_crew(world, programs_of(name, world.size, microbatches))
    assert set(crew.transports().values()) == {"ipc"}
    run_relays(device, crew, loaded, range(4), seed=microbatches, largest=largest)
    crew.close()
    world.gather(None)  # reports of both
    return device.reports()


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_separate_ranks_of_every_family_run_without_a_race(fake, name, connections):
    device = fake(connections, jitter=60)
    for outcome in forked(separate, 2, device, name, 4, 70_000):
        assert outcome.get() == []


def test_more_separate_ranks(fake):
    device = fake(2, jitter=100)
    for outcome in forked(separate, 4, device, "zb_v", 8, 70_000):
        assert outcome.get() == []


@pytest.mark.parametrize("connections", [1, 8])
def test_slots_grow_between_separate_ranks(fake, connections):
    device = fake(connections)
    for outcome in forked(separate, 2, device, "zb_h1", 5, 5 << 20):
        assert outcome.get() == []


def test_slots_grow_between_local_ranks(fake):
    device = fake()
    crew, loaded = local(programs_of("zb_h2", 3, 5))
    run_relays(device, crew, loaded, range(6), largest=5 << 20)
    crew.close()
    assert device.reports() == []


@pytest.mark.parametrize("connections", [1, 8])
def test_a_whole_step_is_enqueued_while_the_device_stands_still(fake, connections):
    device = fake(connections)
    crew, loaded = local(programs_of("zb_h1", 3, 6))
    run_relays(device, crew, loaded, range(2))  # slots have their memory now
    gate = Gate(device)
    for executor in crew.executors.values():
        gate.hold(executor.stream(0))
    blocking = device.blocking()
    called = threading.Semaphore(0)
    failed: list[BaseException] = []

    def step() -> None:
        try:
            run_relays(device, crew, loaded, range(2, 3), after=lambda _: called.release())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    for _ in range(sum(map(actions, loaded.programs.values()))):
        assert called.acquire(timeout=20)
    assert thread.is_alive()
    gate.open()
    thread.join()
    assert failed == []
    assert device.blocking() == blocking
    crew.close()
    assert device.reports() == []


def actions(program) -> int:
    return sum(i.lane == 0 for i in program.instructions)


def test_programs_may_alternate(fake):
    device = fake()
    train, evaluate = programs_of("zb_h1", 3, 7), programs_of("forward_only", 3, 7)
    slots = {p: max(g.slots.get(p, 1) for g in (train, evaluate)) for p in train.slots}
    crew, _ = local(Programs(train.ranks, slots))
    for run in range(6):
        run_relays(device, crew, crew.load((train, evaluate)[run % 2]), range(run, run + 1))
    crew.close()
    assert device.reports() == []


def failing(world: World, device: Fake) -> list[str]:
    programs = programs_of("1f1b", world.size, 4)
    crew, loaded = cuda_crew(world, programs)
    run_relays(device, crew, loaded, range(2))
    world.gather(None)  # a rank may be a step ahead, and fail while another ends the last one
    where = Action(1, "F", 1)

    def fail(action: Action) -> None:
        if action == where:
            raise ValueError("boom")

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=fail)
    named(caught.value, 1, where, "ValueError: boom")
    crew.close()
    return []


@pytest.mark.parametrize("connections", [1, 8])
def test_an_exception_reaches_every_separate_rank_and_the_streams_run_out(fake, connections):
    for outcome in forked(failing, 3, fake(connections)):
        assert outcome.get() == []


def test_an_exception_reaches_local_ranks_and_the_streams_run_out(fake):
    failing(World(3, (0, 1, 2)), fake(1))


def test_an_action_that_hangs_on_the_device_is_named(fake):
    device = fake()
    crew, loaded = local(programs_of("1f1b", 2, 3), timeout=1.0)
    run_relays(device, crew, loaded, range(2))
    gate = Gate(device)
    stuck = Action(1, "F", 1)

    def hang(action: Action) -> None:
        if action == stuck:
            gate.hold(crew.executors[1].stream(0))

    with pytest.raises(StageError) as caught:
        run_relays(device, crew, loaded, range(2, 3), at=hang)
    named(caught.value, 1, stuck, "does not return")
    gate.open()
    device.settle([executor.stream(i) for executor in crew.executors.values() for i in range(3)])
    crew.close()
