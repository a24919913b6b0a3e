"""The one definition of correct: equal to the unsplit model, whatever the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import zbpipe
from cases import (
    CASES,
    SCHEDULES,
    Case,
    Checkpointed,
    Counted,
)
from unsplit import assert_same_gradients, gradients, reference


def run(case: Case, ranks: int, m: int, schedule: str):
    """The pipeline, its model and the losses, after the case's steps; freed slots are poisoned."""
    model = case.build()
    pipe = zbpipe.wrap(
        model,
        microbatches=m,
        schedule=schedule,
        partition=case.split(ranks),
        loss_fn=case.loss_fn,
        loss_weight=case.loss_weight,
        local_ranks=ranks,
    )
    pipe._settings = replace(pipe._settings, poison=True)
    losses = [pipe.step(x, target=y) for x, y in case.batches()]
    pipe.close()
    return model, losses


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_feature_under_every_schedule(case: Case, ranks: int) -> None:
    for m in sorted({1, max(1, ranks - 1), ranks, 2 * ranks + 1}):
        if not case.fits(ranks, m):
            continue
        want, want_losses = reference(case, m)
        bits = None
        for schedule in SCHEDULES:
            Counted.calls = Checkpointed.runs = 0
            model, losses = run(case, ranks, m, schedule)
            for loss, expected in zip(losses, want_losses, strict=True):
                error = abs(loss - expected)
                assert error <= max(case.tolerance, 1e-12) * abs(expected), (schedule, m)
            got = gradients(model.named_parameters())
            assert_same_gradients(got, want, case.tolerance)
            for (name, buffer), (_, expected) in zip(
                model.named_buffers(), want.named_buffers(), strict=True
            ):
                torch.testing.assert_close(buffer, expected, msg=name)
            bits = bits or (got, losses)
            assert all(torch.equal(a, b) for a, b in zip(losses, bits[1], strict=True))
            for name, grad in got.items():
                assert grad is None or torch.equal(grad, bits[0][name]), (name, schedule, m)
            if case.name == "checkpointed":
                assert Checkpointed.runs == 4 * m * 2  # in F, and once more in I
            if case.name == "custom_function":
                assert Counted.calls == 2 * m
