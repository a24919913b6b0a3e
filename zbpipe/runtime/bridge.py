"""Messages between ranks that share no memory: the transports `tcp` and `torch`.

    executor ─▶ channel ─▶ Outlet ┄ Outgoing ═══ a stream ═══▶ Incoming ┄ Inlet ─▶ channel ─▶ executor

The executors see ordinary channels. A message is copied into its slot as on one host; from there
the system takes it, and at the other end puts it into the slot where it is read. Both threads sleep
without the GIL: for a message, for a place, or on the socket. Payloads of CUDA ranks that are staged
in host memory (csrc/cuda/staging.hpp) are carried in the same way, by a second stream.
"""  # noqa: E501 - a picture

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

from .mail import Mail
from .wire import Stream

# slot, header, payload, carried (bytes), or a word in place of a slot.
_HEAD = struct.Struct("<iQQQ")
_NO_MORE, _STILL_HERE = -1, -2
_GOT_ALL = b"."
# Both ends wake by themselves when there is something to do. As often, an idle stream says that it
# is still used: firewalls and address translation forget those that are silent for minutes.
_LOOK_S = 5.0


class Outgoing:
    """Carries off what one rank publishes for another; `carried` counts the messages.

    `over` is set when no more will be carried, `arrived` when the other side has got all.
    """

    def __init__(self, board: Any, stream: Stream | Mail, outlet: Any) -> None:
        self.over, self.arrived = threading.Event(), False
        self.carried = 0
        self.stream = stream
        self._board, self._outlet = board, outlet
        self._stopped = False

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.over.set()

    def _run(self) -> None:
        while not self._outlet.finished:
            parcel = self._outlet.take(_LOOK_S)
            if self._stopped or self._board.watch(0):
                return
            if parcel is None:
                self.stream.send(_HEAD.pack(_STILL_HERE, 0, 0, 0))
                continue
            row = (parcel.slot, parcel.header, parcel.payload, parcel.carried)
            self.stream.send(_HEAD.pack(*row), parcel.memory)
            self._outlet.done(parcel.slot)
            self.carried += 1
        self.stream.send(_HEAD.pack(_NO_MORE, 0, 0, 0))
        self.stream.receive(bytearray(_GOT_ALL))
        self.arrived = True

    def route(self, peers: Sequence[int]) -> tuple[int, str]:
        """The rank that sends, and from and to whom; `peers`: the other process's ranks."""
        return self._outlet.rank, f"from rank {self._outlet.rank} to {_one_of(peers)}"

    def finish(self) -> None:
        """No more will be published: end when all has been carried off."""
        self._outlet.finish()

    def stop(self) -> None:
        """End now; what waits on the stream is woken by its end."""
        self._stopped = True
        self._outlet.finish()


class Incoming:
    """Brings one rank what another has published; `over` is set when nothing more will come."""

    def __init__(self, board: Any, stream: Stream | Mail, inlet: Any) -> None:
        self.over = threading.Event()
        self.stream = stream
        self._board, self._inlet = board, inlet
        self._stopped = False

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.over.set()

    def _run(self) -> None:
        head = bytearray(_HEAD.size)
        while not self._stopped:
            self.stream.receive(head)
            slot, *sizes = _HEAD.unpack(head)
            if slot == _STILL_HERE:
                continue
            if slot == _NO_MORE:
                self.stream.send(_GOT_ALL)
                return
            parcel = self._room(slot, sizes)
            if parcel is None:
                return
            self.stream.receive_payload(parcel.memory)
            self._inlet.commit(parcel)

    def route(self, peers: Sequence[int]) -> tuple[int, str]:
        """As Outgoing's."""
        return peers[0], f"from {_one_of(peers)} to rank {self._inlet.rank}"

    def _room(self, slot: int, sizes: list[int]) -> Any:
        """The message's place, once the rank has let go of the one before; None when stopped."""
        while not self._stopped and not self._board.watch(0):
            parcel = self._inlet.room(slot, *sizes, _LOOK_S)
            if parcel is not None:
                return parcel
        return None

    def stop(self) -> None:
        """End now; what waits on the stream is woken by its end."""
        self._stopped = True
        self._inlet.finish()


def _one_of(ranks: Sequence[int]) -> str:
    """`ranks` of one process, one of which is meant."""
    first, *more = map(str, ranks)
    return f"one of ranks {', '.join([first, *more])}" if more else f"rank {first}"
