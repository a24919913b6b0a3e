"""Measured memory: the distinct live storages that a rank's unfinished microbatches hold.

Nothing here is derived from the planner's formula. What autograd saves is counted through
saved_tensors_hooks, from when it is saved until autograd lets go of it; what waits for W is read
off the Deferred entries. Parameters and buffers do not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from ..model.split import Deferred


class Meter:
    """Bytes held now, and a staircase of them over time, of one rank in one step."""

    def __init__(self, ignored: Iterable[torch.Tensor]) -> None:
        """`ignored`: parameters and buffers of the rank's stages."""
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._live: dict[int, list[int]] = {}  # storage → [holders, bytes]
        self.held = 0
        self._peak = 0
        # After each action: the bytes held, and the most that were held while it ran.
        self.curve: list[tuple[float, float]] = []
        self.peaks: list[float] = []

    def watch(self) -> AbstractContextManager[None]:
        """Count what autograd saves inside, for as long as autograd keeps it."""
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, _unpack
        )
        return hooks

    def _pack(self, tensor: torch.Tensor) -> Held:
        # Detached: a node that saves its own output would else keep itself alive.
        return Held(self, tensor.detach())

    def hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._ignored:
            return
        entry = self._live.setdefault(storage._cdata, [0, storage.nbytes()])
        if entry[0] == 0:
            self.held += entry[1]
            self._peak = max(self._peak, self.held)
        entry[0] += 1

    def drop(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage._cdata)
        if entry is None:
            return
        entry[0] -= 1
        if entry[0] == 0:
            self.held -= entry[1]
            del self._live[storage._cdata]

    def stash(self, entry: Deferred) -> list[Held]:
        """Count what `entry` keeps for W, as long as the caller keeps the answer."""
        return [Held(self, torch.empty(0, dtype=torch.uint8).set_(s)) for s in entry.storages()]

    def sample(self) -> None:
        """An action has ended: add the bytes held now to the curve."""
        self.curve.append((time.monotonic(), float(self.held)))
        self.peaks.append(float(self._peak))
        self._peak = self.held


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
