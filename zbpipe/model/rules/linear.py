"""nn.Linear and Conv1D: I makes dX and keeps (X, dY); W adds dYᵀX."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from .accumulate import add_product, add_products, add_sum, input_grad
from .deferred import Deferred, Groupable, Record
from .engine import autocast_dtype, autocast_off, autocasting, cast, due, rows


class Linear(torch.autograd.Function):
    """y (..., out) = x Wᵀ + b, W (out, in), or x W + b, W (in, out), `transposed`; x (..., in)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        entry: Deferred,
        transposed: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        # Unpacked tensors may be copies (saved_tensors_hooks); .grad belongs to these two.
        ctx.own = entry, weight, bias, transposed, dtype, x.shape
        needed = ctx.needs_input_grad
        ctx.save_for_backward(x if needed[1] else None, weight if needed[0] else None)
        w: Tensor = weight
        b: Tensor | None = bias
        if dtype is not None:
            w, b = cast(weight, dtype), None if bias is None else cast(bias, dtype)
        if not transposed:
            y = F.linear(x, w, b)
        else:
            y = rows(x).mm(w) if b is None else torch.addmm(b, rows(x), w)
            y = y.view(*x.shape[:-1], y.shape[1])
        # Autograd refuses in-place operations on a view that a Function returns. `data` is none;
        # a view made outside would be one more node to run in every backward.
        return y.data

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 6
        if not autocasting():
            return _backward(ctx, rows(dY))
        with autocast_off(dY.device.type):
            return _backward(ctx, rows(dY))


# What `Linear.apply` comes to outside of torch.func's transforms, which SplitForward looks for:
# its checks take as long as the rest of a small layer.
_apply: Any = super(torch.autograd.Function, Linear).apply


def _backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:
    """dX now, the weights' part into the entry; dY (rows, out)."""
    X, saved = ctx.saved_tensors
    entry, weight, bias, transposed, dtype, shape = ctx.own
    dX = None
    if saved is not None:
        w = saved if dtype is None else cast(saved, dtype)
        dX = input_grad(dY, w.t() if transposed else w).view(shape)
    wanted = due(ctx, 1, 2 if bias is None else 3)
    if wanted is None:
        return dX, *_by_autograd(ctx, X, dY), None, None, None
    if not wanted[0]:
        weight = None
    if bias is not None and not wanted[1]:
        bias = None
    if weight is None and bias is None:
        return dX, None, None, None, None, None
    parameters = (weight,) if bias is None else (bias,) if weight is None else (weight, bias)
    # Detached, or the entry would hold the graph that holds the entry. A bias alone needs no X.
    X = dY if X is None or weight is None else X.detach()
    entry.add(Record(Weights(weight, bias, transposed), parameters, X, dY))
    return dX, None, None, None, None, None


class Weights(Groupable):
    """dW += dYᵀX, (out, in), or XᵀdY, (in, out), when `transposed`; db += the column sums of dY."""

    __slots__ = ("bias", "transposed", "weight")

    def __init__(self, weight: Parameter | None, bias: Parameter | None, transposed: bool) -> None:
        self.weight, self.bias, self.transposed = weight, bias, transposed

    @property
    def key(self) -> Hashable:
        return Weights, id(self.weight), id(self.bias), self.transposed

    def __call__(self, X: Tensor, dY: Tensor) -> None:
        if self.weight is not None:
            add_product(self.weight, *self._operands(X, dY))
        if self.bias is not None:
            add_sum(self.bias, dY)

    def several(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self.weight is not None:
            add_products(self.weight, [self._operands(X, dY) for X, dY in pairs])
        if self.bias is not None:
            for _, dY in pairs:
                add_sum(self.bias, dY)

    def _operands(self, X: Tensor, dY: Tensor) -> tuple[Tensor, Tensor]:
        return (rows(X).t(), dY) if self.transposed else (dY.t(), rows(X))


def _by_autograd(ctx: Any, X: Tensor | None, dY: Tensor) -> tuple[Tensor | None, ...]:
    _, weight, bias, transposed, _, _ = ctx.own
    dW = db = None
    if ctx.needs_input_grad[1]:
        assert X is not None
        dW = rows(X).t().mm(dY) if transposed else dY.t().mm(rows(X))
        dW = dW.to(weight.dtype)
    if ctx.needs_input_grad[2]:
        db = dY.sum(0).to(bias.dtype)
    return dW, db


def linear(module: Any, entry: Deferred, x: Tensor, transposed: bool = False) -> Tensor:
    """The rule of nn.Linear, and of Conv1D when `transposed`."""
    dtype = None
    if autocasting():
        dtype = autocast_dtype(x.device.type)
        x = cast(x, dtype)
    y: Tensor = _apply(x, module.weight, module.bias, entry, transposed, dtype)
    return y
