"""Products with a module's own parameters inside a forward that is not ours to replace.

The forward runs as it is, under a TorchFunctionMode that looks for what it does with the module's
parameters: `linear`, `matmul`, a grouped product, an added bias, a lookup. Each of these becomes a
Function that leaves the parameter's gradient to the entry. So an expert of a mixture costs W its
own slice of the gradient only, where autograd makes a (E, …) tensor of zeros for each expert.
What the mode does not know goes to autograd as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from .accumulate import View, add_experts, add_products_to, add_sum, input_grad, laid_out
from .batched import Batched
from .deferred import Deferred, Groupable, Record
from .embedding import lookup
from .engine import autocast_dtype, autocast_off, cast, due, is_ordinary, rows


class Product(torch.autograd.Function):
    """y (..., out) = x M: x (..., in), M an (in, out) view of a parameter."""

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
        ctx.shape = x.shape
        needed = ctx.needs_input_grad
        ctx.save_for_backward(x if needed[1] else None, parameter if needed[0] else None)
        return torch.matmul(x, cast(view.on(parameter), dtype))

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 5
        X, parameter = ctx.saved_tensors
        dX = dW = None
        with autocast_off(dY.device.type):
            dY = rows(dY)
            if parameter is not None:
                M = cast(ctx.view.on(laid_out(parameter, ctx.parameter)), ctx.dtype)
                dX = input_grad(dY, M.t()).view(ctx.shape)
            wanted = due(ctx, 1, 2)
            if wanted is None and X is not None:
                dW = torch.zeros_like(ctx.parameter)
                ctx.view.on(dW).copy_(rows(X).t().mm(dY))
            elif wanted and wanted[0]:
                rule = Weights(ctx.parameter, ctx.view)
                ctx.entry.add(Record(rule, (ctx.parameter,), X.detach(), dY))
        return dX, dW, None, None, None


class Weights(Groupable):
    """gradient[view] += XᵀdY, view (in, out)."""

    __slots__ = ("parameter", "turned", "view")

    def __init__(self, parameter: Parameter, view: View) -> None:
        # F.linear's view is the transpose of how the parameter lies.
        self.turned = view.stride[-1] != 1
        self.parameter, self.view = parameter, view.transposed() if self.turned else view

    @property
    def key(self) -> Hashable:
        return Weights, id(self.parameter), self.view, self.turned

    def __call__(self, X: Tensor, dY: Tensor) -> None:
        self.several([(X, dY)])

    def several(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        operands = [(dY.t(), rows(X)) if self.turned else (rows(X).t(), dY) for X, dY in pairs]
        add_products_to(self.parameter, self.view, operands)


class Grouped(torch.autograd.Function):
    """y[r] = x[r] M[e], e the expert of row r: x (rows, in), M an (E, in, out) view.

    Expert e has the rows offsets[e − 1] to offsets[e]; rows after the last have no expert.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Parameter,
        offsets: Tensor,
        entry: Deferred,
        view: View,
        product: Callable[..., Tensor],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.parameter, ctx.view, ctx.product = entry, parameter, view, product
        needed = ctx.needs_input_grad
        ctx.save_for_backward(x if needed[1] else None, parameter if needed[0] else None, offsets)
        return product(x, view.on(parameter), offs=offsets)

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 6
        X, parameter, offsets = ctx.saved_tensors
        dX = dW = None
        with autocast_off(dY.device.type):
            if parameter is not None:
                M = ctx.view.on(laid_out(parameter, ctx.parameter))
                dX = ctx.product(dY, M.transpose(-2, -1), offs=offsets)
                # Not by a slice: on a GPU the host would wait for the last offset.
                late = torch.arange(len(dX), device=dX.device) >= offsets[-1]
                dX.masked_fill_(late[:, None], 0)
            wanted = due(ctx, 1, 2)
            if wanted is None and X is not None:
                dW = torch.zeros_like(ctx.parameter)
                for expert, at in _experts(offsets):
                    ctx.view.on(dW)[expert] = X[at].t().mm(dY[at])
            elif wanted and wanted[0]:
                rule = partial(_grouped_weights, ctx.parameter, ctx.view, offsets)
                ctx.entry.add(Record(rule, (ctx.parameter,), X.detach(), dY, (offsets,)))
        return dX, dW, None, None, None, None


