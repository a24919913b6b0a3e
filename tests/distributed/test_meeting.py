"""How processes get connected: strangers in the way, and what is said where it does not work."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager

import pytest

from crews import crew_of, forked
from zbpipe.errors import ConfigError
from zbpipe.program import compile
from zbpipe.runtime import meeting, wire
from zbpipe.schedule import build


@contextmanager
def stranger(host, port, says):
    """Another service, which tells everybody the same, whatever they say."""
    with socket.create_server((host, port)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(says)
                    connection.settimeout(5.0)
                    connection.recv(1024)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("says", [b"SSH-2.", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20])
def test_who_chats_is_not_taken_for_the_peer(says) -> None:
    with (
        stranger("127.0.0.1", 0, says) as port,
        pytest.raises(ConnectionError, match=r"127\.0\.0\.1: is not of this pipeline"),
    ):
        wire.connect((["127.0.0.1"], port), os.urandom(32), 1, 0, [0], 1.0)


def _unreachable(world):
    """Rank 2 is given addresses where nobody is; rank 0, of a lower number, only waits for it."""
    os.environ["ZBPIPE_HOST"] = str(world.rank)
    meeting._MEET_S = meeting._ARRIVE_S = 1.0
    real = meeting.connect

    def connect(address, *rest):
        return real((["127.0.0.1"], 1) if world.rank == 2 else address, *rest)

    meeting.connect = connect
    with pytest.raises(ConfigError) as raised:
        crew_of(world, compile(build("1f1b", 3, 3)))
    return str(raised.value)


def test_the_cause_is_named_not_who_waited_for_it() -> None:
    for outcome in forked(_unreachable, 3):
        said = outcome.get()
        assert "process 2 (rank 2) is not connected to process 0 (rank 0)" in said
        assert "no answer at port 1 of 127.0.0.1" in said
        assert "GLOO_SOCKET_IFNAME" in said


def _cut_off(world):
    """The connection stands, and then nothing comes through."""
    os.environ["ZBPIPE_HOST"] = str(world.rank)

    class Silent:
        def __init__(self, *_):
            raise ConnectionError("timed out")

    meeting.Link = Silent
    with pytest.raises(ConfigError) as raised:
        crew_of(world, compile(build("1f1b", 2, 2)))
    return str(raised.value)


def test_a_link_over_which_nothing_comes_is_named() -> None:
    for outcome in forked(_cut_off, 2):
        said = outcome.get()
        assert "is not connected to process 1 (rank 1): timed out; GLOO_SOCKET_IFNAME" in said
