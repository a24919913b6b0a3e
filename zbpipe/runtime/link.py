"""What two processes that share no board tell each other: what their ranks do, failures, the end.

Each side speaks every tenth of a second, and at once when its board is aborted. What it says is its
board's report, so that the boards of all hosts show the same and each host can name who died,
stalled or failed. An end is one of three:

    in order   messages have arrived to the last ─▶ LEAVING ─▶ the peer answers HEARD ─▶ severed
    abort      FAILED, both ways, so that no consequence is named first ─▶ severed
    broken     the peer's ranks are lost, unless a failure that explains it comes within a moment
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from . import control
from .bridge import Incoming, Outgoing
from .mail import Mail
from .wire import Stream

_BEAT_S = 0.1
# How long an end may wait for a peer's answer, and a broken connection for a failure's news: longer
# than a busy process may keep its threads from running, shorter than anybody's patience.
_ANSWER_S = 2.0
_NEWS_S = 1.0
_SLICE_S = 0.02
_SETTLE_S = 10.0  # after an abort, where nobody waits for the end but threads of our own
_MEET_S = 30.0  # both sides are there when they meet
_LOOKS = 8  # at the peer's clock, to begin with

_ALIVE, _FAILED, _LEAVING, _HEARD = range(4)
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

    def hear(self, made: int, ours: int, received: int, now: int) -> None:
        """A stamp of the peer's, and when it came."""
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
        self, board: Any, stream: Stream, side: int, rank: int, peers: Sequence[int], timeout: float
    ) -> None:
        """Both sides at once. `rank`: names this process; `peers`: the other process's ranks.

        `timeout`: seconds in which the peer takes a message, or no more are tried at the end.
        Raises ConnectionError where the other side goes.
        """
        self.leads = False  # the peer is of rank 0's host, whose clock is everybody's
        self._board, self._stream, self._timeout = board, stream, timeout
        self._rank, self._peers = rank, peers
        self._pid = os.getpid()
        self._clock = Clock()
        self._message = bytearray(_HEAD.size + len(board.report()))
        self._voice = threading.Lock()
        self._leaving, self._peer_left = threading.Event(), threading.Event()
        self._departed = False  # LEAVING was said
        self._answered, self._settled = threading.Event(), threading.Event()
        self._broken, self._over, self._closed = threading.Event(), threading.Event(), False
        self.outgoing: list[Outgoing] = []
        self.incoming: list[Incoming] = []
        self._threads: list[threading.Thread] = []
        self._heard = time.monotonic()
        # Half of what is free is never less than what is said at once (`Stream.writable`).
        stream.roomy(16 * len(self._message))
        stream.limit(_MEET_S)
        for _ in range(_LOOKS):
            if side == 0:
                self._say(_ALIVE, _ANSWER_S)
            self._hear()
            if side == 1:
                self._say(_ALIVE, _ANSWER_S)
        stream.limit(None)

    @property
    def clock(self) -> int:
        """What to add to this host's clock for the peer's, ns."""
        return self._clock.offset

    def start(self) -> None:
        """Begin to speak, to listen and to carry messages."""
        self._heard = time.monotonic()
        jobs: list[tuple[str, Callable[[], None]]] = [
            ("speak", self._speak),
            ("listen", self._listen),
            *(("carry off", partial(self._carry, one)) for one in self.outgoing),
            *(("bring", partial(self._carry, one)) for one in self.incoming),
        ]
        try:
            for name, job in jobs:
                # Daemons: what ends them is `close`, which runs at exit, after threading's joins.
                thread = threading.Thread(
                    target=self._guarded, args=(job,), name=f"zbpipe {name}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:  # there are too many threads already
            self._end()
            raise

    def close(self) -> None:
        """End the connection, in order where it can be; every wait is bounded. Idempotent."""
        close_all([self])

    def claim(self) -> bool:
        """True for the one who is to close it: once, and not in a forked child of the owner."""
        first, self._closed = not self._closed, True
        return first and os.getpid() == self._pid

    def depart(self) -> None:
        """The first part of an end: say that it comes, where all is well."""
        if self._threads and not self._over.is_set() and not self._board.watch(0):
            self._leave()

    def part(self, until: float) -> None:
        """The second: let the peer answer until then (of time.monotonic)."""
        if self._threads and not self._over.is_set():
            if self._board.watch(0):
                self._settled.wait(max(0.0, until - time.monotonic()))
            elif self._departed:
                self._answered.wait(max(0.0, until - time.monotonic()))
        self._end()

    def free(self, until: float) -> None:
        """The last: give everything back once no thread uses it, if none does by then."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            # What it uses stays until then.
            later = threading.Thread(target=self._give_back, name="zbpipe give back", daemon=True)
            later.start()
        else:
            self._give_back()

    def _give_back(self) -> None:
        for thread in self._threads:
            thread.join()
        streams = self._streams()
        self._threads.clear()
        self.outgoing.clear()
        self.incoming.clear()
        for stream in streams:
            stream.close()

    def _leave(self) -> None:
        """Carry off what was published, and when the peer has it, say so."""
        for one in self.outgoing:
            one.finish()
        deadline, count = 0.0, [-1]
        while not all(one.over.wait(0.001) for one in self.outgoing):
            # A peer that reads slowly takes nothing for as long as it works on what it has.
            now, moved = time.monotonic(), [self._board.changes(rank) for rank in self._peers]
            moved += [one.carried for one in self.outgoing]
            if moved != count:
                deadline, count = now + self._timeout, moved
            silent = now - self._heard > self._timeout
            if silent or now > deadline or self._over.is_set() or self._board.watch(0):
                return
        if not all(one.arrived for one in self.outgoing):  # one broke: `_carry` says so
            until = time.monotonic() + _ANSWER_S
            while not self._ended() and time.monotonic() < until:
                if self._board.watch(_SLICE_S):
                    return
            return
        self._leaving.set()
        try:
            self._departed = self._say(_LEAVING, _ANSWER_S)
        except ConnectionError:
            return  # and `_listen` finds the end

    def _end(self) -> None:
        self._over.set()
        for outgoing in self.outgoing:
            outgoing.stop()
        for incoming in self.incoming:
            incoming.stop()
        for stream in self._streams():
            stream.sever()

    def _streams(self) -> list[Stream | Mail]:
        carried = [one.stream for one in self.outgoing] + [one.stream for one in self.incoming]
        return [self._stream, *carried]

    # --- the threads ------------------------------------------------------------------------------

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            control.abort(self._board, self._rank, error)

    def _carry(self, one: Outgoing | Incoming) -> None:
        """A stream of messages may break alone: the way forgets it, or memory is short."""
        try:
            one.run()
        except ConnectionError as error:
            until = time.monotonic() + _NEWS_S
            while time.monotonic() < until:
                if self._ended() or self._board.watch(_SLICE_S):
                    return  # that explains it
            if time.monotonic() - self._heard > _NEWS_S:
                said = "nothing is heard of this rank, which is in another process"
                self._board.abort(self._peers[0], cause="s", message=said)
                return
            # Whoever knows of a peer that has fallen silent says so first.
            if not self._board.watch(_NEWS_S) and not self._ended():
                rank, route = one.route(self._peers)
                message = f"the connection {route} broke: {error}"
                self._board.abort(rank, cause="d", message=message)

    def _ended(self) -> bool:
        """Whether the link ends already, for a reason that is known or that `_listen` finds."""
        ends = (self._broken, self._over, self._leaving, self._peer_left)
        return any(end.is_set() for end in ends)

    def _speak(self) -> None:
        try:
            while not self._board.watch(_BEAT_S):
                if self._ended():
                    break
                self._say(_ALIVE, 0.0)  # a peer that does not listen now does so later
            else:
                self._warn()
        except ConnectionError:
            self._stream.sever()  # so that `_listen` sees it, too
        finally:
            # A stream may be silent for ever: whoever waits on one ends with an abort.
            carriers: list[Outgoing | Incoming] = [*self.outgoing, *self.incoming]
            while not (aborted := self._board.watch(0)):
                if all(one.over.is_set() for one in carriers):
                    break
                self._board.watch(_BEAT_S)
            if aborted:
                self._end()

    def _warn(self) -> None:
        """Tell the peer of the abort, and hear its own word."""
        until = time.monotonic() + _SETTLE_S
        while not self._say(_FAILED, _ANSWER_S):
            if time.monotonic() > until or self._over.is_set():
                return
        self._settled.wait(max(0.0, until - time.monotonic()))

    def _listen(self) -> None:
        try:
            while True:
                what = self._hear()
                if what == _FAILED:
                    self._settled.set()
                elif what == _HEARD:
                    self._answered.set()
                elif what == _LEAVING:
                    self._peer_left.set()
                    self._say(_HEARD, _ANSWER_S)
        except ConnectionError:
            self._broken.set()
            self._explain()
        finally:
            self._over.set()
            self._answered.set()
            self._settled.set()
            # Nobody reads any more what goes out; what has come is still brought in.
            for one in self.outgoing:
                one.stop()

    def _explain(self) -> None:
        """The connection has ended: in order, because of an abort, or because the peer is lost."""
        if self._over.is_set() or self._leaving.is_set() or self._peer_left.is_set():
            return
        if self._board.watch(_NEWS_S):
            return
        for rank in self._peers:
            self._board.lose(rank)

    # --- what is said -----------------------------------------------------------------------------

    def _say(self, what: int, seconds: float) -> bool:
        """Say it, unless the peer takes nothing within `seconds`. Returns whether it was said."""
        with self._voice:
            if not self._stream.writable(seconds):
                return False
            head = _HEAD.pack(what, *self._clock.stamp())
            self._stream.send(head, self._board.report())
            return True

    def _hear(self) -> int:
        self._stream.receive(self._message)
        what, made, ours, received = _HEAD.unpack_from(self._message)
        self._clock.hear(made, ours, received, time.monotonic_ns())
        self._heard = time.monotonic()
        if self.leads:
            self._board.clock = self.clock
        self._board.adopt(bytes(self._message[_HEAD.size :]))
        return int(what)


def close_all(links: Iterable[Link]) -> None:
    """End them all, and wait for the peers' answers at the same time."""
    ours = [link for link in links if link.claim()]
    # Collected as garbage in a thread of some link, which is not to wait for this one.
    if threading.current_thread().name.startswith("zbpipe"):
        threading.Thread(target=_close_all, args=(ours,), daemon=True).start()
    else:
        _close_all(ours)


def _close_all(links: list[Link]) -> None:
    for link in links:
        link.depart()
    until = time.monotonic() + _ANSWER_S
    for link in links:
        link.part(until)
    until = time.monotonic() + _ANSWER_S
    for link in links:
        link.free(until)
