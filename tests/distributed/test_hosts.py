"""Pipelines over several hosts, here processes that are told to share no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hosting import everyone, on_hosts, python_threads

import zbpipe
from cases import CASES, SCHEDULES
from crews import lane_threads, shared_files
from unsplit import assert_same_gradients, gradients, reference


def _same_as_unsplit(rank: int, count: int, schedules: tuple[str, ...], chunks: int) -> None:
    for case in CASES:
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
    ("hosts", "schedules", "chunks"),
    [
        ("ab", SCHEDULES, 1),
        ("abcd", ("1f1b", "zb1p"), 1),
        ("aabb", ("1f1b", "zb2p"), 1),
        ("ab", ("zb_v", "interleaved"), 2),
    ],
)
def test_every_feature_over_hosts(tmp_path, hosts, schedules, chunks) -> None:
    everyone(on_hosts(tmp_path, _same_as_unsplit, hosts, len(hosts), schedules, chunks))
