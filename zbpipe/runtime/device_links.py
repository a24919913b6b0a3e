"""The device's half of channels between ranks on CUDA: made, offered to the peer, connected."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from .. import _native
from ..errors import ConfigError
from .hosts import BRIDGED, Pair

# Up to that many bytes of pinned memory a pair, messages are staged before those ahead of them have
# left: some 8 messages of 8192 tokens of 8192 values of 2 bytes. More would be taken from the rest
# of the host for good, less makes the host wait for the network.
AHEAD = 1 << 30

# CUDA's default number of hardware queues (CUDA C++ Programming Guide, environment variables).
_QUEUES = 8


class DeviceLinks:
    """Links of this process's ranks: `local` and `ipc`, `nccl`, or staged through host memory.

    `offer` and `accept` are called for each pair in one order of the pairs on all ranks; between
    them what `offer` returned travels to the receiver.
    """

    def __init__(
        self, board: Any, cuda: Mapping[int, Any], devices: Mapping[int, int], poison: bool
    ) -> None:
        """`cuda`: native device of each rank of this process; `devices`: its number.

        `departures` and `arrivals`: what somebody has to carry, of staged links, by pair. To be
        emptied by whoever takes them: they hold memory.
        """
        self._board, self._cuda, self._devices = board, cuda, devices
        self._poison = poison
        self._outs: dict[Pair, Any] = {}
        self._connecting: dict[Pair, list[Any]] = {}
        self.departures: dict[Pair, Any] = {}
        self.arrivals: dict[Pair, Any] = {}

    def offer(self, pair: Pair, slots: int, transport: str) -> Any:
        """Make the sender's end; what the receiver needs to know of it."""
        source, target = pair
        if transport == "nccl":
            link = _native.cuda.NcclOut(self._devices[source], target, slots)
            self._connecting.setdefault(pair, []).append(link)
            self._cuda[source].add_out(link)
            return link.id
        if transport in BRIDGED:
            at = (self._board, source, self._devices[source], target, slots)
            link = _native.cuda.StagedOut(*at, AHEAD)
            self.departures[pair] = link.departures
            self._cuda[source].add_out(link)
            return None
        link = self._outs[pair] = _native.cuda.IpcOut(
            self._board, self._devices[source], target, slots
        )
        self._cuda[source].add_out(link)
        return link.fd

    def accept(self, pair: Pair, slots: int, transport: str, pid: int, offered: Any) -> None:
        """Make the receiver's end, of a sender in process `pid`."""
        source, target = pair
        at = (self._board, self._devices[target], source)
        if transport == "nccl":
            link = _native.cuda.NcclIn(self._devices[target], source, slots, offered, self._poison)
            self._connecting.setdefault(pair, []).append(link)
        elif transport in BRIDGED:
            where = (self._board, target, self._devices[target], source, slots)
            link = _native.cuda.StagedIn(*where, self._poison)
            self.arrivals[pair] = link.arrivals
        elif pair in self._outs:
            link = _native.cuda.IpcIn.beside(self._outs[pair], *at, self._poison)
        else:
            link = _native.cuda.IpcIn.open(*at, pid, offered, slots, self._poison)
        self._cuda[target].add_in(link)

    def connect(self, timeout: float, look: Callable[[], None]) -> None:
        """Wait until NCCL's connections stand, at most `timeout` seconds.

        `look` is called meanwhile; it raises when another rank has failed. Raises ConfigError where
        NCCL fails or the time runs out, naming the ranks.
        """
        until = time.monotonic() + timeout
        while self._connecting:
            for pair, links in list(self._connecting.items()):
                try:
                    links[:] = [link for link in links if not link.advance()]
                except RuntimeError as error:
                    raise ConfigError(f"rank {pair[0]} → {pair[1]}: {error}") from error
                if not links:
                    del self._connecting[pair]
            look()
            if self._connecting and time.monotonic() > until:
                a, b = min(self._connecting)
                raise ConfigError(
                    f"rank {a} → {b}: no connection by NCCL within {timeout:g} s; "
                    "NCCL_DEBUG=INFO tells more"
                )
            time.sleep(0.001)


def check_queues(transports: Mapping[Pair, str]) -> None:
    """Raises ConfigError where two lanes of a rank with NCCL links must share a hardware queue.

    `transports`: of all channels. A rank has a lane for each of its channels, one to compute and
    one for tied gradients. A send of NCCL occupies its queue until the receive has begun: two ranks
    that send to each other would wait for ever.
    """
    by_nccl = {rank for pair, name in transports.items() if name == "nccl" for rank in pair}
    if not by_nccl:
        return
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    queues = int(given) if given.isdigit() else _QUEUES
    lanes = {rank: 2 + sum(rank in pair for pair in transports) for rank in sorted(by_nccl)}
    rank = max(lanes, key=lambda r: lanes[r])
    if lanes[rank] > queues:
        value = f"= {queues}" if given.isdigit() else f"is not set, which means {queues}"
        raise ConfigError(
            f"CUDA_DEVICE_MAX_CONNECTIONS {value}: rank {rank} has up to {lanes[rank]} lanes and "
            "transfers by NCCL, which need a hardware queue each: set it to "
            f"{lanes[rank]} or more, at most to 32"
        )
