"""The `torch` transport: bytes of messages by torch.distributed, over whatever backend a job has.

    sender    head ═══▶                       isend ┄┄┄ bytes ┄┄┄▶
    receiver            ◀═══ "go": a place    irecv

Heads (═) go over a connection of our own, so that nobody waits inside torch.distributed except for
bytes that are on their way, in parts: a wait in there ends with the part, or after `timeout`
seconds. gloo's are woken when the mail is severed, unless the peer died within a part.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .wire import Stream

_GO = b"!"
# So that the time of a wait says something of the network's speed; large enough to fill it.
_PART = 16 << 20
_LONGEST = timedelta(days=1)
_JOIN_TIMEOUT = timedelta(seconds=120)


def cpu_backend() -> str:
    """The backend that the job uses for tensors on the CPU; gloo if it has none for them."""
    config = dist.get_backend_config(dist.group.WORLD)  # "cpu:gloo,cuda:nccl"
    named = dict(entry.split(":", 1) for entry in config.split(","))
    return named.get("cpu", "gloo")


class Post:
    """A process group of one pipeline's own, given back with the last of its Mails.

    Not the job's group: whoever gives up waiting in gloo closes the group's connections.
    """

    def __init__(self) -> None:
        """Collective over all processes of the job. Raises ConfigError where there is no job."""
        if not dist.is_initialized():
            raise ConfigError("transport = 'torch' needs torch.distributed, which is not there")
        self.backend = cpu_backend()
        self.group = dist.new_group(backend=self.backend, timeout=_JOIN_TIMEOUT)
        self._pid = os.getpid()
        self._mails = 1  # and the one who hands them out, until `seal`
        self._lock = threading.Lock()

    def mail(self, stream: Stream, peer: int, number: int, timeout: float) -> Mail:
        """The way of one channel's messages; `stream` for its heads. `number`: from 1."""
        with self._lock:
            self._mails += 1
        return Mail(self, stream, peer, number, timeout)

    def seal(self) -> None:
        """There are no more; once they have left, or at once, the group goes."""
        self.leave()

    def leave(self) -> None:
        with self._lock:
            self._mails -= 1
            last = self._mails == 0
        if last:
            self.close()

    def close(self) -> None:
        """Give the group back; in a fork of the process that made it, do nothing."""
        if os.getpid() != self._pid:
            return
        with suppress(ValueError):  # the user has ended torch.distributed already
            dist.destroy_process_group(self.group)


class Mail:
    """One channel's messages, in the place of a Stream. Every error is a ConnectionError."""

    def __init__(self, post: Post, stream: Stream, peer: int, number: int, timeout: float) -> None:
        self._post, self._stream = post, stream
        self._peer, self._tag = peer, number
        # gloo counts milliseconds, and takes none of them for no limit.
        seconds = min(max(timeout, 0.001), _LONGEST.total_seconds())
        self._timeout = timedelta(seconds=seconds)
        self._lock = threading.Lock()
        self._severed = self._waiting = False

    def send(self, head: Any, *payload: Any) -> None:
        """Send a head, and when the peer has a place for the bytes of `payload`, those."""
        self._stream.send(head)
        for memory in payload:
            if memoryview(memory).nbytes:
                self._stream.receive(bytearray(_GO))
                self._each(memory, partial(dist.isend, group_dst=self._peer))

    def receive(self, into: Any) -> None:
        """Fill `into` with the next head."""
        self._stream.receive(into)

    def receive_payload(self, into: Any) -> None:
        """Fill `into` with the bytes that belong to the last head."""
        if memoryview(into).nbytes:
            self._stream.send(_GO)
            self._each(into, partial(dist.irecv, group_src=self._peer))

    def _each(self, memory: Any, move: Callable[..., dist.Work | None]) -> None:
        for part in torch.frombuffer(memory, dtype=torch.uint8).split(_PART):
            with self._bounded():
                _wait(move(part, group=self._post.group, tag=self._tag), self._timeout)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        with self._lock:
            if self._severed:
                raise ConnectionError("the connection was severed here")
            self._waiting = True
        try:
            yield
        except (RuntimeError, ValueError) as error:  # ValueError: the group is no more
            raise ConnectionError(str(error)) from error
        finally:
            self._waiting = False

    def sever(self) -> None:
        """As Stream's; bytes that are under way from a peer that died are given up in time."""
        with self._lock:
            first, self._severed = not self._severed, True
        self._stream.sever()
        if first and self._waiting and self._post.backend == "gloo":
            self._wake()

    def _wake(self) -> None:
        """Wake whoever waits: gloo does, when somebody's time is up in the same context.

        It has one for each of its network interfaces, and the tag says which.
        """
        with suppress(RuntimeError, ValueError):
            nothing = torch.empty(1, dtype=torch.uint8)
            group, tag = self._post.group, self._tag
            work = dist.irecv(nothing, group=group, group_src=self._peer, tag=tag)
            _wait(work, timedelta(milliseconds=1))

    def close(self) -> None:
        """Give everything back, when nobody uses it any more."""
        self._stream.close()
        self._post.leave()


def _wait(work: dist.Work | None, timeout: timedelta) -> None:
    assert work is not None  # this process is in the group
    work.wait(timeout)
