"""The ranks of a pipeline: torchrun's processes, processes we spawn, or ranks inside this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from ..errors import ConfigError

# A lost peer must not hold a start-up longer than this, whatever the user's step timeout is.
_JOIN_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class World:
    """`size` ranks, of which this process drives `local`. `gather` is a collective over processes.

    Control messages are ordinary collectives of a gloo group, in the order of the calls that all
    ranks make alike: `wrap`, the first step, `timeline`, `clip_grad_norm_`, `save`. A later step
    makes none.
    """

    size: int
    local: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """The first rank that this process drives; it names the process in errors."""
        return self.local[0]

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in rank order. Raises when a process does not come."""
        if self.group is None:
            return [value]
        out: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(out, value, group=self.group)
        return out

    def agree(self, make: Callable[[], Any], what: str) -> list[Any]:
        """Gather what `make` returns; an error of one process becomes the same error on all.

        Raises ConfigError naming the rank whose `make` raised, before anybody goes on.
        """
        try:
            mine: tuple[Any, Exception | None] = (make(), None)
        except Exception as error:
            mine = (None, error)
        everyone = self.gather((mine[0], None if mine[1] is None else _portable(mine[1])))
        for rank, (_, theirs) in enumerate(everyone):
            if theirs is not None:
                if self.group is not None:
                    theirs.add_note(f"raised by rank {rank} while {what}")
                raise theirs from mine[1]
        return [value for value, _ in everyone]


def _portable(error: Exception) -> Exception:
    """An error another process can unpickle: zbpipe's own travel as they are."""
    if type(error).__module__.startswith("zbpipe."):
        return error
    return ConfigError(f"{type(error).__name__}: {error}")


def join(local_ranks: int | None, mesh: Any = None) -> World:
    """Find the ranks there are: `local_ranks` in this process, torch.distributed's, or one.

    Under torchrun this initialises torch.distributed (gloo) unless that was done. Raises
    ConfigError where `local_ranks` is no positive number or is given in a distributed job.
    """
    if mesh is not None:
        raise ConfigError("mesh is not supported yet: leave it out, and the whole world is pp")
    launched = dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1
    if local_ranks is not None:
        if isinstance(local_ranks, bool) or not isinstance(local_ranks, int) or local_ranks < 1:
            raise ConfigError(f"local_ranks = {local_ranks!r}: want a number of ranks, at least 1")
        if launched and dist_size() > 1:
            raise ConfigError(
                f"local_ranks = {local_ranks} in a job of {dist_size()} processes: "
                "leave it out, each process drives its own rank"
            )
        return World(local_ranks, tuple(range(local_ranks)))
    if not launched:
        return World(1, (0,))
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_JOIN_TIMEOUT)
    if dist.get_world_size() == 1:
        return World(1, (0,))
    # A group of our own only where there is no other way: torch never frees one, and to set one up
    # costs a rendezvous of all ranks.
    group = dist.group.WORLD
    if "gloo" not in dist.get_backend_config(group):
        group = dist.new_group(backend="gloo", timeout=_JOIN_TIMEOUT)
    return World(dist.get_world_size(), (dist.get_rank(),), group)


def dist_size() -> int:
    """Processes of the job, whether torch.distributed is up yet or not."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _child(index: int, fn: Callable[..., None], port: int, ranks: int, args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_JOIN_TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=index, world_size=ranks, timeout=_JOIN_TIMEOUT
    )
    try:
        fn(index, *args)
        _part(store, ranks)
    finally:
        dist.destroy_process_group()


def _part(store: TCPStore, ranks: int) -> None:
    """Wait until all ranks are through, or until the parent ends this one because some are not.

    gloo forgets what has arrived over a connection that the peer has closed: whoever left first
    would spoil the last collective of the others.
    """
    if store.add("through", 1) == ranks:
        store.set("all through", "1")
    with suppress(RuntimeError):  # the others take their time: no reason to fail
        store.wait(["all through"], _JOIN_TIMEOUT)


def spawn(fn: Callable[..., None], ranks: int, args: Sequence[Any] = ()) -> Any:
    """Run `fn(rank, *args)` in `ranks` new processes that have joined torch.distributed (gloo).

    `fn` must be importable. Each rank computes with one thread. Returns torch's ProcessContext:
    call `.join()` until it is True; it raises ProcessRaisedException with a rank's traceback and
    ends the others.
    """
    # The parent holds the store, on a port the system chose: nobody can take it in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = start_processes(
        _child,
        args=(fn, store.port, ranks, tuple(args)),
        nprocs=ranks,
        join=False,
        start_method="spawn",
    )
    context.store = store  # lives as long as the ranks need it
    return context
