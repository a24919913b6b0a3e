"""Embeddings: W scatters the rows of dY; there is no input gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from .accumulate import add, add_rows, zeros_or
from .deferred import Deferred, Record
from .engine import due


class Embedding(torch.autograd.Function):
    """y = W[indices]: indices (n,), W (rows, width), y (n, width)."""

    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, weight: Parameter, entry: Deferred, padding_idx: int
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.weight, ctx.padding_idx = entry, weight, padding_idx
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 4
        (indices,) = ctx.saved_tensors
        weight, padding_idx = ctx.weight, ctx.padding_idx
        wanted = due(ctx, 1, 2)
        if wanted is None:
            return None, _dense(dY, indices, weight.shape[0], padding_idx), None, None
        if wanted[0]:
            rule = partial(_weights, weight, padding_idx)
            ctx.entry.add(Record(rule, (weight,), indices.detach(), dY))
        return None, None, None, None


def _weights(weight: Parameter, padding_idx: int, indices: Tensor, dY: Tensor) -> None:
    """dW[i] += the rows of dY whose index is i, except for `padding_idx` (-1: none)."""
    if add_rows(weight, indices, dY, padding_idx):
        return
    if weight.device.type != "cpu":
        # index_add_ is not deterministic on CUDA; the dense form is.
        add(weight, _dense(dY, indices, weight.shape[0], padding_idx))
        return
    # On CPU the dense form costs a pass over the whole table for each microbatch: 68 ms against
    # 0.19 ms for 1024 tokens in a table of 50257 × 768 (fp32, one thread).
    if padding_idx >= 0:
        kept = indices != padding_idx
        indices, dY = indices[kept], dY[kept]
    grad = zeros_or(weight)
    grad.index_add_(0, indices, dY.to(grad.dtype))


def _dense(dY: Tensor, indices: Tensor, rows: int, padding_idx: int) -> Tensor:
    dense: Tensor = torch.ops.aten.embedding_dense_backward.default(
        dY, indices, rows, padding_idx, False
    )
    return dense


def lookup(indices: Tensor, weight: Parameter, entry: Deferred, padding_idx: int = -1) -> Tensor:
    """W[indices] (*indices.shape, width), its weight gradient left to `entry`."""
    y: Tensor = Embedding.apply(  # type: ignore[no-untyped-call]
        indices.flatten(), weight, entry, padding_idx
    )
    return y.view(*indices.shape, y.shape[1])


def embedding(module: Any, entry: Deferred, x: Tensor) -> Tensor:
    """The rule of nn.Embedding."""
    return lookup(x, module.weight, entry, -1 if module.padding_idx is None else module.padding_idx)
