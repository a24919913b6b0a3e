"""Messages between ranks that share no memory: the `torch` transport.

    executor ─▶ channel ─▶ Outlet ┄ Outgoing ═══ torch.distributed ═══▶ Incoming ┄ Inlet ─▶ channel ─▶ executor

The executors see ordinary channels. A message is copied into its slot as on one host; from there
the process group takes it, and at the other end puts it into the slot where it is read. A small
message travels within its frame; of a large one the frame goes first, so that there is a place for
it. Both threads sleep in native code, without the GIL.
"""  # noqa: E501 - a picture

from __future__ import annotations

import struct
import threading
from typing import Any

import torch

from .wire import Wire

# slot, header, payload, carried (bytes); a slot of -1: there is no more.
_FRAME = struct.Struct("<iqqq")
_START = 64
# What fits into a frame saves a round trip. Measured with gloo on the loopback: a round trip costs
# 50 µs, 4 KiB more of a frame less than 2.
_INLINE = 4096 - _START
# Both ends wake by themselves when there is something to do.
_LOOK_S = 5.0


def _bytes(memory: Any) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


class Outgoing:
    """Carries off what one rank publishes for another; `carried` counts the messages."""

    def __init__(self, board: Any, wire: Wire, tag: int, outlet: Any) -> None:
        """`tag` and `tag + 1` are this channel's own on the wire."""
        self.over = False
        self.carried = 0
        self._board, self._wire, self._tag, self._outlet = board, wire, tag, outlet
        self._stopped = False

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.over = True

    def _run(self) -> None:
        frame = bytearray(_START + _INLINE)
        tensor = _bytes(frame)
        while not self._outlet.finished:
            parcel = self._outlet.take(_LOOK_S)
            if self._stopped or self._board.watch(0):
                return
            if parcel is None:
                continue
            row = (parcel.slot, parcel.header, parcel.payload, parcel.carried)
            _FRAME.pack_into(frame, 0, *row)
            if parcel.nbytes <= _INLINE:
                frame[_START : _START + parcel.nbytes] = parcel.memory
                self._wire.send(self._tag, tensor)
            else:
                self._wire.send(self._tag, tensor)
                self._wire.send(self._tag + 1, _bytes(parcel.memory))
            self._outlet.done(parcel.slot)
            self.carried += 1
        _FRAME.pack_into(frame, 0, -1, 0, 0, 0)
        self._wire.send(self._tag, tensor)

    def finish(self) -> None:
        """No more will be published: end when all has been carried off."""
        self._outlet.finish()

    def stop(self) -> None:
        """End now; what waits on the wire is woken by its end."""
        self._stopped = True
        self._outlet.finish()


class Incoming:
    """Brings one rank what another has published; `over` is set when nothing more will come."""

    def __init__(self, board: Any, wire: Wire, tag: int, inlet: Any) -> None:
        self.over = threading.Event()
        self._board, self._wire, self._tag, self._inlet = board, wire, tag, inlet
        self._stopped = False

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.over.set()

    def _run(self) -> None:
        frames = [bytearray(_START + _INLINE) for _ in range(2)]
        asked = self._wire.post(self._tag, _bytes(frames[0]))
        while not self._stopped:
            self._wire.wait(asked)
            frame = frames[0]
            slot, *sizes = _FRAME.unpack_from(frame)
            if slot < 0:
                return
            frames.reverse()
            asked = self._wire.post(self._tag, _bytes(frames[0]))
            parcel = self._room(slot, sizes)
            if parcel is None:
                return
            if parcel.nbytes <= _INLINE:
                parcel.memory[:] = frame[_START : _START + parcel.nbytes]
            else:
                self._wire.wait(self._wire.post(self._tag + 1, _bytes(parcel.memory)))
            self._inlet.commit(parcel)

    def _room(self, slot: int, sizes: list[int]) -> Any:
        """The message's place, once the rank has let go of the one before; None when stopped."""
        while not self._stopped and not self._board.watch(0):
            parcel = self._inlet.room(slot, *sizes, _LOOK_S)
            if parcel is not None:
                return parcel
        return None

    def stop(self) -> None:
        self._stopped = True
        self._inlet.finish()
