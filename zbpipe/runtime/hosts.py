"""Which processes can share memory, and how each pair of ranks is connected. Without torch."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

Pair = tuple[int, int]

# What `wrap(transport=)` may ask for; those that go over a link on any device, even on one host,
# with payloads of CUDA devices staged through host memory.
FORCED = ("tcp", "torch", "nccl")
BRIDGED = ("tcp", "torch")

_LABEL = "zbpipe-probe"


def host_id() -> str:
    """Differs in two processes that cannot share memory; equal says only that they may.

    The machine, its boot, and the namespaces in which processes are found (containers of one
    machine often agree in all else). The environment variable ZBPIPE_HOST takes its place.
    """
    given = os.environ.get("ZBPIPE_HOST", "")
    if given:
        return f"ZBPIPE_HOST={given}"
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else ""]
    for name in ("pid", "user"):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:  # no /proc: then nobody is reachable anyway
            parts.append("")
    return ":".join(parts)


class Probe:
    """Memory of this process that others try to open, to know that channels can be opened too."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)
        self._fd = os.memfd_create(_LABEL, os.MFD_CLOEXEC)
        os.write(self._fd, self._secret)

    @property
    def address(self) -> tuple[int, int, bytes]:
        """What `reachable` needs to find it."""
        return os.getpid(), self._fd, self._secret

    def close(self) -> None:
        os.close(self._fd)


def reachable(address: tuple[int, int, bytes]) -> bool:
    """Whether this process can open a Probe's memory, as Board and Receiver are going to."""
    pid, fd, secret = address
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Where the pid is another process's here, its descriptor may be anything: only look.
        if not os.readlink(path).startswith(f"/memfd:{_LABEL}"):
            return False
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.pread(opened, len(secret), 0) == secret
    finally:
        os.close(opened)


def group(ids: Sequence[str], reach: Sequence[Collection[int]]) -> list[int]:
    """The host of each process, numbered by its first process.

    `ids`: host_id of each; `reach[i]`: the processes whose memory process i can open. Processes of
    one host can all reach each other, both ways.
    """
    hosts: list[list[int]] = []
    for process, own in enumerate(ids):
        for host in hosts:
            if all(
                ids[other] == own and other in reach[process] and process in reach[other]
                for other in host
            ):
                host.append(process)
                break
        else:
            hosts.append([process])
    return [next(h[0] for h in hosts if process in h) for process in range(len(ids))]


@dataclass(frozen=True)
class Processes:
    """The processes of a pipeline: the ranks that each drives, and where it runs."""

    ranks: tuple[tuple[int, ...], ...]
    hosts: tuple[int, ...]  # of each process; a host is named by its first process
    nccl: tuple[bool, ...] = ()  # whether each process can load it; on CUDA devices of more hosts

    def of(self, rank: int) -> int:
        """The process that drives `rank`."""
        return next(i for i, ranks in enumerate(self.ranks) if rank in ranks)

    def host(self, rank: int) -> int:
        return self.hosts[self.of(rank)]

    @property
    def leaders(self) -> list[int]:
        """The first process of each host."""
        return sorted(set(self.hosts))

    def transport(self, pair: Pair, forced: Mapping[Pair, str], cuda: bool) -> str:
        """How messages go: "local", "shm" or "tcp", and on CUDA "local", "ipc", "nccl" or "tcp".

        `forced`: what was asked for in place of that, "torch" among it.
        """
        if pair in forced:
            return forced[pair]
        if self.of(pair[0]) == self.of(pair[1]):
            return "local"
        if self.host(pair[0]) != self.host(pair[1]):
            return "nccl" if cuda and all(self.nccl[self.of(rank)] for rank in pair) else "tcp"
        return "ipc" if cuda else "shm"

    def apart(self, pair: Pair, transport: str) -> bool:
        """Whether the ranks share no memory of the host, or are not to use it."""
        return transport in BRIDGED or self.host(pair[0]) != self.host(pair[1])

    def linked(self, pairs: Collection[Pair]) -> list[Pair]:
        """The pairs of processes that need a connection: those of `pairs` of ranks, and leaders."""
        needed = {(min(p), max(p)) for p in ((self.of(a), self.of(b)) for a, b in pairs)}
        leaders = self.leaders
        needed |= {(a, b) for a in leaders for b in leaders if a < b}
        return sorted(needed)


def forced_pairs(transport: Any, ranks: int, local: Collection[int]) -> dict[Pair, str]:
    """What `transport` says of ordered pairs of ranks, whatever could be faster.

    `transport`: None, one of FORCED, or {(from, to): one of these}. `local`: the ranks of this
    process, among which messages stay. Raises ConfigError on anything else.
    """
    want = 'want None, "tcp", "torch", on CUDA "nccl", or {(0, 1): "tcp"}: pairs (from, to)'
    if transport is None:
        return {}
    if isinstance(transport, str):
        if transport not in FORCED:
            raise ConfigError(f"transport = {transport!r}: {want}")
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        return {p: transport for p in pairs if not (p[0] in local and p[1] in local)}
    if not isinstance(transport, Mapping):
        raise ConfigError(f"transport is a {type(transport).__name__}: {want}")
    for pair, name in transport.items():
        shown = f"transport = {{{pair!r}: {name!r}}}"
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ConfigError(f"{shown}: {want}")
        for rank in pair:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
                raise ConfigError(f"{shown}: want two ranks from 0 to {ranks - 1}")
        if pair[0] == pair[1]:
            raise ConfigError(f"{shown}: want two different ranks")
        if name not in FORCED:
            raise ConfigError(
                f'{shown}: want "tcp", "torch", or on CUDA "nccl"; the rest is chosen by itself'
            )
        if pair[0] in local and pair[1] in local:
            raise ConfigError(f"{shown}: both ranks are in one process: leave the pair out")
    return dict(transport)
