"""Who is let in at a process's door: strangers who chat, say nothing or drip, and old proofs."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hosting import python_threads

from crews import crew_of, forked
from zbpipe.errors import ConfigError
from zbpipe.program import compile
from zbpipe.runtime import door as doors
from zbpipe.runtime.door import Door, connect
from zbpipe.schedule import build

_HANG_S = 60
SECRET = bytes(range(32))
LESS_THAN_A_TRY = doors._TRY_S / 2  # seconds in which one silent address may not be waited for


@pytest.fixture
def door(monkeypatch):
    """At the loopback, whose other addresses are then free for strangers at the same port."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    door = Door(0, SECRET)
    yield door
    door.close()
    assert python_threads() == []


@contextmanager
def stranger(says, host="127.0.0.2", port=0):
    """Another service, which tells everybody the same; gives its port and what it was told."""
    told = []

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(_HANG_S)
                if says:
                    connection.sendall(says)
                while True:
                    try:
                        part = connection.recv(1024)
                    except OSError:
                        break
                    if not part:
                        break
                    told.append(part)

    with socket.create_server((host, port)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], told
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def gone(connection) -> bool:
    """Wait for the other side to end it."""
    connection.settimeout(_HANG_S)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def knock(door):
    return socket.create_connection(("127.0.0.1", door.address[1]))


def test_what_is_let_in_is_a_stream_of_the_pipeline(door) -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: is not of this pipeline"):
        connect(door.address, os.urandom(32), 1, 0, [0], 0.5)
    names, port = door.address
    (ours,) = connect((["192.0.2.1.invalid", *names], port), SECRET, 1, 0, [7], _HANG_S)
    (theirs,) = door.wait(1, [7], _HANG_S)
    with pytest.raises(ConnectionError, match="process 2 did not connect"):
        door.wait(2, [0], 0.1)
    ours.send(b"ab", b"", b"c" * 1000)
    got = bytearray(1002)
    theirs.receive(got)
    assert got == b"ab" + b"c" * 1000
    woken = []

    def reader():
        with pytest.raises(ConnectionError):
            theirs.receive(bytearray(1))
        woken.append(True)

    thread = threading.Thread(target=reader)
    thread.start()
    theirs.sever()
    thread.join(_HANG_S)
    assert woken
    with pytest.raises(ConnectionError):
        ours.receive(bytearray(1))
    for stream in (ours, theirs):
        stream.close()


@pytest.mark.parametrize("says", [b"zbpipe", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20, b""])
def test_a_stranger_at_the_first_address_is_passed_by(door, says) -> None:
    names, port = door.address
    assert names == ["127.0.0.1"]
    with stranger(says, port=port) as (_, told):
        hosts = ["127.0.0.2", *names]
        mine = connect((hosts, port), SECRET, 1, 0, [0, 1, 2], LESS_THAN_A_TRY)
        theirs = door.wait(1, [0, 1, 2], _HANG_S)
        for stream in (*mine, *theirs):
            stream.close()
    assert SECRET not in b"".join(told)


def test_strangers_who_say_nothing_or_drip_keep_nobody_out(door) -> None:
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(knock(door))
            stack.enter_context(knock(door)).sendall(b"z")
        mine = connect(door.address, SECRET, 1, 0, [0, 1], LESS_THAN_A_TRY)
        for stream in (*mine, *door.wait(1, [0, 1], _HANG_S)):
            stream.close()


def test_whoever_drips_has_one_deadline_for_all(door, monkeypatch) -> None:
    monkeypatch.setattr(doors, "_ADMIT_S", 0.5)
    with knock(door) as slow:
        hello = doors._HELLO.pack(doors._MARK, 1, 0, 0, bytes(32))
        sent = 0
        try:
            for byte in hello:
                slow.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        except ConnectionError:
            pass
        assert sent < len(hello)


def test_a_crowd_of_strangers_gives_way(door, monkeypatch) -> None:
    monkeypatch.setattr(doors, "_CROWD", 3)
    monkeypatch.setattr(doors, "_ADMIT_S", 60.0 * _HANG_S)
    with ExitStack() as stack:
        crowd = [stack.enter_context(knock(door)) for _ in range(8)]
        assert all(gone(one) for one in crowd[:5])
        (mine,) = connect(door.address, SECRET, 1, 0, [0], LESS_THAN_A_TRY)
        for stream in (mine, *door.wait(1, [0], _HANG_S)):
            stream.close()


def test_closing_sends_away_who_is_still_at_the_door() -> None:
    door = Door(0, SECRET)
    with knock(door) as silent:
        while not door._guests:
            time.sleep(0.01)
        door.close()
        assert gone(silent)
    assert python_threads() == []