def _experts(offsets: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of every expert that has rows."""
    ends = offsets.tolist()
    return [
        (e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if a < b
    ]


def _grouped_weights(
    parameter: Parameter, view: View, offsets: Tensor, X: Tensor, dY: Tensor
) -> None:
    if view.stride[-1] == 1:
        whole = add_experts(parameter, view, X, dY, offsets)
    else:  # the parameter lies (expert, out, in)
        whole = add_experts(parameter, view.transposed(), dY, X, offsets)
    if whole:
        return
    for expert, at in _experts(offsets):
        own = View(view.size[1:], view.stride[1:], view.offset + expert * view.stride[0])
        Weights(parameter, own)(X[at], dY[at])


class Shift(torch.autograd.Function):
    """y (..., n) = x + b, b (n,) a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Parameter, entry: Deferred) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.bias = entry, bias
        return x + bias

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 3
        wanted = due(ctx, 1, 2)
        if wanted is None:
            return dY, rows(dY).sum(0), None
        if wanted[0]:
            due_rows = rows(dY)
            rule = partial(_shift_weights, ctx.bias)
            ctx.entry.add(Record(rule, (ctx.bias,), due_rows, due_rows))
        return dY, None, None


def _shift_weights(bias: Parameter, X: Tensor, dY: Tensor) -> None:
    add_sum(bias, dY)


class Products(TorchFunctionMode):
    """While it is on, gradients of these parameters go to the entry where their use is known."""

    def __init__(self, parameters: Iterable[Parameter], entry: Deferred) -> None:
        super().__init__()
        self._own = {id(p): p for p in parameters if p.requires_grad}
        self.entry = entry

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = _KNOWN.get(function) or _BY_NAME.get(getattr(function, "__name__", ""))
        if known is not None and torch.is_grad_enabled():
            y = known(self, function, *args, **kwargs)
            if y is not None:
                return y
        return function(*args, **kwargs)

    def view(self, tensor: Any, dims: int) -> tuple[Parameter, View] | None:
        """The own parameter that `tensor` is, or is a view of, and the view; None if neither."""
        if not isinstance(tensor, Tensor) or tensor.dim() != dims or not tensor.requires_grad:
            return None
        parameter = self._own.get(id(tensor), self._own.get(id(tensor._base)))
        if parameter is None or tensor.dtype != parameter.dtype:
            return None
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.size(), strict=True)):
            return None  # expanded: a view that W could not add to
        return parameter, View.of(tensor, parameter)

    def whole(self, tensor: Any, dims: int) -> Parameter | None:
        """The own parameter that `tensor` is, if it has `dims` dimensions."""
        parameter = self._own.get(id(tensor))
        return parameter if parameter is not None and parameter.dim() == dims else None


def _times(mode: Products, x: Tensor, found: tuple[Parameter, View]) -> Tensor | None:
    parameter, view = found
    dtype = autocast_dtype(x.device.type)
    if not is_ordinary(x) or cast(x, dtype).dtype != cast(parameter, dtype).dtype:
        return None
    y: Tensor = Product.apply(  # type: ignore[no-untyped-call]
        cast(x, dtype), parameter, mode.entry, view, dtype
    )
    return y


def _batched(mode: Products, _: Any, x: Any, M: Any = None, **rest: Any) -> Tensor | None:
    """x (E, rows, in) @ M (E, in, out)."""
    found = None if rest else mode.view(M, 3)
    if found is None or not is_ordinary(x) or x.dim() != 3 or len(x) != len(M):
        return None
    dtype = autocast_dtype(x.device.type)
    if cast(x, dtype).dtype != cast(M, dtype).dtype:
        return None
    y: Tensor = Batched.apply(  # type: ignore[no-untyped-call]
        cast(x, dtype), found[0], mode.entry, found[1], dtype
    )
    return y


