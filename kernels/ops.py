"""The kernels as torch operators, `torch.ops.zbpipe.*`: fake tensors, autograd, any device.

What they compute is in dispatch.py. The split calls them on a GPU, so that torch.compile finds
operators that it knows the shapes of. They are made by `torch.library.Library` and not by
`custom_op`, whose Python wrapper takes longer than they do. Microseconds a call over dispatch.py's
own function (CPU, one thread, tensors of 8 × 8, medians of 15 × 2000 calls):

| | `dgrad` | `wgrad_` |
|---|---|---|
| `custom_op` | 8.6 | 15.5 |
| `Library` | 1.8 | 1.6 |
| `Library`, with autograd | 5.8 | |
| the same below autograd | 2.3 | |

Hence `below_autograd` for those who know that nothing is to be differentiated. In I + W of a GPT
block (4 linears with biases, 12 operators, hidden 64, bf16) that adds up to 64 to 81 µs of 1 ms on
the enqueueing thread, with `custom_op` it was 409 to 490. It is the host's time, beside what a
device does; not yet run on one. Calling the functions themselves would save it, but leave a
backward through dX (a gradient penalty) without a derivative.

Double backward goes through `dgrad` and `wgrad`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .arguments import check_dgrad, check_norm

# For a block of code in which no operator records a backward, nor asks whether it should.
below_autograd = torch._C._AutoDispatchBelowAutograd

# One namespace a process, as torch's registry is: the operators have no state.
_LIBRARY = torch.library.Library("zbpipe", "DEF")


def _operator(schema: str, fake: Callable[..., Any]) -> Any:
    """The operator of this schema: dispatch.py's function of its name, on CPU and CUDA."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, getattr(dispatch, name), key)
    torch.library.register_fake(f"zbpipe::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.zbpipe, name).default


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An operator that adds to its first argument has no result."""


def _dgrad(dY: Tensor, W: Tensor) -> Tensor:
    rows, _, ins = check_dgrad(dY, W)
    return dY.new_empty(rows, ins)


def _wgrad(dY: Tensor, X: Tensor) -> Tensor:
    return dY.new_empty(dY.shape[-1], X.shape[-1], dtype=torch.float32)


def _norm_dgrad(
    dY: Tensor, X: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None, offset: float
) -> Tensor:
    return X.new_empty(check_norm(dY, X, rstd, mean))


dgrad = _operator("dgrad(Tensor dY, Tensor W) -> Tensor", _dgrad)
wgrad = _operator("wgrad(Tensor dY, Tensor X) -> Tensor", _wgrad)
wgrad_ = _operator("wgrad_(Tensor(a!) dW, Tensor dY, Tensor X) -> ()", _nothing)
grouped_wgrad_ = _operator("grouped_wgrad_(Tensor(a!) dW, Tensor[] dY, Tensor[] X) -> ()", _nothing)
expert_wgrad_ = _operator(
    "expert_wgrad_(Tensor(a!) dW, Tensor dY, Tensor X, Tensor offsets) -> ()", _nothing
)
bias_grad_ = _operator("bias_grad_(Tensor(a!) db, Tensor dY) -> ()", _nothing)
norm_dgrad = _operator(
    "norm_dgrad(Tensor dY, Tensor X, Tensor weight, Tensor rstd, Tensor? mean, float offset)"
    " -> Tensor",
    _norm_dgrad,
)
norm_wgrad_ = _operator(
    "norm_wgrad_(Tensor(a!) dW, Tensor(b!)? db, Tensor dY, Tensor X, Tensor rstd, Tensor? mean)"
    " -> ()",
    _nothing,
)
embedding_grad_ = _operator(
    "embedding_grad_(Tensor(a!) dW, Tensor dY, Tensor indices, int padding_idx=-1) -> ()",
    _nothing,
)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _dgrad_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    dY, W = ctx.saved_tensors
    return dgrad(g.contiguous(), W.t()), wgrad(dY, g.contiguous()).to(W.dtype)


def _wgrad_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    dY, X = ctx.saved_tensors
    g = g.to(X.dtype).contiguous()
    return dgrad(X, g.t()), dgrad(dY, g)


for _name, _backward in (("dgrad", _dgrad_backward), ("wgrad", _wgrad_backward)):
    torch.library.register_autograd(
        f"zbpipe::{_name}", _backward, setup_context=_keep, lib=_LIBRARY
    )
