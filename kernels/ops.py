"""The kernels as torch operators, `torch.ops.zbpipe.*`: fake tensors, autograd, any device.

What they compute is in dispatch.py. Double backward goes through `dgrad` and `wgrad`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .arguments import check_dgrad, check_norm


def _operator(name: str, mutates: tuple[str, ...], schema: str) -> Any:
    plain = getattr(dispatch, name)
    return torch.library.custom_op(f"zbpipe::{name}", plain, mutates_args=mutates, schema=schema)


dgrad = _operator("dgrad", (), "(Tensor dY, Tensor W) -> Tensor")
wgrad = _operator("wgrad", (), "(Tensor dY, Tensor X) -> Tensor")
wgrad_ = _operator(
    "wgrad_",
    ("dW",),
    "(Tensor(a!) dW, Tensor dY, Tensor X, int first=0, int? count=None) -> ()",
)
expert_wgrad_ = _operator(
    "expert_wgrad_", ("dW",), "(Tensor(a!) dW, Tensor dY, Tensor X, Tensor offsets) -> ()"
)
bias_grad_ = _operator(
    "bias_grad_", ("db",), "(Tensor(a!) db, Tensor dY, int first=0, int? count=None) -> ()"
)
norm_dgrad = _operator(
    "norm_dgrad",
    (),
    "(Tensor dY, Tensor X, Tensor weight, Tensor rstd, Tensor? mean, float offset) -> Tensor",
)
norm_wgrad_ = _operator(
    "norm_wgrad_",
    ("dW", "db"),
    "(Tensor(a!) dW, Tensor(b!)? db, Tensor dY, Tensor X, Tensor rstd, Tensor? mean) -> ()",
)
embedding_grad_ = _operator(
    "embedding_grad_",
    ("dW",),
    "(Tensor(a!) dW, Tensor dY, Tensor indices, int padding_idx=-1) -> ()",
)


@dgrad.register_fake
def _(dY: Tensor, W: Tensor) -> Tensor:
    rows, _, ins = check_dgrad(dY, W)
    return dY.new_empty(rows, ins)


@wgrad.register_fake
def _(dY: Tensor, X: Tensor) -> Tensor:
    return dY.new_empty(dY.shape[-1], X.shape[-1], dtype=torch.float32)


@norm_dgrad.register_fake
def _(
    dY: Tensor, X: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None, offset: float
) -> Tensor:
    return X.new_empty(check_norm(dY, X, rstd, mean))


for _adds in (wgrad_, expert_wgrad_, bias_grad_, norm_wgrad_, embedding_grad_):
    _adds.register_fake(lambda *args, **kwargs: None)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _dgrad_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    dY, W = ctx.saved_tensors
    return dgrad(g.contiguous(), W.t()), wgrad(dY, g.contiguous()).to(W.dtype)


def _wgrad_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    dY, X = ctx.saved_tensors
    g = g.to(X.dtype).contiguous()
    return dgrad(X, g.t()), dgrad(dY, g)


dgrad.register_autograd(_dgrad_backward, setup_context=_keep)
wgrad.register_autograd(_wgrad_backward, setup_context=_keep)