def _linear(
    mode: Products, _: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, **rest: Any
) -> Tensor | None:
    found = None if rest else mode.view(weight, 2)
    if found is None:
        return None
    y = _times(mode, x, (found[0], found[1].transposed()))
    if y is None or bias is None:
        return y
    shifted = _add(mode, _, y, bias)
    return y + cast(bias, autocast_dtype(y.device.type)) if shifted is None else shifted


def _matmul(mode: Products, _: Any, x: Any, M: Any = None, **rest: Any) -> Tensor | None:
    found = None if rest else mode.view(M, 2)
    if found is None or not isinstance(x, Tensor) or x.dim() == 0:
        return _batched(mode, _, x, M, **rest)
    return _times(mode, x, found)


def _grouped(mode: Products, product: Any, x: Any, M: Any = None, **rest: Any) -> Tensor | None:
    offsets = rest.pop("offs", None)
    given = any(value is not None for value in rest.values())
    found = None if given or offsets is None else mode.view(M, 3)
    if found is None or not is_ordinary(x) or x.dim() != 2:
        return None
    y: Tensor = Grouped.apply(x, found[0], offsets, mode.entry, found[1], product)  # type: ignore[no-untyped-call]
    return y


def _add(mode: Products, _: Any, x: Any, bias: Any = None, **rest: Any) -> Tensor | None:
    parameter = None if rest else mode.whole(bias, 1)
    if parameter is None:
        return None
    if not is_ordinary(x) or x.dtype != bias.dtype or x.shape[-1:] != bias.shape:
        return None
    y: Tensor = Shift.apply(x, parameter, mode.entry)  # type: ignore[no-untyped-call]
    return y


def _item(mode: Products, _: Any, table: Any, index: Any) -> Tensor | None:
    """table[index], one row or some: a lookup. Negative indices count from the table's end."""
    parameter = mode.whole(table, 2)
    if parameter is None or not isinstance(index, Tensor) or index.dim() > 1:
        return None
    if index.dtype not in (torch.int32, torch.int64) or not is_ordinary(index):
        return None
    index = torch.where(index < 0, index + len(parameter), index)
    return lookup(index, parameter, mode.entry)


def _embedding(
    mode: Products,
    _: Any,
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    parameter = mode.whole(weight, 2)
    if parameter is None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    if not is_ordinary(indices):
        return None
    negative = padding_idx is not None and padding_idx < 0
    padding = -1 if padding_idx is None else padding_idx + len(parameter) * negative
    return lookup(indices, parameter, mode.entry, padding)


def _known() -> dict[Any, Callable[..., Tensor | None]]:
    table: dict[Any, Callable[..., Tensor | None]] = {
        F.linear: _linear,
        F.embedding: _embedding,
        Tensor.__getitem__: _item,
    }
    table |= dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm), _matmul)
    table[Tensor.__matmul__] = _matmul
    table |= dict.fromkeys((torch.bmm, Tensor.bmm), _batched)
    table |= dict.fromkeys((torch.add, Tensor.add, Tensor.__add__), _add)
    for home in (F, torch):
        for name in ("grouped_mm", "_grouped_mm"):
            if hasattr(home, name):
                table[getattr(home, name)] = _grouped
    return table


_KNOWN = _known()
# transformers' stand-in where torch has no grouped product for a dtype: a torch.library operator.
_BY_NAME = {"grouped_mm_fallback": _grouped}


def products(module: Any, entry: Deferred, *args: Any, **kwargs: Any) -> Any:
    """The rule of a module with products in it: its own forward, under the mode."""
    own = [p for p in module._parameters.values() if p is not None]
    with Products(own, entry):
        return type(module).forward(module, *args, **kwargs)
