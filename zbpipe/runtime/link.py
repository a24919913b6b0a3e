"""What two processes that share no board tell each other: what their ranks do, failures, the end.

Each side speaks every tenth of a second, and at once when its board is aborted. What it says is its
board's report, so that the boards of all hosts show the same and each host can name who died,
stalled or failed. An end is one of three:

    in order   messages are carried to their end ─▶ LEAVING ─▶ the peer answers GOT_ALL ─▶ severed
    abort      FAILED, both ways, so that no consequence is named first ─▶ severed
    broken     the peer's ranks are lost, unless a failure that explains it comes within a moment
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import control
from .bridge import Incoming, Outgoing
from .wire import Wire

_BEAT_S = 0.1
# How long an end may wait for a peer's answer, and a broken connection for a failure's news: longer
# than a busy process may keep its threads from running, shorter than anybody's patience.
_ANSWER_S = 2.0
_NEWS_S = 1.0
_MEET_S = 30.0  # both sides are there when they meet
_LOOKS = 8  # at the peer's clock, to begin with
CONTROL_TAG = 0

_ALIVE, _FAILED, _LEAVING, _GOT_ALL = range(4)
_HEAD = struct.Struct("<iqqq")  # what; when, when the last was sent and received, ns


class Clock:
    """The difference of two hosts' clocks, from the round trips of what they say anyway.

    As NTP (RFC 5905, section 8): the offset of the sample with the least delay of the last few.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=64)  # some seconds of beats
        self._last = (0, 0)

    def stamp(self) -> tuple[int, int, int]:
        """To be sent: now, and when the peer's last stamp was made and received, ns."""
        return (time.monotonic_ns(), *self._last)

    def hear(self, made: int, ours: int, received: int) -> None:
        now = time.monotonic_ns()
        self._last = (made, now)
        if ours:
            delay = (now - ours) - (made - received)
            self._samples.append((delay, ((received - ours) + (made - now)) // 2))

    @property
    def offset(self) -> int:
        """What to add to the own clock for the peer's, ns; 0 before the first round trip."""
        return min(self._samples)[1] if self._samples else 0


class Link:
    """A connection of this process and another, with the channels that go over it."""

    def __init__(
        self, board: Any, wire: Wire, side: int, rank: int, peers: Sequence[int], timeout: float
    ) -> None:
        """Both sides at once. `rank`: names this process; `peers`: the other process's ranks.

        `timeout`: seconds in which a peer takes a message, or no more are tried at the end. Raises
        ConnectionError where the other side goes.
        """
        self.elsewhere = True  # the peers live on another host than this board's
        self.leads = False  # they live on rank 0's host, whose clock is everybody's
        self._board, self.wire, self._timeout = board, wire, timeout
        self._rank, self._peers = rank, peers
        self._pid = os.getpid()
        self._clock = Clock()
        self._size = _HEAD.size + len(board.report())
        self._voice = threading.Lock()
        self._leaving, self._peer_left = threading.Event(), threading.Event()
        self._answered, self._settled = threading.Event(), threading.Event()
        self._over, self._closed = threading.Event(), False
        self.outgoing: list[Outgoing] = []
        self.incoming: list[Incoming] = []
        self._threads: list[threading.Thread] = []
        self._heard = time.monotonic()
        for _ in range(_LOOKS):
            if side == 0:
                self._say(_ALIVE, _MEET_S)
            self._take_in(self._hear(self._listen(), _MEET_S))
            if side == 1:
                self._say(_ALIVE, _MEET_S)

    @property
    def clock(self) -> int:
        """What to add to this host's clock for the peer's, ns."""
        return self._clock.offset

    def start(self) -> None:
        """Begin to speak, to listen and to carry messages."""
        self._heard = time.monotonic()
        for name, job in (
            ("speak", self._speak),
            ("guard", self._guard),
            ("listen", self._listen_on),
            *(("carry off", one.run) for one in self.outgoing),
            *(("bring", one.run) for one in self.incoming),
        ):
            # Daemons: what ends them is `close`, which runs at exit, after threading's own joins.
            thread = threading.Thread(
                target=self._guarded, args=(job,), name=f"zbpipe {name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the connection, in order where it can be; every wait is bounded. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            self.wire.leak()
            return
        if threading.current_thread() in self._threads:  # collected as garbage in one of them
            threading.Thread(target=self._close, daemon=True).start()
        else:
            self._close()

    def _close(self) -> None:
        if self._threads and not self._over.is_set():
            if not self._board.watch(0):
                self._leave()
            if self._board.watch(0):
                self._settled.wait(_ANSWER_S)
        self._end()
        for thread in self._threads:
            thread.join(_ANSWER_S)
        if any(thread.is_alive() for thread in self._threads):
            return  # what it uses stays
        self._threads.clear()
        self.outgoing.clear()
        self.incoming.clear()
        self.wire.close()

    def _leave(self) -> None:
        """Carry off what was published, say so, and wait until the peer has it."""
        for one in self.outgoing:
            one.finish()
        deadline, count = 0.0, -1
        while not all(one.over for one in self.outgoing):
            now, carried = time.monotonic(), sum(one.carried for one in self.outgoing)
            if carried != count:
                deadline, count = now + self._timeout, carried
            silent = now - self._heard > self._timeout
            if silent or now > deadline or self._over.is_set() or self._board.watch(0):
                return
            time.sleep(0.001)
        self._leaving.set()
        try:
            self._say(_LEAVING, _ANSWER_S)
        except ConnectionError:
            return
        self._answered.wait(_ANSWER_S)

    def _end(self) -> None:
        self._over.set()
        for outgoing in self.outgoing:
            outgoing.stop()
        for incoming in self.incoming:
            incoming.stop()
        self.wire.sever()

    # --- the threads ------------------------------------------------------------------------------

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except ConnectionError:
            pass  # `_listen_on` sees the same, and says what it means
        except Exception as error:
            control.abort(self._board, self._rank, error)

    def _speak(self) -> None:
        while not self._board.watch(_BEAT_S):
            if self._over.is_set() or self._leaving.is_set() or self._peer_left.is_set():
                return
            self._say(_ALIVE)  # as long as it takes: between steps nobody need be in a hurry
        self._say(_FAILED, _ANSWER_S)

    def _guard(self) -> None:
        """After an abort, end the connection, also where nobody answers."""
        while not self._over.wait(_BEAT_S):
            if self._board.watch(0):
                self._settled.wait(2 * _ANSWER_S)
                self._end()

    def _listen_on(self) -> None:
        try:
            asked = self._listen()
            while True:
                message = self._hear(asked)
                asked = self._listen()  # before the answer: two that answer each other both get it
                what = self._take_in(message)
                if what == _FAILED:
                    self._settled.set()
                elif what == _GOT_ALL:
                    self._answered.set()
                elif what == _LEAVING:
                    self._peer_left.set()
                    self._answer()
        except ConnectionError:
            self._explain()
        finally:
            self._over.set()
            self._answered.set()
            self._settled.set()
            # What has arrived is still brought in.
            for one in self.outgoing:
                one.stop()

    def _answer(self) -> None:
        for one in self.incoming:
            one.over.wait(_ANSWER_S)
        for outgoing in self.outgoing:
            outgoing.stop()  # nobody is there to read any more
        self._say(_GOT_ALL, _ANSWER_S)

    def _explain(self) -> None:
        """The connection has ended: in order, because of an abort, or because the peer is lost."""
        if self._over.is_set() or self._leaving.is_set() or self._peer_left.is_set():
            return
        if self._board.watch(_NEWS_S):
            return
        for rank in self._peers:
            if self.elsewhere:
                self._board.lose(rank)
            else:
                what = "the process of this rank died, or the connection to it broke"
                self._board.abort(rank, cause="d", message=what)

    # --- what is said -----------------------------------------------------------------------------

    def _say(self, what: int, seconds: float | None = None) -> None:
        if not self._voice.acquire(timeout=-1 if seconds is None else seconds):
            raise ConnectionError("the peer does not take what it is told")
        try:
            said = bytearray(_HEAD.pack(what, *self._clock.stamp()) + self._board.report())
            tensor = torch.frombuffer(said, dtype=torch.uint8)
            self.wire.send(CONTROL_TAG, tensor, seconds=seconds)
        finally:
            self._voice.release()

    def _listen(self) -> tuple[Any, torch.Tensor]:
        heard = torch.empty(self._size, dtype=torch.uint8)
        return self.wire.post(CONTROL_TAG, heard), heard

    def _hear(self, asked: tuple[Any, torch.Tensor], seconds: float | None = None) -> bytes:
        work, heard = asked
        self.wire.wait(work, seconds)
        return heard.numpy().tobytes()

    def _take_in(self, message: bytes) -> int:
        what, *stamps = _HEAD.unpack_from(message)
        self._clock.hear(*stamps)
        self._heard = time.monotonic()
        if self.leads:
            self._board.clock = self.clock
        self._board.adopt(message[_HEAD.size :])
        return int(what)
