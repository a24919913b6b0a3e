"""Pipelines over several hosts, here processes that are told to share no memory."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from typing import Any

import pytest
import torch
from hosting import barrier, everyone, native_threads, on_hosts, python_threads, sockets
from torch import nn

import zbpipe
from cases import CASES, WIDTH, mse, regression
from crews import lane_threads, shared_files
from unsplit import assert_same_gradients, gradients, reference
from zbpipe import ConfigError

((X, Y),) = regression((8, WIDTH))

# Of what cases.py has: message shapes that change, several tensors, none, strides, dtypes.
SOME = {
    *("uneven", "ignored", "frozen_first", "several_outputs", "trees", "shapes"),
    *("sometimes_unused", "no_gradient_in_some", "bf16_boundary", "changing"),
}


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]


def _same_as_unsplit(
    rank: int,
    count: int,
    schedules: tuple[str, ...],
    chunks: int,
    names: set[str],
    transport: str | None,
) -> None:
    for case in CASES:
        if case.name not in names:
            continue
        m = 2 * count + 1
        if not case.fits(count * chunks, m):
            continue
        want, want_losses = reference(case, m)
        first: Any = None
        for schedule in schedules:
            pipe = zbpipe.wrap(
                case.build(),
                microbatches=m,
                schedule=schedule,
                partition=case.split(count * chunks),
                loss_fn=case.loss_fn,
                loss_weight=case.loss_weight,
                timeout=30.0,
                transport=transport,
            )
            losses = [pipe.step(x, target=y) for x, y in case.batches()]
            got = gradients(pipe.named_parameters())
            assert_same_gradients(got, want, case.tolerance)
            for loss, expected in zip(losses, want_losses, strict=True):
                error = abs(loss - expected)
                assert error <= max(case.tolerance, 1e-12) * abs(expected)
            first = first or (got, losses)
            assert all(torch.equal(a, b) for a, b in zip(losses, first[1], strict=True))
            pipe.close()
            assert lane_threads() == shared_files() == python_threads() == []


@pytest.mark.parametrize(
    ("hosts", "schedules", "chunks", "names", "transport"),
    [
        ("ab", ("1f1b", "zb1p"), 1, {case.name for case in CASES}, None),
        ("abcd", ("1f1b", "zb2p"), 1, SOME, None),
        ("aabb", ("gpipe", "zb1p"), 1, SOME, None),
        ("ab", ("zb_v", "interleaved"), 2, SOME, None),
        ("aab", ("zb1p",), 1, SOME, "torch"),
        ("ab", ("zb_v",), 2, SOME, "torch"),
    ],
    ids=["ab", "abcd", "aabb", "ab-chunked", "aab-torch", "ab-chunked-torch"],
)
def test_every_feature_over_hosts(tmp_path, hosts, schedules, chunks, names, transport) -> None:
    args = (len(hosts), schedules, chunks, names, transport)
    everyone(on_hosts(tmp_path, _same_as_unsplit, hosts, *args))


def _many_steps(rank: int) -> tuple[list[float], dict[str, str]]:
    """Steps back to back, of changing shapes, with evaluations and an optimizer in between."""
    torch.manual_seed(1)
    pipe = zbpipe.wrap(layers(), 4, "zb2p", loss_fn=mse, example=X)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for i in range(12):
        x = X.roll(i, 0)[: 8 - i % 3]
        losses.append(pipe.step(x, target=Y[: len(x)]).item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if i % 4 == 3:
            losses.append(pipe.eval_step(x, target=Y[: len(x)]).item())
    timeline = pipe.timeline()
    assert {span.rank for span in timeline.spans} == {0, 1, 2}
    ends = {(s.lane == "compute", s.action): s.end for s in timeline.spans}
    arrivals = [s for s in timeline.spans if s.lane.startswith("recv")]
    assert arrivals
    # Clocks of different hosts are brought together: nothing arrives long before it was made.
    assert all(s.end > ends[True, s.action] - 0.002 for s in arrivals)
    lines = [line for line in pipe.summary().splitlines() if "→" in line and ": " in line]
    return losses, dict(line.rsplit(": ", 1) for line in lines)


def test_steps_with_an_optimizer_agree_on_every_host(tmp_path) -> None:
    (first, shown), *rest = everyone(on_hosts(tmp_path, _many_steps, "aab"))
    assert all(losses == first for losses, _ in rest)
    assert shown == {"rank 0 → 1": "shm", "rank 1 → 0": "shm"}
    assert rest[1][1] == {"rank 1 → 2": "tcp", "rank 2 → 1": "tcp"}
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    want = []
    for i in range(12):
        x = X.roll(i, 0)[: 8 - i % 3]
        loss = mse(model(x), Y[: len(x)])
        loss.backward()
        want.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if i % 4 == 3:
            want.append(mse(model(x), Y[: len(x)]).item())
    assert first == pytest.approx(want, rel=1e-10)


def _chosen(rank: int, transport: Any) -> dict[tuple[int, int], str]:
    pipe = zbpipe.wrap(layers(), 4, "zb1p", loss_fn=mse, transport=transport)
    want, _ = reference_losses(2)
    assert [pipe.step(X, target=Y).item() for _ in range(2)] == pytest.approx(want)
    assert pipe._crew is not None
    return pipe._crew.transports()


def reference_losses(count: int) -> tuple[list[float], nn.Module]:
    model = nn.Sequential(*layers())
    return [mse(model(X), Y).item() for _ in range(count)], model


@pytest.mark.parametrize(
    ("transport", "forward", "back"),
    [
        ("tcp", "tcp", "tcp"),
        ({(0, 1): "tcp"}, "tcp", "shm"),
        ({(1, 0): "torch"}, "shm", "torch"),
        ({(0, 1): "tcp", (1, 0): "torch"}, "tcp", "torch"),
        (None, "shm", "shm"),
    ],
)
def test_a_transport_is_chosen_by_an_argument(tmp_path, transport, forward, back) -> None:
    for found in everyone(on_hosts(tmp_path, _chosen, "aa", transport)):
        assert found == {(0, 1): forward, (1, 0): back}


def _nccl_on_the_cpu(rank: int) -> None:
    zbpipe.wrap(layers(), 4, "zb1p", loss_fn=mse, transport={(1, 0): "nccl"}).step(X, target=Y)


def test_nccl_is_for_cuda(tmp_path) -> None:
    for outcome in on_hosts(tmp_path, _nccl_on_the_cpu, "aa"):
        assert type(outcome.error) is ConfigError
        assert (
            "transport of rank 1 → 0 = 'nccl': the ranks are on the CPU, want 'tcp' or 'torch'"
            in str(outcome.error)
        )


def test_ranks_of_one_process_hand_over_in_place() -> None:
    pipe = zbpipe.wrap(layers(), 4, "zb1p", loss_fn=mse, local_ranks=2, transport="tcp")
    pipe.step(X, target=Y)
    assert "rank 0 → 1: local" in pipe.summary()
    pipe.close()


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        ("rdma", r"transport = 'rdma': want None, \"tcp\", \"torch\", on CUDA \"nccl\", or"),
        (3, r"transport is a int: want None, \"tcp\""),
        ({(0, 1): "shm"}, r"\(0, 1\): 'shm'\}: want \"tcp\""),
        ({(0, 2): "tcp"}, r"\(0, 2\): 'tcp'\}: want two ranks from 0 to 1"),
        ({(1, 1): "tcp"}, "want two different ranks"),
        ({"0,1": "tcp"}, r"'0,1': 'tcp'\}: want None"),
        ({(0, True): "tcp"}, "want two ranks from 0 to 1"),
        ({(0, 1): "tcp"}, "both ranks are in one process: leave the pair out"),
    ],
)
def test_a_transport_that_cannot_be(transport, message) -> None:
    with pytest.raises(ConfigError, match=message):
        zbpipe.wrap(layers(), 4, "zb1p", loss_fn=mse, local_ranks=2, transport=transport)


def _other_transport(rank: int, first: Any, second: Any) -> None:
    zbpipe.wrap(layers(), 4, "zb1p", loss_fn=mse, transport=second if rank else first)


def test_a_transport_is_agreed_on(tmp_path) -> None:
    for outcome in on_hosts(tmp_path, _other_transport, "aa", None, {(0, 1): "tcp"}):
        assert type(outcome.error) is ConfigError
        assert "rank 1 wraps another model or other arguments than rank 0" in str(outcome.error)
        assert "transport {(0, 1): 'tcp'}" in str(outcome.error)


def test_a_wrong_transport_of_one_rank_is_an_error_on_all(tmp_path) -> None:
    for outcome in on_hosts(tmp_path, _other_transport, "aa", None, "udp"):
        assert type(outcome.error) is ConfigError
        assert "transport = 'udp'" in str(outcome.error)


def _left_behind(rank: int, transport: str) -> None:
    def found() -> tuple[Any, ...]:
        gc.collect()
        return native_threads(), sockets(), shared_files(), python_threads()

    before: Any = None
    for i in range(7):
        pipe = zbpipe.wrap(layers(), 4, "1f1b", loss_fn=mse, transport=transport)
        pipe.step(X, target=Y)
        assert f": {transport}\n" in pipe.summary()
        if i % 2:
            pipe.close()
        else:
            del pipe  # collected as garbage
        if i == 1:
            before = found()  # torch and gloo have started what they keep
        assert i < 2 or found() == before
    barrier()  # a rank that goes takes the job's own sockets with it


@pytest.mark.parametrize("transport", ["tcp", "torch"])
def test_nothing_is_left_of_many_pipelines_in_one_job(tmp_path, transport) -> None:
    everyone(on_hosts(tmp_path, _left_behind, "ab", transport))


def _forks(rank: int, transport: str) -> None:
    """Children of a process with links end as they like, and the pipeline goes on."""
    pipe: Any = zbpipe.wrap(layers(), 4, "1f1b", loss_fn=mse, transport=transport)
    pipe.step(X, target=Y)

    def closes() -> None:
        pipe.close()

    def collects() -> None:
        nonlocal pipe
        pipe = None
        gc.collect()

    for body in (closes, collects, lambda: sys.exit(0)):
        child = multiprocessing.get_context("fork").Process(target=body)
        child.start()
        child.join()
        assert child.exitcode == 0
        pipe.step(X, target=Y)
    pipe.close()


@pytest.mark.parametrize("transport", ["tcp", "torch"])
def test_forked_children_leave_the_connections_alone(tmp_path, transport) -> None:
    everyone(on_hosts(tmp_path, _forks, "ab", transport))
