"""How a connection is made: both sides prove that they know the pipeline's secret, and are let in.

    guest ─▶ door   hello: from and to which process, which stream, the visit (a nonce)
    door ─▶ guest   a nonce, and HMAC(secret, "door", hello, nonce)
    guest ─▶ door   HMAC(secret, "guest", hello, nonce), once all streams of the visit are here

The secret itself is never sent (HMAC: RFC 2104). A proof is of one side, one visit and one nonce,
so that none can be used again. Nothing is let in of a visit that was given up halfway.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from .wire import Address, Stream, local_addresses, named_addresses

_HELLO = struct.Struct("<8sIII32s")
_MARK = b"zbpipe/1"  # of this protocol
_NONCE = 32  # bytes, as many as the proof's, SHA-256
_PROOF = 32
_TRY_S = 5.0  # a visit; on a network that works it takes milliseconds
_ADMIT_S = 2 * _TRY_S  # a guest ends its visit before the door does
_NEXT_S = 0.25  # until the next address is tried beside those before (RFC 8305, section 8)
_PAUSE_S = 0.2  # between visits
_LOOK_S = 0.1  # how late a deadline may be seen
_CROWD = 256  # guests that have proved nothing; the oldest go first, and may try again
_JOIN_S = 5.0  # many times _LOOK_S


def _proof(secret: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + hello + nonce, "sha256")


class _Guest:
    """A connection that has proved nothing yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.until = connection, time.monotonic() + _ADMIT_S
        self.hello, self.nonce, self.said = b"", b"", b""


class Door:
    """Where other processes connect to this one; open while a pipeline is being connected."""

    def __init__(self, own: int, secret: bytes) -> None:
        """`own`: this process's number; `secret`: 32 bytes that only the pipeline's know.

        Listens at the interface that GLOO_SOCKET_IFNAME names (the first, of several), else at
        all. Raises ConfigError where it has no address, OSError where nothing can be opened.
        """
        self._own, self._secret = own, secret
        named = named_addresses()
        self._hosts = named[:1] or local_addresses()
        self._socket = _listen(named[0] if named else "")
        self._socket.setblocking(False)
        self._selector = selectors.PollSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._guests: dict[_Guest, None] = {}  # in the order in which they came
        self._came: dict[tuple[int, bytes], dict[int, Stream]] = {}  # by process and visit
        self._arrival = threading.Condition()
        self._trouble: OSError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="zbpipe door", daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        return self._hosts, self._socket.getsockname()[1]

    def wait(self, process: int, numbers: Sequence[int], seconds: float) -> list[Stream]:
        """The streams with these numbers of `process`. Raises ConnectionError where none come."""
        with self._arrival:
            found = self._arrival.wait_for(lambda: self._visit(process, {*numbers}), seconds)
            if not found:
                why = f" (at the door: {self._trouble})" if self._trouble else ""
                raise ConnectionError(f"process {process} did not connect in {seconds:.3g} s{why}")
            return [found.pop(number) for number in numbers]

    def close(self) -> None:
        """Let nobody in any more, and end the connections that nobody took."""
        self._closing = True
        with suppress(OSError):  # wakes the thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_JOIN_S)
        for guest in [*self._guests]:
            self._dismiss(guest)
        self._selector.close()
        self._socket.close()
        for streams in self._came.values():
            for stream in streams.values():
                stream.close()
        self._came.clear()

    def _visit(self, process: int, numbers: set[int]) -> dict[int, Stream] | None:
        for (source, _), streams in self._came.items():
            if source == process and streams.keys() >= numbers:
                return streams
        return None

    # --- the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_LOOK_S):
                if key.data is None:
                    self._open()
                elif key.data in self._guests:
                    self._hear(key.data)
            now = time.monotonic()
            for guest in [guest for guest in self._guests if guest.until < now]:
                self._dismiss(guest)

    def _open(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if self._closing or error.errno in (errno.EAGAIN, errno.ECONNABORTED):
                return  # whoever knocked has gone
            self._trouble = error  # too many open files, say: there may be fewer in a moment
            time.sleep(_LOOK_S)
            return
        connection.setblocking(False)
        if len(self._guests) >= _CROWD:
            self._dismiss(next(iter(self._guests)))
        guest = _Guest(connection)
        self._guests[guest] = None
        self._selector.register(connection, selectors.EVENT_READ, guest)

    def _dismiss(self, guest: _Guest) -> None:
        self._let_go(guest)
        guest.connection.close()

    def _let_go(self, guest: _Guest) -> None:
        del self._guests[guest]
        self._selector.unregister(guest.connection)

    def _hear(self, guest: _Guest) -> None:
        try:
            want = _PROOF if guest.hello else _HELLO.size
            part = guest.connection.recv(want - len(guest.said))
            if not part:
                raise ConnectionError("went without a proof")
            guest.said += part
            if len(guest.said) == want and guest.hello:
                self._admit(guest)
            elif len(guest.said) == want:
                self._answer(guest)
        except BlockingIOError:  # nothing there after all; its time goes on
            return
        except (OSError, ValueError):  # a stranger, or one who went: there may be others
            self._dismiss(guest)

    def _answer(self, guest: _Guest) -> None:
        mark, _, target, _, _ = _HELLO.unpack(guest.said)
        if mark != _MARK or target != self._own:
            raise ValueError("not of this pipeline")
        guest.hello, guest.said, guest.nonce = guest.said, b"", secrets.token_bytes(_NONCE)
        proof = _proof(self._secret, b"door", guest.hello, guest.nonce)
        guest.connection.sendall(guest.nonce + proof)

    def _admit(self, guest: _Guest) -> None:
        proof = _proof(self._secret, b"guest", guest.hello, guest.nonce)
        if not hmac.compare_digest(guest.said, proof):
            raise ValueError("not of this pipeline")
        _, source, _, number, visit = _HELLO.unpack(guest.hello)
        stream = Stream(guest.connection)
        self._let_go(guest)
        with self._arrival:
            self._came.setdefault((source, visit), {})[number] = stream
            self._arrival.notify_all()


def _listen(host: str) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
        )
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


