"""The fake CUDA device for tests: build it, look at what it found, and relay messages over it."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import random
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from zbpipe.program import Programs
from zbpipe.runtime.executor import Crew, Loaded
from zbpipe.runtime.world import World
from zbpipe.schedule.core import Action

SOURCES = Path(__file__).parent / "fake"

# Fault kinds, as in fake/process.hpp.
WAIT_VALUE, WAIT_EVENT, EARLY_RECORD, EARLY_WRITE = 0, 1, 2, 3
# What threads of the host see in vain.
FLAGS, TAKEN = 1, 2


def compile_fake(folder: Path, *flags: str) -> Path:
    """Compile the fake libcudart into `folder`; raises with the compiler's words."""
    out = folder / "libfakecudart.so"
    # Its calls are its own (-Bsymbolic), also where torch has loaded a real runtime for all.
    base = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-Wl,-Bsymbolic", "-pthread"]
    base += ["-Wall", "-Wextra"]
    sources = sorted(map(str, SOURCES.glob("*.cpp")))
    done = subprocess.run(
        [os.environ.get("CXX", "c++"), *base, *flags, *sources, "-o", str(out)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out


class _Span(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("pattern", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Memory:
    """Device memory with known contents. `owner` keeps it from being used for anything else."""

    data: int
    nbytes: int
    pattern: int
    owner: Any = None


class Fake:
    """The fake's own functions, and those of CUDA that a test needs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended = False  # by the test's end: memory that is collected later is none of its

    @cached_property
    def lib(self) -> ctypes.CDLL:
        lib = ctypes.CDLL(str(self.path))
        lib.fake_graph.restype = ctypes.c_void_p
        return lib

    def kernel(
        self, stream: int, name: str, reads: Sequence[Memory], writes: Sequence[Memory], us: int = 0
    ) -> None:
        arrays = (_spans(reads), len(reads), _spans(writes), len(writes))
        self.lib.fake_kernel(ctypes.c_void_p(stream), name.encode(), *arrays, us)

    def graph(self, name: str, reads: Sequence[Memory], writes: Sequence[Memory]) -> int:
        """A cudaGraphExec_t of one kernel."""
        arrays = (_spans(reads), len(reads), _spans(writes), len(writes))
        return int(self.lib.fake_graph(name.encode(), *arrays))

    def fault(self, stream: int, kind: int, call: int) -> None:
        """The stream's `call`-th call of that kind from now on misbehaves; -2: all do."""
        self.lib.fake_fault(ctypes.c_void_p(stream), kind, call)

    def blind(self, what: int) -> None:
        """From now on the host's threads see flags, or that memory is free, in vain; 0: again."""
        self.lib.fake_blind(what)

    def malloc(self, nbytes: int) -> int:
        out = ctypes.c_void_p()
        assert self.lib.cudaMalloc(ctypes.byref(out), ctypes.c_size_t(nbytes)) == 0
        assert out.value is not None
        return out.value

    def hold(self, data: int, home: int) -> None:
        """The host holds `data` (home 0), or leaves it to the stream `home`."""
        if not self.ended:
            self.lib.fake_hold(ctypes.c_void_p(data), ctypes.c_void_p(home))

    def settle(self, streams: Sequence[int]) -> None:
        """Wait until nothing is left in the streams."""
        for stream in streams:
            assert self.lib.cudaStreamSynchronize(ctypes.c_void_p(stream)) == 0

    def calls(self, name: str) -> int:
        return int(self.lib.fake_calls(name.encode()))

    def blocking(self) -> int:
        """Calls so far that may make the host wait for the device."""
        names = ("cudaFree", "cudaIpcCloseMemHandle", "cudaHostUnregister", "cudaStreamSynchronize")
        return sum(map(self.calls, names))

    def reports(self) -> list[str]:
        out = ctypes.create_string_buffer(1 << 16)
        self.lib.fake_reports(out, len(out) - 1)
        return out.value.decode().splitlines()


def threads() -> list[str]:
    """Names of zbpipe's Python threads in this process."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("zbpipe"))


def _spans(memories: Sequence[Memory]) -> Any:
    spans = [_Span(m.data, m.nbytes, m.pattern) for m in memories]
    return (_Span * max(len(spans), 1))(*spans)


_KEPT: list[mmap.mmap] = []  # a stream may look at a gate's word after its test has failed


class Gate:
    """A word that streams wait for until `open`."""

    def __init__(self, fake: Fake) -> None:
        self._fake = fake
        fd = os.memfd_create("gate")
        os.ftruncate(fd, mmap.PAGESIZE)
        _KEPT.append(mmap.mmap(fd, mmap.PAGESIZE))
        os.close(fd)
        self._word = ctypes.c_uint32.from_buffer(_KEPT[-1])
        at = ctypes.c_void_p(ctypes.addressof(self._word))
        device = ctypes.c_void_p()
        assert fake.lib.cudaHostRegister(at, ctypes.c_size_t(mmap.PAGESIZE), 3) == 0
        assert fake.lib.cudaHostGetDevicePointer(ctypes.byref(device), at, 0) == 0
        self._device = ctypes.c_uint64(device.value or 0)

    def hold(self, stream: int) -> None:
        wait = self._fake.lib.cuStreamWaitValue32_v2
        assert wait(ctypes.c_void_p(stream), self._device, ctypes.c_uint32(1), 0) == 0

    def open(self) -> None:
        self._word.value = 1


class Pool:
    """A caching allocator of one stream: a block that nobody holds is handed out again at once."""

    def __init__(self, fake: Fake, stream: int) -> None:
        self._fake, self._stream = fake, stream
        self._free: dict[int, list[int]] = {}

    def take(self, nbytes: int, pattern: int) -> Memory:
        size = max(4096, 1 << (nbytes - 1).bit_length()) if nbytes else 4096
        free = self._free.setdefault(size, [])
        data = free.pop() if free else self._fake.malloc(size)
        self._fake.hold(data, 0)
        return Memory(data, nbytes, pattern, _Block(self._fake, self._stream, free, data))


class _Block:
    def __init__(self, fake: Fake, stream: int, home: list[int], data: int) -> None:
        self._fake, self._stream, self._home, self._data = fake, stream, home, data

    def __del__(self) -> None:
        self._fake.hold(self._data, self._stream)
        self._home.append(self._data)


def cuda_crew(
    world: World,
    programs: Programs,
    timeout: float = 30.0,
    poison: bool = True,
    transport: str | None = None,
) -> tuple[Crew, Loaded]:
    """Ranks on the fake device: rank r of a process on device r % 2."""
    forced = {} if transport is None else dict.fromkeys(programs.slots, transport)
    crew = Crew(world, timeout, poison, {rank: rank % 2 for rank in world.local}, forced)
    crew.connect(programs.slots)
    return crew, crew.load(programs)


@dataclass
class DeviceRelay:
    """One rank's actions as kernels that declare what they read and write, on the lane's stream.

    Sizes, contents and who passes on the very memory it received follow from (seed, run, action).
    A stage keeps its input until W, and its output's gradient from I until W, as split layers do.
    """

    fake: Fake
    crew: Crew
    loaded: Loaded
    rank: int
    seed: int
    largest: int
    hold: bool = True
    us: int = 0
    smallest: int = 0  # bytes of a result that is not passed on
    passes: float = 0.3  # how often an action's result is the memory that it was given
    at: Callable[[Action], None] | None = None  # called in every action, before it enqueues
    after: Callable[[DeviceRelay], None] | None = None  # called when it has enqueued
    order: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.program = self.loaded.programs[self.rank]
        self.executor = self.crew.executors[self.rank]
        self.stream = self.executor.stream(0)
        self.pool = Pool(self.fake, self.stream)
        self.weights: dict[int, Memory] = {}
        # In evaluation I only passes something on, and nothing is kept after F.
        self.keeps = any(i.action.kind in "WB" for i in self.program.instructions)

    def begin(self, run: int) -> DeviceRelay:
        self.run = run
        self.order = []
        self.sending: list[tuple[int, Memory]] = []
        self.handed: dict[Action, Memory] = {}
        self.inputs: dict[tuple[int, int], Memory] = {}
        self.grads: dict[tuple[int, int], Memory] = {}
        return self

    def __call__(self, index: int) -> None:
        action = self.program.instructions[index].action
        self.order.append(action)
        if self.hold:
            self.sending = [s for s in self.sending if not self.executor.finished(s[0])]
        if self.at is not None:
            self.at(action)
        {"F": self._forward, "I": self._backward, "B": self._backward, "W": self._weight}[
            action.kind
        ](index, action)
        if self.after is not None:
            self.after(self)

    def _forward(self, index: int, action: Action) -> None:
        source = Action(action.stage - 1, "F", action.microbatch)
        given = self._take(index, [source])
        reads = [] if given is None else [given]
        if given is not None and self.keeps:
            self.inputs[action.stage, action.microbatch] = given
        self._pass_on(index, action, reads, given)

    def _backward(self, index: int, action: Action) -> None:
        place = (action.stage, action.microbatch)
        sources = [Action(action.stage + 1, kind, action.microbatch) for kind in "IB"]
        grad = self._take(index, sources)
        kept = self.inputs.get(place)
        reads = [m for m in (grad, kept) if m is not None]
        self._pass_on(index, action, reads, kept if kept and action.microbatch % 2 else grad)
        if grad is not None and self.keeps:
            self.grads[place] = grad
        if action.kind == "B":
            self._weight(index, action)

    def _weight(self, index: int, action: Action) -> None:
        place = (action.stage, action.microbatch)
        reads = [m for m in (self.inputs.pop(place, None), self.grads.pop(place, None)) if m]
        sum_ = self.weights.setdefault(action.stage, self.pool.take(4096, 1 + action.stage))
        self.fake.kernel(self.stream, str(action), reads, [sum_], self.us)

    def _take(self, index: int, sources: list[Action]) -> Memory | None:
        need = self.program.needs.get(index)
        if need is None:
            found = [self.handed.pop(s) for s in sources if s in self.handed]
            return found[0] if found else None
        receive = self.program.instructions[need]
        assert receive.action in sources
        header, slot = self.executor.message(receive.channel, receive.slot)
        run, action, nbytes, pattern = pickle.loads(header)
        assert (run, action, nbytes) == (self.run, tuple(receive.action), slot.nbytes)
        interface = slot.__cuda_array_interface__
        assert interface["data"] == (slot.data, False)
        assert interface["shape"] == (nbytes,)
        return Memory(slot.data, nbytes, pattern)

    def size(self, action: Action) -> int:
        """Bytes of the action's result."""
        chance = random.Random(repr([self.seed, self.run, action]))
        edges = [0, 1, 63, 64, 65, 4096, 65_537, self.largest]
        return max(self.smallest, chance.choice([*edges, chance.randrange(self.largest + 1)]))

    def _pass_on(
        self, index: int, action: Action, reads: list[Memory], passed: Memory | None
    ) -> None:
        key = [self.seed, self.run, *map(str, action)]
        chance = random.Random(repr(key))
        nbytes = self.size(action)
        pattern = chance.randrange(1, 1 << 62)
        if passed is not None and chance.random() < self.passes:
            result = passed  # the very memory, as an identity layer's output
            self.fake.kernel(self.stream, str(action), reads, [], self.us)
        else:
            result = self.pool.take(nbytes, pattern)
            self.fake.kernel(self.stream, str(action), reads, [result], self.us)
        send = self.program.sends.get(index)
        if send is None:
            self.handed[action] = result
            return
        header = pickle.dumps((self.run, tuple(action), result.nbytes, result.pattern))
        cut = chance.randrange(result.nbytes + 1)
        pieces = [(result.data, cut, 0), (result.data + cut, result.nbytes - cut, cut)]
        self.executor.post(send, header, [p for p in pieces if p[1]], result.nbytes)
        if self.hold:
            self.sending.append((send, result))


def run_relays(
    fake: Fake,
    crew: Crew,
    loaded: Loaded,
    runs: range,
    seed: int = 0,
    largest: int = 70_000,
    hold: bool = True,
    **hooks: Any,
) -> None:
    """Some runs of relays on every rank of this process; each must keep to its order."""
    relays = {
        r: DeviceRelay(fake, crew, loaded, r, seed, largest, hold, **hooks) for r in crew.executors
    }
    for run in runs:
        crew.run(loaded, {rank: relay.begin(run) for rank, relay in relays.items()})
        for rank, relay in relays.items():
            actions = [i.action for i in loaded.programs[rank].instructions if i.lane == 0]
            assert relay.order == actions
