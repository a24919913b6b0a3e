"""Two sides of a link in one process, each with a board of its own, as on two hosts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from zbpipe import _native
from zbpipe.runtime.bridge import Incoming, Outgoing
from zbpipe.runtime.link import Link
from zbpipe.runtime.wire import Stream

HANG_S = 60


def streams() -> tuple[Stream, Stream]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Stream(socket.create_connection(server.getsockname()))
        return ours, Stream(server.accept()[0])


def until(condition: Callable[[], Any]) -> None:
    """Wait for it; the limit is a hang guard."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, "this does not happen"
        time.sleep(0.001)


class Side:
    """One end: `rank` lives here, the other of 0 and 1 elsewhere."""

    link: Link

    def __init__(self, rank: int) -> None:
        self.rank, self.board = rank, _native.Board.create(2)
        self.board.place_elsewhere(1 - rank)

    def sends(self, stream: Stream, slots: int) -> Any:
        """Let the link carry off what is published; returns the channel's sender."""
        sender = _native.Sender(slots)
        outlet = _native.Outlet(self.board, self.rank, sender)
        self.link.outgoing.append(Outgoing(self.board, stream, outlet))
        return sender

    def receives(self, stream: Stream, slots: int) -> Any:
        """Let the link bring what comes; returns the channel's inlet."""
        inlet = _native.Inlet(self.board, self.rank, slots)
        self.link.incoming.append(Incoming(self.board, stream, inlet))
        return inlet


def sides(timeout: float) -> tuple[Side, Side]:
    """Ranks 0 and 1, linked; nothing has been started."""
    near, far = Side(0), Side(1)
    ours, theirs = streams()

    def link() -> None:
        far.link = Link(far.board, theirs, 1, 1, [0], timeout)

    meeting = threading.Thread(target=link)
    meeting.start()
    near.link = Link(near.board, ours, 0, 0, [1], timeout)
    meeting.join()
    return near, far
