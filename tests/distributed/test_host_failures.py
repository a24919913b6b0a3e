"""What goes wrong on one host is the same error on every rank of every host, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosting import barrier, everyone, on_hosts, python_threads
from torch import nn

import zbpipe
from cases import WIDTH, mse, regression
from zbpipe import ConfigError, StageError

((X, Y),) = regression((8, WIDTH))


class Fails(nn.Module):
    """An identity whose forward or backward does `what` at the third microbatch of step `step`."""

    def __init__(self, what: Callable[[], None], backward: bool, step: int) -> None:
        super().__init__()
        self.what, self.backward, self.left = what, backward, 4 * step + 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if self.backward:
            x.register_hook(self._look)
        else:
            self._look(x)
        return x

    def _look(self, value: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.what()
        return value


def layers(*extra: nn.Module) -> list[nn.Module]:
    torch.manual_seed(0)
    return [*(nn.Linear(WIDTH, WIDTH).double() for _ in range(4)), *extra]


def wrapped(model: list[nn.Module], timeout: float = 20.0, **options: Any) -> zbpipe.Pipeline:
    given = {"microbatches": 4, "schedule": "zb1p", "loss_fn": mse, "timeout": timeout}
    return zbpipe.wrap(model, **(given | options))


def _raise() -> None:
    raise ArithmeticError("planned")


def _stall() -> None:
    time.sleep(60)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    # It reaches this thread through the main one, which a busy machine may let run a step later;
    # and when the process goes on, it shall hear the news before it is through.
    time.sleep(1)


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # so that the step cannot be over before the main thread has seen it


def _failing(
    rank: int,
    size: int,
    where: int,
    what: Callable[[], None],
    backward: bool,
    timeout: float,
    transport: str | None = None,
) -> None:
    """Fails in the second step on rank `where`. Ends once no thread of a link is left."""
    model = layers()
    model.insert(where + 1, Fails(what, backward, 1))
    sizes = [1] * size
    sizes[where] += 1
    sizes[-1] += 4 - size
    pipe = wrapped(model, timeout, partition=sizes, transport=transport)
    try:
        for _ in range(2):
            pipe.step(X, target=Y)
    finally:
        until = time.monotonic() + 60  # hang guard
        while python_threads() and time.monotonic() < until:
            time.sleep(0.01)
        assert python_threads() == []
        pipe.close()


HOSTS = [("ab", 1), ("ab", 0), ("aabb", 1), ("aabb", 3), ("abc", 1)]


@pytest.mark.parametrize(
    ("hosts", "where", "backward", "transport"),
    [
        *((*row, False, None) for row in HOSTS),
        *(("ab", 1, True, None), ("aabb", 3, True, None)),
        *(("ab", 0, False, "torch"), ("abc", 2, True, "torch")),
    ],
)
def test_an_exception_is_the_same_error_on_every_host(
    tmp_path, hosts, where, backward, transport
) -> None:
    letter = "I" if backward else "F"
    args = (len(hosts), where, _raise, backward, 20.0, transport)
    for outcome in on_hosts(tmp_path, _failing, hosts, *args):
        error = outcome.error
        assert type(error) is StageError, outcome.trace
        assert error.cause == "ArithmeticError: planned"
        assert (error.rank, error.stage, error.action) == (where, where, letter)
        assert error.microbatch == 2


@pytest.mark.parametrize(
    ("hosts", "where", "transport"), [*((*row, None) for row in HOSTS[1:4]), ("ab", 1, "torch")]
)
def test_a_stall_is_named_on_every_host(tmp_path, hosts, where, transport) -> None:
    args = (len(hosts), where, _stall, False, 2.0, transport)
    for outcome in on_hosts(tmp_path, _failing, hosts, *args):
        error = outcome.error
        assert type(error) is StageError, outcome.trace
        assert error.cause == "no progress for 2 s: this action does not return"
        assert (error.rank, error.stage, error.action) == (where, where, "F")
        assert error.microbatch == 2


@pytest.mark.parametrize(
    ("hosts", "where", "transport"),
    [*((*row, None) for row in HOSTS), ("ab", 1, "torch"), ("aab", 1, "torch")],
)
def test_a_rank_that_dies_is_named_on_every_other(tmp_path, hosts, where, transport) -> None:
    args = (len(hosts), where, _die, False, 20.0, transport)
    outcomes = on_hosts(tmp_path, _failing, hosts, *args)
    assert outcomes.pop(where).exitcode == -signal.SIGKILL
    for outcome in outcomes:
        error = outcome.error
        assert type(error) is StageError, outcome.trace
        assert "died" in error.cause
        assert error.rank == where


@pytest.mark.parametrize(
    ("hosts", "where", "transport"),
    [
        ("ab", 1, None),
        pytest.param("ab", 1, "torch", marks=pytest.mark.slow),
        *(pytest.param(*row, None, marks=pytest.mark.slow) for row in HOSTS[1:3]),
    ],
)
def test_a_process_that_does_not_run_is_named_on_every_other(
    tmp_path, hosts, where, transport
) -> None:
    rest = _FrozenRank(where, transport)
    outcomes = on_hosts(tmp_path, rest, hosts, len(hosts))
    frozen = outcomes.pop(where)
    assert type(frozen.error) is StageError, frozen.trace
    for outcome in outcomes:
        error = outcome.error
        assert type(error) is StageError, outcome.trace
        assert error.rank == where
        assert "nothing is heard" in error.cause or "does not" in error.cause


class _FrozenRank:
    """Rank `where` stops itself; the rank before it lets it go on when its own step has ended."""

    def __init__(self, where: int, transport: str | None) -> None:
        self.where, self.transport = where, transport

    def __call__(self, rank: int, size: int) -> None:
        pids: list[Any] = [None] * size
        dist.all_gather_object(pids, os.getpid())
        try:
            _failing(rank, size, self.where, _stop, False, 2.0, self.transport)
        finally:
            if rank == (self.where + 1) % size:
                os.kill(pids[self.where], signal.SIGCONT)


def _sever(pipe: zbpipe.Pipeline, carriers: str) -> None:
    """End one stream of messages, and nothing else."""
    (link,) = pipe._crew._meeting.links.values()
    getattr(link, carriers)[0].stream.sever()


def _severed(rank: int, carriers: str, within: bool) -> None:
    """Rank 1 loses a stream after the first step, or in the second one."""
    pipes: list[zbpipe.Pipeline] = []
    model = layers()
    model.insert(2, Fails(lambda: _sever(pipes[0], carriers), False, 1 if within else 99))
    pipes.append(wrapped(model, partition=[2, 3]))
    pipes[0].step(X, target=Y)
    if rank == 1 and not within:
        _sever(pipes[0], carriers)
    barrier()
    try:
        for _ in range(2):
            pipes[0].step(X, target=Y)
    finally:
        pipes[0].close()
        assert python_threads() == []


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("carriers", ["outgoing", "incoming"])
def test_a_stream_that_breaks_alone_is_named_on_every_host(tmp_path, carriers, within) -> None:
    pair = (1, 0) if carriers == "outgoing" else (0, 1)
    for outcome in on_hosts(tmp_path, _severed, "ab", carriers, within):
        error = outcome.error
        assert type(error) is StageError, outcome.trace
        assert error.rank == pair[0]
        assert error.cause.startswith("the connection from rank {} to rank {} broke".format(*pair))


def _loses_the_last(rank: int) -> None:
    """Rank 1 is through and closes, but its last messages are lost."""
    pipes: list[zbpipe.Pipeline] = []
    last = Fails(lambda: _sever(pipes[0], "outgoing"), False, 0)
    last.left = 4
    model = layers()
    model.insert(2, last)
    pipes.append(wrapped(model, partition=[2, 3]))
    try:
        pipes[0].step(X, target=Y)
    finally:
        pipes[0].close()
        assert python_threads() == []


def test_an_end_with_messages_lost_is_no_end_in_order(tmp_path) -> None:
    waits, _ = on_hosts(tmp_path, _loses_the_last, "ab")
    assert type(waits.error) is StageError, waits.trace
    assert "from rank 1 to rank 0 broke" in waits.error.cause


def test_ctrl_c_on_one_host_ends_all(tmp_path) -> None:
    *others, pressed = on_hosts(tmp_path, _failing, "aab", 3, 2, _interrupt, False, 20.0)
    assert type(pressed.error) is KeyboardInterrupt
    for outcome in others:
        assert type(outcome.error) is StageError
        assert str(outcome.error) == "rank 2: interrupted in step()"


def _small_batch(rank: int) -> None:
    pipe = wrapped(layers())
    pipe.step(X, target=Y)
    n = 3 if rank == 1 else 8
    pipe.step(X[:n], target=Y[:n])


def test_wrong_input_on_one_host_is_a_config_error_on_all(tmp_path) -> None:
    for outcome in on_hosts(tmp_path, _small_batch, "ab"):
        assert type(outcome.error) is ConfigError
        assert "3 samples for microbatches=4" in str(outcome.error)


def _other_batch(rank: int) -> None:
    pipe = wrapped(layers())
    pipe.step(X, target=Y)
    pipe.step(X + rank, target=Y)


def test_batches_that_differ_between_hosts(tmp_path) -> None:
    for outcome in on_hosts(tmp_path, _other_batch, "ab"):
        assert type(outcome.error) is ConfigError
        assert "differs from that of rank" in str(outcome.error)


def _leaves_early(rank: int) -> None:
    pipe = wrapped(layers())
    pipe.step(X, target=Y)
    if rank == 1:
        pipe.close()
    else:
        pipe.step(X, target=Y)


def test_a_rank_that_leaves_before_a_step_is_named(tmp_path) -> None:
    waits, left = on_hosts(tmp_path, _leaves_early, "ab")
    left.get()
    assert type(waits.error) is StageError
    assert str(waits.error) == "rank 1: this rank closed its pipeline before step 1"


def _dies_between_steps(rank: int) -> None:
    pipe = wrapped(layers())
    pipe.step(X, target=Y)
    if rank == 1:
        _die()
    pipe.step(X, target=Y)


def test_a_rank_that_dies_between_steps_is_named(tmp_path) -> None:
    waits, dead = on_hosts(tmp_path, _dies_between_steps, "ab")
    assert dead.exitcode == -signal.SIGKILL
    assert type(waits.error) is StageError
    assert (waits.error.rank, "died" in waits.error.cause) == (1, True)


def _slow_but_moving(rank: int) -> float:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.15)
            return x

    model = layers()
    model.insert(1, Slow())
    return wrapped(model, 0.7, microbatches=8, partition=[2, 3]).step(X, target=Y).item()


def test_a_long_step_that_moves_is_no_stall(tmp_path) -> None:
    everyone(on_hosts(tmp_path, _slow_but_moving, "ab"))


def _sleeps_between(rank: int) -> None:
    """The ranks of one host are away for longer than the timeout, between steps."""
    pipe = wrapped(layers(), 1.5)
    for _ in range(2):
        pipe.step(X, target=Y)
        time.sleep(2.5)
        barrier()  # so that both come to the next step at once, on a busy machine too
    pipe.close()


def test_time_between_steps_is_no_stall(tmp_path) -> None:
    everyone(on_hosts(tmp_path, _sleeps_between, "ab"))


def _ends_abruptly(rank: int) -> None:
    """Ends as multiprocessing does, with a pipeline that nobody closed, while others work."""
    KEPT.append(wrapped(layers()))
    KEPT[-1].step(X, target=Y)


KEPT: list[Any] = []


def test_a_process_of_multiprocessing_ends_in_order(tmp_path) -> None:
    everyone(on_hosts(tmp_path, _ends_abruptly, "abb"))