@pytest.mark.parametrize("proof", ["the door's own", "of another visit", "nothing"])
def test_a_proof_is_good_once(door, proof) -> None:
    def enter(hello, answer):
        with knock(door) as one:
            one.sendall(hello)
            heard = one.recv(64, socket.MSG_WAITALL)
            one.sendall(answer(heard))
            return heard, gone(one)

    hello = doors._HELLO.pack(doors._MARK, 1, 0, 0, os.urandom(32))
    nonce = os.urandom(32)
    known = {
        "the door's own": lambda heard: heard[32:],
        "of another visit": lambda _: doors._proof(SECRET, b"guest", hello, nonce),
        "nothing": lambda _: bytes(32),
    }
    assert enter(hello, known[proof])[1]
    with pytest.raises(ConnectionError, match="process 1 did not connect"):
        door.wait(1, [0], 0.1)


def test_nothing_is_taken_of_a_visit_that_was_given_up(door, monkeypatch) -> None:
    first, calls = doors._Round.first, []

    def second_fails(self, until):
        calls.append(self)
        if len(calls) % 2 == 0:
            raise ConnectionError("gave up")
        return first(self, until)

    with monkeypatch.context() as patched:
        patched.setattr(doors._Round, "first", second_fails)
        with pytest.raises(ConnectionError, match="gave up"):
            connect(door.address, SECRET, 1, 0, [0, 1], 0.1)
    assert len(calls) >= 2
    with pytest.raises(ConnectionError, match="process 1 did not connect"):
        door.wait(1, [0], 0.2)
    mine = connect(door.address, SECRET, 1, 0, [0, 1], _HANG_S)
    for stream in (*mine, *door.wait(1, [0, 1], _HANG_S)):
        stream.close()


def test_a_door_that_opens_late_is_tried_again(monkeypatch) -> None:
    made = []
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = (["127.0.0.1"], place.getsockname()[1])
        guest = threading.Thread(
            target=lambda: made.extend(connect(address, SECRET, 1, 0, [0], _HANG_S))
        )
        guest.start()
        time.sleep(0.5)  # some visits are refused
        place.listen()
        monkeypatch.setattr(doors, "_listen", lambda _: place)
        door = Door(0, SECRET)
        guest.join()
        for stream in (*made, *door.wait(1, [0], _HANG_S)):
            stream.close()
        door.close()


def test_too_many_open_files_are_told_of_and_outlived(door) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early:
        free = os.dup(0)  # the lowest number that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            early.connect(("127.0.0.1", door.address[1]))
            with pytest.raises(ConnectionError, match=r"at the door: .*Too many open files"):
                door.wait(1, [0], 0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        (mine,) = connect(door.address, SECRET, 1, 0, [0], _HANG_S)
        for stream in (mine, *door.wait(1, [0], _HANG_S)):
            stream.close()


def test_an_interface_that_is_named_is_the_only_way_in(door) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", door.address[1]))


def test_an_interface_with_no_address_but_of_ipv6_will_do(monkeypatch) -> None:
    table = Path("/proc/net/if_inet6")
    if not table.exists() or " lo\n" not in table.read_text():
        pytest.skip("no IPv6 here")

    def no_address(*_):
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(fcntl, "ioctl", no_address)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    door = Door(0, SECRET)
    assert door.address[0] == ["::1"]
    (mine,) = connect(door.address, SECRET, 1, 0, [0], _HANG_S)
    for stream in (mine, *door.wait(1, [0], _HANG_S)):
        stream.close()
    door.close()


@pytest.mark.parametrize("name", ["nope", "lo,nope", "longer-than-any-interface"])
def test_no_interface_stands_in_for_one_that_is_not_there(monkeypatch, name) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    with pytest.raises(ConfigError, match=f"{name.rpartition(',')[2]} is not there"):
        Door(0, SECRET)
    assert python_threads() == []


def _misspelt(world):
    os.environ["ZBPIPE_HOST"] = str(world.rank)
    if world.rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "eht0"
    with pytest.raises(ConfigError) as raised:
        crew_of(world, compile(build("1f1b", 2, 2)))
    return str(raised.value)


def test_an_interface_that_is_not_there_is_named() -> None:
    for outcome in forked(_misspelt, 2):
        said = outcome.get()
        assert "GLOO_SOCKET_IFNAME = 'eht0': the network interface eht0 is not there" in said
        assert "lo" in said.partition("want one with an address, of ")[2].split(", ")
