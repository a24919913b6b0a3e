"""nn.Conv1d, 2d and 3d: I makes dX by the convolution's own backward, W the rest of it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .accumulate import add, sum_dtype
from .deferred import Deferred, Record
from .engine import autocast_dtype, autocast_off, cast, due


class Shape(NamedTuple):
    """A convolution's numbers, as aten takes them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Conv(torch.autograd.Function):
    """y = conv(x, W) + b: x (n, in, *space), W (out, in / groups, *kernel)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        entry: Deferred,
        shape: Shape,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.weight, ctx.bias, ctx.shape, ctx.dtype = entry, weight, bias, shape, dtype
        # dX needs of x its shape alone, but aten asks for the tensor; dW needs of W its shape.
        ctx.save_for_backward(x, weight)
        b = None if bias is None else cast(bias, dtype)
        still = (0,) * len(shape.stride)
        return torch.convolution(x, cast(weight, dtype), b, *shape[:3], False, still, shape.groups)

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 6
        X, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        with autocast_off(dY.device.type):
            w = cast(weight, ctx.dtype)
            wanted = due(ctx, 1, 2 if ctx.bias is None else 3)
            if wanted is None:
                dX, dW, db = _parts(ctx.shape, dY, X, w, needed[:3])
                dW = None if dW is None else dW.to(weight.dtype)
                return dX, dW, None if db is None else db.to(ctx.bias.dtype), None, None, None
            dX = _parts(ctx.shape, dY, X, w, (needed[0], False, False))[0]
            weight = ctx.weight if wanted[0] else None
            bias = ctx.bias if wanted[-1] and len(wanted) == 2 else None
            parameters = tuple([p for p in (weight, bias) if p is not None])
            if parameters:
                X = dY if weight is None else X.detach()  # a bias alone needs no X
                ctx.entry.add(Record(partial(_weights, weight, bias, ctx.shape), parameters, X, dY))
        return dX, None, None, None, None, None


def _parts(
    shape: Shape, dY: Tensor, X: Tensor, w: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """(dX, dW, db), each None where it is not wanted."""
    parts: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward.default(
        dY, X, w, [w.shape[0]], *shape[:3], False, (0,) * len(shape.stride), shape.groups, wanted
    )
    return parts


def _weights(
    weight: Parameter | None, bias: Parameter | None, shape: Shape, X: Tensor, dY: Tensor
) -> None:
    if weight is not None:
        dtype = sum_dtype(weight, dY)
        like = weight.detach().to(dtype)
        dW = _parts(shape, dY.to(dtype), X.to(dtype), like, (False, True, False))[1]
        assert dW is not None
        add(weight, dW)
    if bias is not None:
        every = [d for d in range(dY.dim()) if d != 1]
        add(bias, dY.sum(every, dtype=sum_dtype(bias, dY)))


def conv(module: Any, entry: Deferred, x: Tensor) -> Tensor:
    """The rule of nn.Conv1d, nn.Conv2d and nn.Conv3d with zero padding; x with a batch or not."""
    dtype = autocast_dtype(x.device.type)
    shape = Shape(module.stride, module.padding, module.dilation, module.groups)
    batched = x.dim() == len(shape.stride) + 2
    y: Tensor = Conv.apply(  # type: ignore[no-untyped-call]
        cast(x if batched else x.unsqueeze(0), dtype),
        module.weight,
        module.bias,
        entry,
        shape,
        dtype,
    )
    return y if batched else y.squeeze(0)
