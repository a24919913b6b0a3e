"""Ranks of a job that are made to live on several hosts, and what they may leave behind."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from crews import Outcome, forked
from zbpipe import ConfigError

_HANG_S = 60.0  # guard
_PATIENCE_S = 2.0  # with ranks that may have been killed


def _joined(world: Any, fn: Callable[..., Any], path: str, hosts: str, args: Any) -> Any:
    os.environ["ZBPIPE_HOST"] = hosts[world.rank]
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=world.rank, world_size=world.size
    )
    patience = 0.0
    try:
        value = fn(world.rank, *args)
        patience = _PATIENCE_S
        return value
    except ConfigError:  # all raise it right after a collective
        patience = _PATIENCE_S
        raise
    finally:
        if dist.is_initialized():
            _gather("end", patience)
            dist.destroy_process_group()


def on_hosts(folder: Any, fn: Callable[..., Any], hosts: str, *args: Any) -> list[Outcome]:
    """`fn(rank, *args)` in one process a letter of `hosts`; equal letters share a host."""
    return forked(_joined, len(hosts), fn, str(folder / "store"), hosts, args)


_barriers = itertools.count()


def barrier() -> None:
    """Wait until all ranks are here. Whoever goes at once keeps nobody: in dist.barrier, a gloo
    whose peer has closed the connection forgets what has come over it already.
    """
    assert _gather(f"barrier {next(_barriers)}", _HANG_S), "somebody does not come"


def _gather(key: str, seconds: float) -> bool:
    """Whether all ranks come within `seconds`."""
    store = dist.distributed_c10d._get_default_store()
    store.add(key, 1)
    until = time.monotonic() + seconds
    while store.add(key, 0) < dist.get_world_size():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def everyone(outcomes: list[Outcome]) -> list[Any]:
    """The values of all ranks, or all their errors: the others' are only consequences."""
    failed = [f"rank {o.rank}: {o.error!r}\n{o.trace}" for o in outcomes if o.error is not None]
    assert not failed, "\n".join(failed)
    return [outcome.get() for outcome in outcomes]


def native_threads() -> list[str]:
    """Names of all threads of this process, as the system has them."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
        except OSError:  # the thread ended while we looked
            continue
    return sorted(names)


def python_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("zbpipe"))


def sockets() -> int:
    """Sockets that this process has open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:  # the listing's own descriptor
            continue
    return count
