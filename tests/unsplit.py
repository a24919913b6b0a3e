"""The unsplit model to compare with: the same microbatches in order, through the same layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cases import Case
from zbpipe.runtime.batch import microbatches


def reference(case: Case, m: int) -> tuple[nn.Sequential, list[torch.Tensor]]:
    """The unsplit model after all steps, gradients accumulated in `.grad`, and the losses."""
    model = case.build()
    losses = []
    for value, target in case.batches():
        size = target.shape[0]
        xs, ys = microbatches(value, m, size), microbatches(target, m, size)
        weigh = case.loss_weight or len
        total = sum(float(weigh(y)) for y in ys)
        loss = torch.zeros(())
        for x, y in zip(xs, ys, strict=True):
            weight = float(weigh(y)) / total
            part = case.loss_fn(model(x), y)
            if weight > 0:
                (part * weight).backward()
                loss = loss + part.detach() * weight
        losses.append(loss)
    return model, losses


def assert_same_gradients(
    got: dict[str, torch.Tensor | None], model: nn.Module, tolerance: float
) -> None:
    """Every gradient in `got` equals the reference model's within tolerance of its maximum."""
    for name, parameter in model.named_parameters():
        if name not in got:
            continue  # another rank's
        want, have = parameter.grad, got[name]
        assert (want is None) == (have is None), f"{name}: want {want}, have {have}"
        if want is None or have is None:
            continue
        assert want.dtype == have.dtype and want.shape == have.shape, name
        error = float((want - have).abs().max())
        assert error <= tolerance * float(want.abs().max()), f"{name}: {error}"


def gradients(named: Any) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in named}
