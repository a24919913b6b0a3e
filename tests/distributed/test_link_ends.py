"""How links end that have several peers, or no threads."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from hosting import python_threads

from zbpipe import _native
from zbpipe.runtime import link, wire

_HANG_S = 60


def _linked(board: Any) -> tuple[link.Link, link.Link]:
    """A link that was started, and its peer, which does nothing by itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = wire.Stream(socket.create_connection(server.getsockname()))
        theirs = wire.Stream(server.accept()[0])
    made: list[link.Link] = []
    other = _native.Board.create(2)
    job = threading.Thread(target=lambda: made.append(link.Link(other, theirs, 1, 1, [0], 9.0)))
    job.start()
    near = link.Link(board, ours, 0, 0, [1], 9.0)
    job.join()
    near.start()
    return near, made[0]


def test_all_links_say_that_they_end_before_an_answer_is_awaited(monkeypatch) -> None:
    monkeypatch.setattr(link, "_ANSWER_S", float(_HANG_S))
    board = _native.Board.create(2)
    board.place_elsewhere(1)
    pairs = [_linked(board) for _ in range(3)]
    closing = threading.Thread(target=link.close_all, args=([near for near, _ in pairs],))
    closing.start()
    for _, far in pairs:
        while far._hear() != link._LEAVING:
            pass
    for _, far in pairs:
        assert far._say(link._HEARD, 1.0)
    closing.join()
    assert board.failure() is None
    assert python_threads() == []
    for _, far in pairs:
        far.close()


def test_what_a_late_thread_uses_is_given_back_when_it_ends() -> None:
    """A backend of torch.distributed may hold a thread for longer than a close waits."""
    near, far = _linked(_native.Board.create(2))
    near._end()
    goes = threading.Event()
    late = threading.Thread(target=goes.wait, args=(_HANG_S,))
    late.start()
    near._threads.append(late)
    near.free(time.monotonic())
    assert near._stream._socket.fileno() != -1
    goes.set()
    until = time.monotonic() + _HANG_S
    while near._stream._socket.fileno() != -1 or python_threads():
        assert time.monotonic() < until
        time.sleep(0.01)
    far.close()


def test_a_link_whose_threads_do_not_start_is_ended(monkeypatch) -> None:
    board = _native.Board.create(2)
    left, right = _linked(board)
    left.close()
    monkeypatch.setattr(link.threading.Thread, "start", _no_more_threads)
    with pytest.raises(RuntimeError, match="no more threads"):
        right.start()
    right.close()


def _no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("no more threads")
