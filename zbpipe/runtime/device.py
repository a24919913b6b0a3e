"""What a rank's Python needs of the device that its stages are on: the CPU, or a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..errors import ConfigError
from .world import World

_NOTHING: AbstractContextManager[Any] = nullcontext()


class Device:
    """The CPU: work is done when a call returns, and a slot is memory like any other."""

    kind = "cpu"
    index: int | None = None  # of a CUDA device

    @property
    def where(self) -> torch.device:
        """As torch names it."""
        return torch.device(self.kind)

    def lane(self, executor: Any, lane: int) -> AbstractContextManager[Any]:
        """Let torch work in the lane's stream."""
        return _NOTHING

    def after_caller(self, native: Any) -> None:
        """Let the next run begin after what the caller has given the device to do."""

    def storage(self, slot: Any) -> torch.UntypedStorage | None:
        """A received payload, without a copy; None if it is empty."""
        memory = memoryview(slot)
        if not memory.nbytes:
            return None
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def place(self, value: Any) -> Any:
        """`value` with its tensors on this device."""
        return value

    def current(self) -> AbstractContextManager[Any]:
        """Let this be the thread's device, outside of a step."""
        return _NOTHING

    def kept_random(self) -> AbstractContextManager[Any]:
        """Put the random generators back afterwards."""
        return torch.random.fork_rng(devices=[] if self.index is None else [self.index])

    def generators(self) -> list[torch.Generator]:
        """Whence layers draw random numbers."""
        return [torch.default_generator]

    def synchronize(self) -> None:
        """Wait for all that was given to the device, to read a clock."""


class CudaDevice(Device):
    """A CUDA device: work is enqueued in streams. Not yet run on a GPU."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self.index: int = index

    @property
    def where(self) -> torch.device:
        return torch.device(self.kind, self.index)

    def lane(self, executor: Any, lane: int) -> AbstractContextManager[Any]:
        stream = torch.cuda.ExternalStream(executor.stream(lane), device=self.where)
        return torch.cuda.stream(stream)

    def after_caller(self, native: Any) -> None:
        native.after(torch.cuda.current_stream(self.index).cuda_stream)

    def storage(self, slot: Any) -> torch.UntypedStorage | None:
        if not slot.__cuda_array_interface__["shape"][0]:
            return None
        return torch.as_tensor(slot, device=self.where).untyped_storage()

    def place(self, value: Any) -> Any:
        def move(leaf: Any) -> Any:
            there = isinstance(leaf, torch.Tensor) and leaf.device != self.where
            return leaf.to(self.where, non_blocking=True) if there else leaf

        return tree_map(move, value)

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator, torch.cuda.default_generators[self.index]]

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)


def of(*modules: nn.Module) -> Device | None:
    """The device of all parameters and buffers of `modules`; None where there are none.

    What is still on meta does not count. Raises ConfigError where they are on several devices, or
    on one of another kind.
    """
    found = {t.device for m in modules for t in (*m.parameters(), *m.buffers()) if not t.is_meta}
    if not found:
        return None
    names = ", ".join(sorted(map(str, found)))
    if len(found) > 1:
        raise ConfigError(f"a rank has parameters on {names}: move its stages to one device")
    (device,) = found
    if device.type == "cpu":
        return Device()
    if device.type != "cuda":
        raise ConfigError(f"a rank has parameters on {names}: want the CPU or a CUDA device")
    return CudaDevice(torch.cuda.current_device() if device.index is None else device.index)


def agreed(world: World, find: Callable[[], Mapping[int, Device | None]]) -> dict[int, int] | None:
    """The CUDA device of each rank of this process, None where all of the job are on the CPU.

    `find` says where this process's ranks are, None of one that has nothing anywhere: it goes where
    the others are. A collective. Raises what `find` raises on any rank, and ConfigError where some
    ranks are on CUDA devices and some not, on every rank.
    """
    parts = world.agree(
        lambda: {r: d and (d.kind, d.index) for r, d in find().items()}, "finding the devices"
    )
    known = {rank: where for part in parts for rank, where in part.items() if where}
    on_cpu = [rank for rank, (_, index) in known.items() if index is None]
    if 0 < len(on_cpu) < len(known):
        raise ConfigError(
            f"rank {on_cpu[0]} has its parameters on the CPU and others on CUDA devices: "
            "move all of them"
        )
    if on_cpu or not known:
        return None
    found = {rank: known.get(rank) for rank in world.local}
    return {
        rank: torch.cuda.current_device() if where is None else int(where[1] or 0)
        for rank, where in found.items()
    }
