"""Layer norm and RMS norm of whatever class: known by what they compute, deferred on request.

I needs dX and so reads x and dY anyway; what W would add is two column sums. Deferring them holds x
and dY: a GPT block's stash grows by a quarter (32 → 40 MiB at hidden 512, 64 → 80 MiB at 1024, 1024
tokens, fp32), and I becomes no shorter (+0.8 % and −0.5 %, within the noise; CPU, one thread,
bench/split_overhead.py). So `Splitter` leaves norms in I unless asked.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .accumulate import add, add_norm, norm_input_grad
from .deferred import Deferred, Record
from .engine import due

NAMES = ("RMSNorm", "LayerNorm")


class Form(NamedTuple):
    """y = x̂ (offset + weight) + bias, x̂ = (x − mean) / √(var + eps), or without the mean."""

    centred: bool
    offset: float
    eps: float

    def statistics(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """(mean or None, 1 / √(var + eps)), each (..., 1)."""
        mean = x.mean(-1, keepdim=True) if self.centred else None
        x = x if mean is None else x - mean
        return mean, (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def input_grad(self, x_hat: Tensor, rstd: Tensor, weight: Tensor, dY: Tensor) -> Tensor:
        """dX from x̂ and dY, all (..., n)."""
        g = dY * (weight + self.offset)
        dX = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
        if self.centred:
            dX = dX - g.mean(-1, keepdim=True)
        return dX * rstd


def normalised(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """x̂ in the dtype of the statistics."""
    x = x.to(rstd.dtype)
    return (x if mean is None else x - mean) * rstd


class Norm(torch.autograd.Function):
    """The module's own forward, with the backward of its `Form`: x (..., n), weight (n,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        entry: Deferred,
        module: nn.Module,
        form: Form,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.form, ctx.weight, ctx.bias = entry, form, weight, bias
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, *form.statistics(x.to(wide)))
        y: Tensor = type(module).forward(module, x)
        return y

    @staticmethod
    def backward(ctx: Any, dY: Tensor | None) -> tuple[Tensor | None, ...]:
        if dY is None:
            return (None,) * 6
        x, weight, mean, rstd = ctx.saved_tensors
        needed, dX = ctx.needs_input_grad, None
        if needed[0]:
            dX = norm_input_grad(dY, x, weight, rstd, mean, ctx.form.offset)
        if needed[0] and dX is None:
            x_hat = normalised(x, mean, rstd)
            dX = ctx.form.input_grad(x_hat, rstd, weight.to(rstd.dtype), dY.to(rstd.dtype))
            dX = dX.to(x.dtype)
        wanted = due(ctx, 1, 2 if ctx.bias is None else 3)
        if wanted is None:
            dW, db = _sums(x, mean, rstd, dY)
            dW, db = dW.to(weight.dtype), db.to(weight.dtype)
            return dX, dW if needed[1] else None, db if needed[2] else None, None, None, None
        weight = ctx.weight if wanted[0] else None
        bias = ctx.bias if wanted[-1] and len(wanted) == 2 else None
        parameters = tuple([p for p in (weight, bias) if p is not None])
        if parameters:
            X = dY if weight is None else x.detach()  # a bias alone needs no x
            others = () if weight is None else tuple(t for t in (mean, rstd) if t is not None)
            rule = partial(_weights, weight, bias, mean, rstd)
            ctx.entry.add(Record(rule, parameters, X, dY, others))
        return dX, None, None, None, None, None


def _sums(x: Tensor, mean: Tensor | None, rstd: Tensor, dY: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ dY x̂, Σ dY) over the rows, each (n,), in the dtype of the statistics."""
    dY = dY.to(rstd.dtype).reshape(-1, dY.shape[-1])
    x_hat = normalised(x, mean, rstd).reshape(dY.shape)
    return (dY * x_hat).sum(0), dY.sum(0)


def _weights(
    weight: Parameter | None,
    bias: Parameter | None,
    mean: Tensor | None,
    rstd: Tensor,
    X: Tensor,
    dY: Tensor,
) -> None:
    if add_norm(weight, bias, dY, X, rstd, mean):
        return
    dW, db = _sums(X, mean, rstd, dY)
    if weight is not None:
        add(weight, dW)
    if bias is not None:
        add(bias, db)


def norm(module: Any, entry: Deferred, x: Tensor, form: Form) -> Tensor:
    """The rule of a module whose forward has this form."""
    bias = module._parameters.get("bias")
    y: Tensor = Norm.apply(  # type: ignore[no-untyped-call]
        x, module.weight, bias, entry, module, form
    )
    return y


def form_of(module: nn.Module) -> Form | str:
    """What the module's own forward computes, or why no form is known.

    Its forward runs on a few random fp64 rows, with fp64 stand-ins for its parameters, and must
    agree with the form in value and in every gradient to 1e-5 of the largest: most classes compute
    in fp32 inside. Random state, the module and its parameters are left as they are.
    """
    kind = type(module).__name__
    n = int(module._parameters["weight"].numel())  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    own = {name: Parameter(draw(n)) for name, p in module._parameters.items() if p is not None}
    epsilons = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1]
    # So small that a wrong eps shows.
    x = (draw(3, n) + 0.5).mul_(max(epsilons, default=1e-5) ** 0.5).requires_grad_()
    dY = draw(3, n)
    try:
        twin = copy.copy(module)
        twin.__dict__["_parameters"] = dict.fromkeys(module._parameters) | own
        with torch.enable_grad():
            y = type(module).forward(twin, x)
            found = (y, *torch.autograd.grad(y, (x, *own.values()), dY))
    except Exception as error:
        return f"no rule for {kind}: its forward on a test row raised {type(error).__name__}"
    for eps in dict.fromkeys(epsilons):
        for centred in (False, True):
            for offset in (0.0, 1.0):
                form = Form(centred, offset, eps)
                if _agrees(form, x.detach(), dY, own, found):
                    return form
    return f"no rule for {kind}: its forward is no layer norm or RMS norm of its last dimension"


def _agrees(
    form: Form, x: Tensor, dY: Tensor, own: dict[str, Parameter], found: tuple[Tensor, ...]
) -> bool:
    mean, rstd = form.statistics(x)
    x_hat = normalised(x, mean, rstd)
    weight, bias = own["weight"].detach(), own.get("bias")
    y = x_hat * (weight + form.offset)
    dW, db = _sums(x, mean, rstd, dY)
    gradients = {"weight": dW, "bias": db}
    expected = [y if bias is None else y + bias.detach(), form.input_grad(x_hat, rstd, weight, dY)]
    expected += [gradients[name] for name in own]
    return all(
        got.shape == want.shape and bool((got - want).abs().max() <= 1e-5 * want.abs().max())
        for got, want in zip(found, expected, strict=True)
    )
