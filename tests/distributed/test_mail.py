"""Messages by torch.distributed: what is said where they do not come, and who waits how long."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosting import barrier, everyone, on_hosts
from torch import nn

import zbpipe
from cases import WIDTH, mse, regression
from zbpipe.errors import ConfigError, StageError
from zbpipe.runtime import mail as mail_module
from zbpipe.runtime.mail import Mail, Post
from zbpipe.runtime.wire import Stream

((X, Y),) = regression((8, WIDTH))
_HANG_S = 60.0  # guard; what is tested ends long before, or never


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def mail_of(rank: int, ends: tuple[socket.socket, socket.socket], timeout: float) -> Mail:
    post = Post()
    mail = post.mail(Stream(ends[rank]), 1 - rank, 1, timeout)
    post.seal()
    return mail


def said(wait: Callable[[], None]) -> str:
    """What a wait that is in vain says, in a thread that must not stay."""
    errors = []

    def run() -> None:
        with pytest.raises(ConnectionError) as raised:
            wait()
        errors.append(str(raised.value))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_HANG_S)
    assert not thread.is_alive() and errors
    return str(errors[0])


def _severed(rank: int, ends: Any, waits: str, size: int) -> str:
    """Rank 0 waits for its peer's part of a message, which does not come, and severs the mail."""
    mail = mail_of(rank, ends, 10 * _HANG_S)
    memory = bytearray(size)
    if rank == 1:
        # As far as rank 0 knows there is a peer which does its part.
        if waits == "send":
            mail._stream.send(b"!")
        barrier()
        return ""
    timer = threading.Timer(0.3, mail.sever)
    timer.start()
    if waits == "send":
        words = said(lambda: mail.send(b"head", memory))
    else:
        words = said(lambda: mail.receive_payload(memory))
    timer.join()
    assert said(lambda: mail.send(b"head", memory))
    barrier()
    mail.close()
    return words


@pytest.mark.parametrize("size", [10, 64 << 20])
@pytest.mark.parametrize("waits", ["send", "receive"])
@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_whoever_waits_for_bytes_is_woken(tmp_path, monkeypatch, waits, size, interfaces) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    words, _ = everyone(on_hosts(tmp_path, _severed, "ab", connection(), waits, size))
    assert "closure" in words  # of the pair, in gloo's words


def _dies(rank: int, ends: Any, how: int) -> str:
    """Rank 1 ends, or stands still, with part of a long message under way."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    mail = mail_of(rank, ends, 2.0)
    memory = bytearray(512 << 20)
    if rank == 1:
        real = dist.isend

        def isend(*args: Any, **kwargs: Any) -> Any:
            work = real(*args, **kwargs)
            os.kill(os.getpid(), how)
            time.sleep(_HANG_S)
            return work

        dist.isend = isend
        mail.send(b"head", memory)
    head = bytearray(4)
    mail.receive(head)
    words = said(lambda: mail.receive_payload(memory))
    if how == signal.SIGSTOP:
        os.kill(pids[1], signal.SIGKILL)
    mail.close()
    return words


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_bytes_that_stop_on_the_way_are_given_up(tmp_path, how) -> None:
    waits, dead = on_hosts(tmp_path, _dies, "ab", connection(), how)
    assert dead.exitcode == -signal.SIGKILL
    assert waits.get()  # in gloo's words: a reset, an end, or its time


def _freezes(rank: int) -> tuple[int, str]:
    """Rank 1 stands still with bytes on their way, while rank 0 still has much to do."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    busy = [0.0]

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(busy[0])
            return x * 1.0

    model = [Slow(), *layers()]
    pipe = zbpipe.wrap(
        model, 8, "gpipe", loss_fn=mse, transport="torch", timeout=2.0, partition=[2, 1]
    )
    pipe.step(X, target=Y)
    barrier()
    if rank == 1:
        real = dist.irecv

        def irecv(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(_HANG_S)
            return real(*args, **kwargs)

        dist.irecv = irecv
    busy[0] = 0.7
    with pytest.raises(StageError) as raised:
        pipe.step(X, target=Y)
    os.kill(pids[1], signal.SIGKILL)
    pipe.close()
    return raised.value.rank, raised.value.cause


@pytest.mark.slow
def test_a_peer_that_stands_still_within_a_message_is_named(tmp_path) -> None:
    waits, _ = on_hosts(tmp_path, _freezes, "ab")
    rank, cause = waits.get()
    assert rank == 1
    assert "nothing is heard of this rank" in cause


def test_a_message_goes_in_parts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mail_module, "_PART", 1000)
    assert everyone(on_hosts(tmp_path, _in_parts, "ab", connection())) == [0, 11]


def _in_parts(rank: int, ends: Any) -> int:
    """How many there were."""
    mail, count = mail_of(rank, ends, 20.0), 0
    content = bytes(range(256)) * 40
    if rank == 0:
        mail.send(b"head", memoryview(bytearray(content)))
    else:
        real = dist.irecv

        def irecv(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return real(*args, **kwargs)

        dist.irecv = irecv
        got = bytearray(len(content))
        mail.receive(bytearray(4))
        mail.receive_payload(got)
        dist.irecv = real
        assert got == content
    barrier()
    mail.close()
    return count


def test_without_a_job_there_is_no_mail() -> None:
    with pytest.raises(ConfigError, match=r"needs torch\.distributed"):
        Post()


def _another_backend(rank: int) -> tuple[float, list[str]]:
    """The loss of a step, and which groups of a backend that torch does not know were made."""
    made = []

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        made.append("another")
        return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]

    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.Backend.register_backend("another", create, devices=["cpu"])
    dist.init_process_group(
        "cpu:another", store=dist.PrefixStore("again", store), rank=rank, world_size=2
    )
    assert made.pop() == "another"
    pipe = zbpipe.wrap(layers(), 4, "1f1b", loss_fn=mse, transport="torch")
    loss = pipe.step(X, target=Y).item()
    assert "rank 0 → 1: torch" in pipe.summary()
    pipe.close()
    return loss, made


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]


def test_bytes_go_by_the_backend_that_the_job_has(tmp_path) -> None:
    want = mse(nn.Sequential(*layers())(X), Y).item()
    for loss, made in everyone(on_hosts(tmp_path, _another_backend, "ab")):
        assert loss == pytest.approx(want, rel=1e-12)
        assert made == ["another"]
