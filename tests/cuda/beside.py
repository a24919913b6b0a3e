"""Ranks of one process that are connected as those of two hosts are, over sockets to itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Sequence
from typing import Any

from faking import cuda_crew

from zbpipe import _native
from zbpipe.program import Programs
from zbpipe.runtime import executor
from zbpipe.runtime.bridge import Incoming, Outgoing
from zbpipe.runtime.executor import Crew, Loaded
from zbpipe.runtime.hosts import Pair
from zbpipe.runtime.link import Link
from zbpipe.runtime.meeting import Meeting, meet
from zbpipe.runtime.wire import Stream
from zbpipe.runtime.world import World


def _ends() -> tuple[Stream, Stream]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = Stream(socket.create_connection(server.getsockname()))
        return near, Stream(server.accept()[0])


class Beside(Meeting):
    """All senders at one end of a link, all receivers at the other, both in this process."""

    def connect(
        self,
        pairs: Sequence[Pair],
        timeout: float,
        mailed: Collection[Pair] = (),
        staged: Sequence[Pair] = (),
    ) -> None:
        assert not mailed
        self._headers = {pair: _ends() for pair in pairs}
        self._bytes = {pair: _ends() for pair in staged}
        made: dict[int, Link] = {}

        def join(side: int, stream: Stream) -> None:
            made[side] = Link(self.board, stream, side, 0, [0], timeout)

        sides = [threading.Thread(target=join, args=end) for end in enumerate(_ends())]
        for side in sides:
            side.start()
        for side in sides:
            side.join()
        self.links = made

    def _send(self, stream: Stream, outlet: Any) -> None:
        self.links[0].outgoing.append(Outgoing(self.board, stream, outlet))

    def _receive(self, stream: Stream, inlet: Any) -> None:
        self.links[1].incoming.append(Incoming(self.board, stream, inlet))

    def carry_off(self, pair: Pair, sender: Any) -> None:
        self._send(self._headers[pair][0], _native.Outlet(self.board, pair[0], sender))

    def bring(self, pair: Pair, slots: int) -> Any:
        inlet = _native.Inlet(self.board, pair[1], slots)
        self._receive(self._headers[pair][1], inlet)
        return inlet

    def carry_payloads(self, pair: Pair, departures: Any) -> None:
        self._send(self._bytes[pair][0], departures)

    def bring_payloads(self, pair: Pair, arrivals: Any) -> None:
        self._receive(self._bytes[pair][1], arrivals)


def beside(
    programs: Programs, monkeypatch: Any, timeout: float = 30.0, poison: bool = True
) -> tuple[Crew, Loaded]:
    """All ranks in this process, with a transport that otherwise leaves it."""

    def meet_here(world: World, on_cuda: bool) -> Meeting:
        met = meet(world, on_cuda)
        return Beside(met.world, met.processes, met.board, met.secret)

    ranks = len(programs.ranks)
    with monkeypatch.context() as patched:
        patched.setattr(executor, "meet", meet_here)
        return cuda_crew(World(ranks, tuple(range(ranks))), programs, timeout, poison, "tcp")
