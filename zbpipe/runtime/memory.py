"""Measured memory: the distinct live storages that a rank's unfinished microbatches hold.

Nothing here is derived from the planner's formula. What autograd saves is counted through
saved_tensors_hooks, from when it is saved until autograd lets go of it; what waits for W is read
off the Deferred entries. Parameters and buffers do not count.

And freed memory: `keep_freed_memory` lets the C library hold on to it between microbatches.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..model.split import Deferred

# Just under the largest block that glibc lets its thresholds adapt to (32 MiB: mallopt(3),
# M_MMAP_THRESHOLD).
_ADAPTS_TO = 31 << 20


def keep_freed_memory() -> None:
    """Let malloc keep up to 62 MiB of freed heap instead of 256 KiB, unless the user set that.

    A pipeline frees a microbatch's activations in one action and allocates as much in the next. At
    glibc's first thresholds that memory goes back to the system in between and is faulted in again
    page by page: 3000 to 6000 faults and 2 to 4 % of the CPU time of a step of the GPT in bench/.
    glibc adapts the thresholds to the largest block that was ever freed, so one is enough. Blocks
    above that size keep coming from the system.
    """
    torch.empty(_ADAPTS_TO, dtype=torch.uint8)  # its pages are never touched


class Meter:
    """Bytes held now, and a staircase of them over time, of one rank in one step.

    `allocations` also follows every tensor that an action makes, for what it needs only while it
    runs: slow, for trial runs.
    """

    def __init__(self, ignored: Iterable[torch.Tensor], allocations: bool = False) -> None:
        """`ignored`: parameters and buffers of the rank's stages."""
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._live: dict[int, list[int]] = {}  # storage → [holders, bytes]
        self._allocations = Allocations() if allocations else None
        self.held = 0
        # After each action: the bytes held, and those that it needed on top while it ran.
        self.curve: list[tuple[float, float]] = []
        self.transients: list[float] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what autograd saves inside, for as long as autograd keeps it."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            if self._allocations is None:
                yield
            else:
                with self._allocations:
                    yield

    def _pack(self, tensor: torch.Tensor) -> Held:
        # Detached: a node that saves its own output would else keep itself alive.
        return Held(self, tensor.detach())

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count `storage` once more; Held does it."""
        if storage._cdata in self._ignored:
            return
        entry = self._live.setdefault(storage._cdata, [0, storage.nbytes()])
        if entry[0] == 0:
            self.held += entry[1]
        entry[0] += 1

    def drop(self, storage: torch.UntypedStorage) -> None:
        """Undo one `hold`."""
        entry = self._live.get(storage._cdata)
        if entry is None:
            return
        entry[0] -= 1
        if entry[0] == 0:
            self.held -= entry[1]
            del self._live[storage._cdata]

    def stash(self, entry: Deferred) -> list[Held]:
        """Count what `entry` keeps for W, as long as the caller keeps the answer."""
        return [
            Held(self, torch.empty(0, dtype=torch.uint8, device=s.device).set_(s))
            for s in entry.storages()
        ]

    def sample(self) -> None:
        """An action has ended: add the bytes held now to the curve."""
        self.curve.append((time.monotonic(), float(self.held)))
        if self._allocations is not None:
            self.transients.append(float(self._allocations.lap()))


class Held:
    """A tensor that counts in a Meter while this object lives."""

    __slots__ = ("meter", "storage", "tensor")

    def __init__(self, meter: Meter, tensor: torch.Tensor) -> None:
        self.meter = meter
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        meter.hold(self.storage)

    def __del__(self) -> None:
        self.meter.drop(self.storage)


def _unpack(held: Held) -> torch.Tensor:
    return held.tensor


class Allocations(TorchDispatchMode):
    """Follows the storages of all tensors that operators make: bytes live now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, Any] = {}
        self._live = self._peak = self._start = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "zbpipe":
            from zbpipe.kernels import dispatch

            with self:  # what our operators allocate inside counts as it would without them
                return getattr(dispatch, func._opname)(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self._live -= size

        self._known[key] = weakref.ref(storage, gone)
        self._live += size
        self._peak = max(self._peak, self._live)

    def lap(self) -> int:
        """Bytes at the worst moment since the last lap, over both its ends."""
        over = self._peak - max(self._start, self._live)
        self._start = self._peak = self._live
        return over
