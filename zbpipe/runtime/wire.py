"""Connections between processes that share no memory: TCP, opened for one pipeline.

Not torch.distributed's own messages: gloo forgets whoever waits for a message that is half there
when the connection breaks, and offers no way to wake a waiter. A socket that is shut down wakes
everybody at once.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import suppress
from typing import Any

from ..errors import ConfigError

# Addresses that nobody has (RFC 5737, RFC 3849): on the way there is the default route.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NAME_LIMIT = 15  # bytes: IFNAMSIZ of linux/if.h without the 0 at the end
_USABLE = ("00", "10")  # scopes in /proc/net/if_inet6 (net/ipv6.h): global, host

Address = tuple[list[str], int]  # hosts to try, port


class Stream:
    """One connection. Every error is a ConnectionError, the peer's end too."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit(self, seconds: float | None) -> None:
        """How long anything may take from now on; None: until the connection ends."""
        self._socket.settimeout(seconds)

    def roomy(self, nbytes: int) -> None:
        """Let the system hold that much at least for a peer that does not listen."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def send(self, *parts: Any) -> None:
        """Send the bytes of all parts, and return when the system has them."""
        views = [memoryview(part).cast("B") for part in parts]
        try:
            sent = self._socket.sendmsg(views)
            for view in views:
                if sent < len(view):
                    self._socket.sendall(view[sent:])
                sent = max(0, sent - len(view))
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def receive(self, into: Any) -> None:
        """Fill `into` with what comes next."""
        view = memoryview(into).cast("B")
        try:
            while view:
                count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
                if count == 0:
                    raise ConnectionError("the connection was closed at the other end")
                view = view[count:]
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def receive_payload(self, into: Any) -> None:
        """What belongs to the last head comes the same way."""
        self.receive(into)

    def writable(self, seconds: float) -> bool:
        """Whether a few kilobytes can be sent without waiting, within `seconds`."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            return bool(poll.poll(seconds * 1e3))
        except (OSError, ValueError) as error:
            raise ConnectionError(str(error)) from error

    def sever(self) -> None:
        """End the connection: whoever waits at either side is woken by ConnectionError."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back, when nobody uses it any more."""
        self._socket.close()


def local_addresses() -> list[str]:
    """Where other hosts may find this one, likeliest first.

    The interface that GLOO_SOCKET_IFNAME names; those by which MASTER_ADDR, and hosts elsewhere,
    are reached; what the host's name stands for; and the loopback, for processes that only seem to
    be on different hosts.
    """
    found: list[str] = []
    with suppress(ConfigError):  # the door says so
        found += named_addresses()
    master = os.environ.get("MASTER_ADDR", "")
    for target in (*([master] if master else []), *_ELSEWHERE):
        for family, kind, protocol, _, address in _resolve(target):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: looks up the route, sends nothing
                found.append(probe.getsockname()[0])
    found += [row[4][0] for row in _resolve(socket.gethostname())]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _resolve(name: str) -> list[Any]:
    try:
        return list(socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM))
    except OSError:  # a name that nobody knows is no address
        return []


def named_addresses() -> list[str]:
    """The addresses of the interfaces that GLOO_SOCKET_IFNAME names, IPv4 before IPv6.

    Raises ConfigError where one is not there or has no address that other hosts can use.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    return [_interface(name) for name in map(str.strip, names) if name]


def _interface(name: str) -> str:
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if len(name.encode()) <= _NAME_LIMIT:
            request = struct.pack("256s", name.encode())
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as table:  # not there without IPv6
        for address, _, _, scope, _, device in map(str.split, table):
            if device == name and scope in _USABLE:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    there = [device for _, device in socket.if_nameindex()]
    why = "has no address" if name in there else "is not there"
    raise ConfigError(
        f"GLOO_SOCKET_IFNAME = {os.environ['GLOO_SOCKET_IFNAME']!r}: the network interface {name} "
        f"{why} on host {socket.gethostname()}; want one with an address, of {', '.join(there)}"
    )
