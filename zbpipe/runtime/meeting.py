"""How the processes of a pipeline find each other: a board a host, and links between them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from .. import _native
from .._version import __version__
from ..errors import ConfigError
from . import hosts
from .bridge import Incoming, Outgoing
from .door import Door, connect
from .hosts import Pair, Processes
from .link import Link, close_all
from .mail import Mail, Post
from .wire import Address, Stream
from .world import World

_MEET_S = 60.0  # everybody is here already: nothing but the network can take time
# Everybody has connected: what is still on its way is there within milliseconds.
_ARRIVE_S = 10.0


@dataclass
class Meeting:
    """Who is there. `board` is this host's; `links` by process, from `connect` on."""

    world: World
    processes: Processes
    board: Any
    secret: bytes  # only this pipeline's processes know it
    links: dict[int, Link] = field(default_factory=dict)
    _streams: dict[Pair, Stream] = field(default_factory=dict)  # (process, number)
    _mails: dict[Pair, Mail] = field(default_factory=dict)  # in the place of some streams
    _numbers: dict[Pair, int] = field(default_factory=dict)  # of each bridged pair's stream
    _payloads: dict[Pair, int] = field(default_factory=dict)  # of each staged pair's second one

    def connect(
        self,
        pairs: Sequence[Pair],
        timeout: float,
        mailed: Collection[Pair] = (),
        staged: Sequence[Pair] = (),
    ) -> None:
        """Link the hosts, and the processes of these `pairs` of ranks. Collective.

        `mailed`: those of the pairs whose messages go by torch.distributed; `staged`: those whose
        payloads come from devices, and go alone. Raises ConfigError on every rank where a process
        cannot reach another.
        """
        wanted = self.processes.linked(pairs)
        if not wanted:
            return
        of = self.processes.of
        # Stream 0 is the link's own.
        self._numbers = {pair: number for number, pair in enumerate(pairs, 1)}
        self._payloads = {pair: n for n, pair in enumerate(staged, 1 + len(pairs))}
        numbered = [*self._numbers.items(), *self._payloads.items()]
        streams = {
            pair: [0, *(n for p, n in numbered if {*map(of, p)} == {*pair})] for pair in wanted
        }
        doors: list[Door] = []  # of this process: one, once it is open
        what = "connecting the hosts"
        try:
            addresses = self.world.agree(lambda: self._open(doors), what)
            # One after the other: whoever could not connect says why before anybody misses it.
            self.world.agree(lambda: self._visit(addresses, streams), what)
            self.world.agree(lambda: self._receive(doors[0], streams), what)
            if mailed:
                self._post(mailed, timeout)
            self.world.agree(lambda: self._link(wanted, timeout), what)
        except BaseException:
            close_all(self.links.values())
            for stream in self._unused():
                stream.sever()
            self._give_back()
            raise
        finally:
            for door in doors:
                door.close()

    def _open(self, doors: list[Door]) -> Address:
        try:
            doors.append(Door(self.processes.of(self.world.rank), self.secret))
        except OSError as error:
            raise ConfigError(
                f"rank {self.world.rank} cannot listen for connections: {error}"
            ) from error
        return doors[0].address

    def _visit(self, addresses: list[Address], streams: dict[Pair, list[int]]) -> None:
        """Connect to the processes before this one."""
        own, until = self.processes.of(self.world.rank), time.monotonic() + _MEET_S
        for (a, b), numbers in streams.items():
            if b == own:
                with self._explained(a):
                    left = max(0.0, until - time.monotonic())
                    made = connect(addresses[a], self.secret, own, a, numbers, left)
                self._streams |= {(a, n): s for n, s in zip(numbers, made, strict=True)}

    def _receive(self, door: Door, streams: dict[Pair, list[int]]) -> None:
        """Take the connections of the processes after this one, which have all connected."""
        own, until = self.processes.of(self.world.rank), time.monotonic() + _ARRIVE_S
        for (a, b), numbers in streams.items():
            if a == own:
                with self._explained(b):
                    came = door.wait(b, numbers, max(0.0, until - time.monotonic()))
                self._streams |= {(b, n): s for n, s in zip(numbers, came, strict=True)}

    def _post(self, pairs: Collection[Pair], timeout: float) -> None:
        """Let the messages of these pairs go by torch.distributed. All processes at once."""
        posts: list[Post] = []
        try:
            self.world.agree(lambda: posts.append(Post()), "making a process group")
        except BaseException:
            for post in posts:
                post.close()
            raise
        own = self.processes.of(self.world.rank)
        for pair in pairs:
            ends = [self.processes.of(rank) for rank in pair]
            if own in ends:
                number = self._payloads.get(pair, self._numbers[pair])  # headers stay
                at = ends[1 - ends.index(own)], number
                self._mails[at] = posts[0].mail(self._streams.pop(at), *at, timeout)
        posts[0].seal()

    @contextmanager
    def _explained(self, peer: int) -> Iterator[None]:
        """A ConnectionError in here as a ConfigError that says between whom, and what to do."""
        try:
            yield
        except ConnectionError as error:
            own = self.processes.of(self.world.rank)
            raise ConfigError(
                f"process {own} (rank {self.world.rank}) is not connected to process {peer} "
                f"(rank {self.processes.ranks[peer][0]}): {error}; GLOO_SOCKET_IFNAME names the "
                "network interface to use, which must let TCP through at any port"
            ) from error

    def _link(self, wanted: list[Pair], timeout: float) -> None:
        """In one order on all processes, since both sides of a link talk at once."""
        where, own = self.processes, self.processes.of(self.world.rank)
        for pair in wanted:
            if own in pair:
                side = pair.index(own)
                peer = pair[1 - side]
                stream, ranks = self._streams[peer, 0], where.ranks[peer]
                with self._explained(peer):
                    link = Link(self.board, stream, side, self.world.rank, ranks, timeout)
                apart = where.hosts[peer] != where.hosts[own]
                link.leads = peer == 0 and own in where.leaders and apart
                if link.leads:  # a first step may be over before the next beat
                    self.board.clock = link.clock
                self.links[peer] = link
                del self._streams[peer, 0]

    def carry_off(self, pair: Pair, sender: Any) -> None:
        """Let what `sender` publishes go over the wire."""
        peer = self.processes.of(pair[1])
        outlet = _native.Outlet(self.board, pair[0], sender)
        stream = self._way(peer, self._numbers[pair])
        self.links[peer].outgoing.append(Outgoing(self.board, stream, outlet))

    def bring(self, pair: Pair, slots: int) -> Any:
        """The end of a channel into which what comes over the wire goes."""
        peer = self.processes.of(pair[0])
        inlet = _native.Inlet(self.board, pair[1], slots)
        stream = self._way(peer, self._numbers[pair])
        self.links[peer].incoming.append(Incoming(self.board, stream, inlet))
        return inlet

    def carry_payloads(self, pair: Pair, departures: Any) -> None:
        """Let the payloads that a staged link's device leaves in host memory go over the wire."""
        peer = self.processes.of(pair[1])
        stream = self._way(peer, self._payloads[pair])
        self.links[peer].outgoing.append(Outgoing(self.board, stream, departures))

    def bring_payloads(self, pair: Pair, arrivals: Any) -> None:
        """Let them come to where the receiving device expects them."""
        peer = self.processes.of(pair[0])
        stream = self._way(peer, self._payloads[pair])
        self.links[peer].incoming.append(Incoming(self.board, stream, arrivals))

    def _way(self, peer: int, number: int) -> Stream | Mail:
        at = peer, number
        return self._mails.pop(at) if at in self._mails else self._streams.pop(at)

    def start(self) -> None:
        for link in self.links.values():
            link.start()

    def close(self) -> None:
        """End all links, in order where that can be."""
        close_all(self.links.values())
        self._give_back()  # of channels that were never made

    def _unused(self) -> list[Stream | Mail]:
        return [*self._streams.values(), *self._mails.values()]

    def _give_back(self) -> None:
        for stream in self._unused():
            stream.close()
        self._streams.clear()
        self._mails.clear()


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
        alike = [i for i, given in enumerate(ids) if given == hosts.host_id()]
        mine = {i for i in alike if world.rank in everyone[i][3] or hosts.reachable(addresses[i])}
        found = world.gather((mine, secrets.token_bytes(32)))
    finally:
        probe.close()
    processes = Processes(
        tuple(row[3] for row in everyone), tuple(hosts.group(ids, [reach for reach, _ in found]))
    )
    if on_cuda and len(processes.leaders) > 1:
        able = tuple(world.gather(_loads_nccl()))
        processes = replace(processes, nccl=able)
    host = processes.host(world.rank)
    if host != processes.of(world.rank):
        own = _native.Board.open(addresses[host][0], everyone[host][2], world.size)
    for rank in range(world.size):
        if processes.host(rank) != host:
            own.place_elsewhere(rank)
    return Meeting(world, processes, own, found[0][1])


def _loads_nccl() -> bool:
    try:
        _native.cuda.probe_nccl()
    except RuntimeError:  # `zbpipe doctor` says why
        return False
    return True


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
