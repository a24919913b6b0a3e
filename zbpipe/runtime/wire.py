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
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

# What a connector says first: the pipeline's secret, from and to which process, which stream.
_HELLO = struct.Struct("<32sIII")
_WELCOME = b"zbpipe"
_TRY_S = 5.0  # one address; on a network that works an answer takes milliseconds
# Addresses that nobody has (RFC 5737, RFC 3849): on the way there is the default route.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_SIOCGIFADDR = 0x8915  # linux/sockios.h

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
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found.append(_interface(probe, name.strip()))
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


def _interface(probe: socket.socket, name: str) -> str:
    import fcntl

    request = struct.pack("256s", name.encode()[:15])
    return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


class Door:
    """Where other processes connect to this one; open while a pipeline is being connected."""

    def __init__(self, own: int, secret: bytes) -> None:
        """`own`: this process's number; `secret`: 32 bytes that only the pipeline's know."""
        self._own, self._secret = own, secret
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._socket = socket.create_server(("", 0))
        self._came: dict[tuple[int, int], Stream] = {}
        self._arrival = threading.Condition()
        self._thread = threading.Thread(target=self._accept, name="zbpipe door", daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        return local_addresses(), self._socket.getsockname()[1]

    def wait(self, wanted: Collection[tuple[int, int]], seconds: float) -> dict[Any, Stream]:
        """The streams (process, number) that came. Raises ConnectionError if one does not."""
        with self._arrival:
            if not self._arrival.wait_for(lambda: self._came.keys() >= {*wanted}, seconds):
                missing = min({*wanted} - self._came.keys())
                raise ConnectionError(f"process {missing[0]} did not connect in {seconds:g} s")
            return {key: self._came.pop(key) for key in wanted}

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for stream in self._came.values():
            stream.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # the door was closed
                return
            try:
                self._admit(connection)
            except (OSError, ValueError):  # a stranger, or one who went: there may be others
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(_TRY_S)
        said = b""
        while len(said) < _HELLO.size:
            part = connection.recv(_HELLO.size - len(said))
            if not part:
                raise ConnectionError("said nothing")
            said += part
        secret, source, target, number = _HELLO.unpack(said)
        if secret != self._secret or target != self._own:
            raise ValueError("not of this pipeline")
        connection.sendall(_WELCOME)
        with self._arrival:
            before = self._came.pop((source, number), None)
            if before is not None:  # it tried again, by another address
                before.close()
            self._came[source, number] = Stream(connection)
            self._arrival.notify_all()


def connect(
    address: Address, secret: bytes, own: int, peer: int, numbers: Sequence[int], seconds: float
) -> list[Stream]:
    """Streams to process `peer`, one a number. Raises ConnectionError where no address answers."""
    hosts, port = address
    until, tried = time.monotonic() + seconds, []
    for host in hosts:
        made: list[Stream] = []
        try:
            for number in numbers:
                made.append(_knock((host, port), _HELLO.pack(secret, own, peer, number)))
        except OSError as error:
            for stream in made:
                stream.close()
            tried.append(f"{host}: {error}")
            if time.monotonic() > until:
                break
        else:
            return made
    raise ConnectionError(f"no answer at port {port} of {'; '.join(tried)}")


def _knock(address: tuple[str, int], hello: bytes) -> Stream:
    connection = socket.create_connection(address, _TRY_S)
    try:
        connection.sendall(hello)
        answer = b""
        while len(answer) < len(_WELCOME):
            part = connection.recv(len(_WELCOME) - len(answer))
            if not part:
                raise ConnectionError("is not of this pipeline")
            answer += part
        if answer != _WELCOME:  # some other service
            raise ConnectionError("is not of this pipeline")
    except BaseException:
        connection.close()
        raise
    return Stream(connection)
