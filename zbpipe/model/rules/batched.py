"""A product of each expert's rows with its own weight, all experts with as many rows: torch.bmm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .accumulate import View, add_stacked, laid_out, sum_dtype, zeros_or
from .deferred import Deferred, Record
from .engine import autocast_off, cast, due


class Batched(torch.autograd.Function):
    """y (E, rows, out) = x M: x (E, rows, in), M an (E, in, out) view of a parameter."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Parameter,
        entry: Deferred,
        view: View,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.parameter, ctx.view, ctx.dtype = entry, parameter, view, dtype
        needed = ctx.needs_input_grad
        ctx.save_for_backward(x if needed[1] else None, parameter if needed[0] else None)
        return torch.bmm(x, cast(view.on(parameter), dtype))

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 5
        X, parameter = ctx.saved_tensors
        dX = dW = None
        with autocast_off(dY.device.type):
            if parameter is not None:
                M = cast(ctx.view.on(laid_out(parameter, ctx.parameter)), ctx.dtype)
                dX = dY.bmm(M.mT)
            wanted = due(ctx, 1, 2)
            if wanted is None and X is not None:
                dW = torch.zeros_like(ctx.parameter)
                ctx.view.on(dW).copy_(X.mT.bmm(dY))
            elif wanted and wanted[0]:
                rule = partial(_weights, ctx.parameter, ctx.view)
                ctx.entry.add(Record(rule, (ctx.parameter,), X.detach(), dY))
        return dX, dW, None, None, None


def _weights(parameter: Parameter, view: View, X: Tensor, dY: Tensor) -> None:
    """dW[view] += XᵀdY of each expert."""
    grad, dtype = zeros_or(parameter), sum_dtype(parameter, X)
    alike = grad.stride() == parameter.stride()
    if alike and add_stacked(view.on(grad), X, dY):
        return
    X, dY = X.to(dtype), dY.to(dtype)
    if not alike:
        whole = torch.zeros_like(parameter, dtype=dtype)
        view.on(whole).baddbmm_(X.mT, dY)
        grad.add_(whole)
        return
    part = view.on(grad)
    if part.dtype == dtype:
        part.baddbmm_(X.mT, dY)
    else:
        part.add_(X.mT.bmm(dY))
