"""A connection of two processes by a torch.distributed process group of their own.

gloo, over whatever interface it takes (GLOO_SOCKET_IFNAME chooses). A send ends when the other side
has asked for it. A group of two, made aside of torch's registry of groups, is gone with its last
reference; its end is the end of nothing else.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

# A lost peer must not hold a start-up longer than this (as runtime/world.py).
_JOIN_TIMEOUT = timedelta(seconds=120)
# Nothing here waits by itself for long: whoever waits is woken by `sever`, or by the peer's end.
_UNTIL_WOKEN = timedelta(days=365)
_NOBODYS_TAG = 0xFFFF


class Wire:
    """One side of the connection. Messages with one tag arrive in the order of their sends."""

    def __init__(self, store: Store, name: str, side: int) -> None:
        """Both sides call this with the same store and name, one as 0 and one as 1.

        Raises RuntimeError where the other does not come within two minutes.
        """
        self._peer = 1 - side
        self._group: Any = dist.ProcessGroupGloo(PrefixStore(name, store), side, 2, _JOIN_TIMEOUT)

    def send(self, tag: int, *tensors: torch.Tensor, seconds: float | None = None) -> None:
        """Send contiguous CPU tensors, and return when their memory may be used again.

        Raises ConnectionError where the connection ends. `seconds`: how long it may take; then the
        connection ends.
        """
        try:
            works = [self._group.send([tensor], self._peer, tag) for tensor in tensors]
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        for work in works:
            self.wait(work, seconds)

    def post(self, tag: int, tensor: torch.Tensor) -> Any:
        """Ask for the next message, into `tensor`, for `wait`."""
        try:
            return self._group.recv([tensor], self._peer, tag)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def wait(self, work: Any, seconds: float | None = None) -> None:
        try:
            work.wait(_UNTIL_WOKEN if seconds is None else timedelta(seconds=seconds))
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def sever(self) -> None:
        """End the connection at once: whoever waits at either side gets ConnectionError."""
        # gloo closes a connection when a wait runs out of time, and offers no other way.
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            work = self._group.recv([nothing], self._peer, _NOBODYS_TAG)
            work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Give the sockets and threads back, when nobody uses the wire any more."""
        self._group = None

    def leak(self) -> None:
        """Keep the group for ever: a forked child has none of the threads that its end joins."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