# --- the guest's side -----------------------------------------------------------------------------


class _Knock:
    """A connection to one address that the other side is to prove."""

    def __init__(self, host: str, port: int, secret: bytes, hello: bytes) -> None:
        self.host, self._secret, self._hello = host, secret, hello
        self._heard, self._greeted = b"", False
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        self.connection = socket.socket(family, kind, protocol)
        self.connection.setblocking(False)
        failed = self.connection.connect_ex(address)
        if failed not in (0, errno.EINPROGRESS):
            self.connection.close()
            raise OSError(failed, os.strerror(failed))

    @property
    def event(self) -> int:
        return selectors.EVENT_READ if self._greeted else selectors.EVENT_WRITE

    def go_on(self) -> bool:
        """Do what can be done now; whether the other side has proved itself. Raises OSError."""
        if not self._greeted:
            failed = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            self.connection.sendall(self._hello)
            self._greeted = True
            return False
        part = self.connection.recv(_NONCE + _PROOF - len(self._heard))
        self._heard += part
        if part and len(self._heard) < _NONCE + _PROOF:
            return False
        nonce, proof = self._heard[:_NONCE], self._heard[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"door", self._hello, nonce)):
            raise ConnectionError("is not of this pipeline")
        return True

    def prove(self) -> None:
        nonce = self._heard[:_NONCE]
        self.connection.sendall(_proof(self._secret, b"guest", self._hello, nonce))


class _Round:
    """One hello to several addresses: the first at once, others beside it while it is silent."""

    def __init__(self, hosts: Sequence[str], port: int, secret: bytes, hello: bytes) -> None:
        self._hosts, self._rest = [*hosts], (port, secret, hello)
        self._selector = selectors.PollSelector()
        self._knocks: list[_Knock] = []
        self._failed: list[str] = []

    def first(self, until: float) -> _Knock:
        """The first that proves itself; others are closed. Raises ConnectionError at `until`."""
        winner, due = None, 0.0
        try:
            while winner is None:
                now = time.monotonic()
                if self._hosts and (now >= due or not self._knocks):
                    self._try(self._hosts.pop(0))
                    due = now + _NEXT_S
                elif now >= until or not self._knocks:
                    late = [f"{one.host}: timed out" for one in self._knocks]
                    raise ConnectionError("; ".join([*self._failed, *late]))
                else:
                    winner = self._listen((min(due, until) if self._hosts else until) - now)
            return winner
        finally:
            for one in self._knocks:
                if one is not winner:
                    one.connection.close()
            self._selector.close()

    def _try(self, host: str) -> None:
        try:
            one = _Knock(host, *self._rest)
        except OSError as error:
            self._failed.append(f"{host}: {error}")
            return
        self._knocks.append(one)
        self._selector.register(one.connection, one.event, one)

    def _listen(self, seconds: float) -> _Knock | None:
        for key, _ in self._selector.select(seconds):
            one: _Knock = key.data
            try:
                if one.go_on():
                    return one
                self._selector.modify(one.connection, one.event, one)
            except BlockingIOError:
                continue
            except OSError as error:
                self._failed.append(f"{one.host}: {error}")
                self._selector.unregister(one.connection)
                self._knocks.remove(one)
                one.connection.close()
        return None


def connect(
    address: Address, secret: bytes, own: int, peer: int, numbers: Sequence[int], seconds: float
) -> list[Stream]:
    """Streams to process `peer`, one a number, all by the same of its addresses.

    Tries again until `seconds` are over; then raises ConnectionError, which tells of each address.
    """
    hosts, port = address
    until = time.monotonic() + seconds
    while True:
        visit = secrets.token_bytes(_NONCE)
        hellos = [_HELLO.pack(_MARK, own, peer, number, visit) for number in numbers]
        try:
            return _visit(hosts, port, secret, hellos, min(until, time.monotonic() + _TRY_S))
        except OSError as error:
            if time.monotonic() + _PAUSE_S >= until:
                raise ConnectionError(f"no answer at port {port} of {error}") from error
        time.sleep(_PAUSE_S)


def _visit(
    hosts: Sequence[str], port: int, secret: bytes, hellos: Sequence[bytes], until: float
) -> list[Stream]:
    knocks: list[_Knock] = []
    try:
        for hello in hellos:
            knocks.append(_Round(hosts, port, secret, hello).first(until))
            hosts = [knocks[0].host]  # what works is kept
        for one in knocks:
            one.prove()
    except BaseException:
        for one in knocks:
            one.connection.close()
        raise
    return [Stream(one.connection) for one in knocks]
