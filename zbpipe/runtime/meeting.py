"""How the processes of a pipeline find each other: a board a host, and links between them."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from .. import _native
from .._version import __version__
from ..errors import ConfigError
from . import hosts
from .bridge import Incoming, Outgoing
from .hosts import Pair, Processes
from .link import CONTROL_TAG, Link
from .wire import Wire
from .world import World


@dataclass
class Meeting:
    """Who is there. `board` is this host's; `links` by process, from `connect` on."""

    world: World
    processes: Processes
    board: Any
    token: str  # names this meeting in the job's store
    links: dict[int, Link] = field(default_factory=dict)

    def connect(self, pairs: Collection[Pair], timeout: float) -> None:
        """Link the hosts, and the processes of these `pairs` of ranks. Collective.

        Raises ConfigError on every rank where a process cannot reach another.
        """
        wanted = self.processes.linked(pairs)
        if not wanted:
            return
        try:
            self.world.agree(lambda: self._connect(wanted, timeout), "connecting the hosts")
        except BaseException:
            self.close()
            raise

    def _connect(self, wanted: list[Pair], timeout: float) -> None:
        """In one order on all processes, so that nobody waits in a circle."""
        own, of = self.processes.of(self.world.rank), self.processes
        for pair in wanted:
            if own not in pair:
                continue
            side = pair.index(own)
            peer = pair[1 - side]
            try:
                wire = Wire(self.world.store, f"zbpipe/{self.token}/{pair[0]}-{pair[1]}", side)
                link = Link(self.board, wire, side, self.world.rank, of.ranks[peer], timeout)
            except (RuntimeError, ConnectionError) as error:
                raise ConfigError(
                    f"no connection between rank {self.world.rank} and rank {of.ranks[peer][0]}: "
                    f"{error} (gloo uses the network interface that GLOO_SOCKET_IFNAME names)"
                ) from error
            link.elsewhere = of.hosts[peer] != of.hosts[own]
            link.leads = own != 0 and peer == 0 and own in of.leaders and link.elsewhere
            self.links[peer] = link

    def carry_off(self, pair: Pair, bridged: list[Pair], sender: Any) -> None:
        """Let what `sender` publishes go over the wire."""
        link = self.links[self.processes.of(pair[1])]
        outlet = _native.Outlet(self.board, pair[0], sender)
        link.outgoing.append(Outgoing(self.board, link.wire, _tag(pair, bridged), outlet))

    def bring(self, pair: Pair, bridged: list[Pair], slots: int) -> Any:
        """The end of a channel into which what comes over the wire goes."""
        link = self.links[self.processes.of(pair[0])]
        inlet = _native.Inlet(self.board, pair[1], slots)
        link.incoming.append(Incoming(self.board, link.wire, _tag(pair, bridged), inlet))
        return inlet

    def start(self) -> None:
        for link in self.links.values():
            link.start()

    def close(self) -> None:
        """End all links, in order where that can be."""
        for link in self.links.values():
            link.close()


def meet(world: World, on_cuda: bool) -> Meeting:
    """Find out who shares a host, and open its board. Collective.

    Raises ConfigError, on every rank, where some ranks are on CUDA devices and some are not, or
    run another version of zbpipe.
    """
    probe, own = hosts.Probe(), _native.Board.create(world.size)
    try:
        everyone = world.gather(
            (hosts.host_id(), probe.address, own.fd, world.local, __version__, on_cuda)
        )
        _same_kind(everyone)
        ids, addresses = [row[0] for row in everyone], [row[1] for row in everyone]
        mine = {
            i for i, at in enumerate(addresses) if ids[i] == hosts.host_id() and hosts.reachable(at)
        }
        found = world.gather((mine, secrets.token_hex(8)))
    finally:
        probe.close()
    processes = Processes(
        tuple(row[3] for row in everyone), tuple(hosts.group(ids, [reach for reach, _ in found]))
    )
    host = processes.host(world.rank)
    if host != processes.of(world.rank):
        own = _native.Board.open(addresses[host][0], everyone[host][2], world.size)
    for rank in range(world.size):
        if processes.host(rank) != host:
            own.place_elsewhere(rank)
    return Meeting(world, processes, own, found[0][1])


def _tag(pair: Pair, bridged: list[Pair]) -> int:
    """Two tags a channel, the same at both its ends, after that of control."""
    return CONTROL_TAG + 1 + 2 * bridged.index(pair)


def _same_kind(everyone: list[Any]) -> None:
    *_, version, cuda = everyone[0]
    for _, _, _, (rank, *_), theirs, on_cuda in everyone:
        if on_cuda != cuda:
            names = {True: "CUDA", False: "the CPU"}
            raise ConfigError(
                f"rank {rank} is on {names[on_cuda]}, rank 0 is not: want all ranks on one of them"
            )
        if theirs != version:
            raise ConfigError(
                f"rank {rank} runs zbpipe {theirs}, rank 0 {version}: want the same everywhere"
            )
