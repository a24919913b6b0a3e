"""What the launchers ask of their arguments; each complaint names the argument and its value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zbpipe.errors import ConfigError

LOW = (torch.bfloat16, torch.float16)
FLOATS = (*LOW, torch.float32)


def check_matrix(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """A float tensor of `shape` (None: any size) whose last dimension is contiguous.

    Raises ConfigError for another dtype, shape or layout.
    """
    check_float(name, tensor)
    check_shape(name, tensor, shape)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ConfigError(
            f"{name} has strides {tuple(tensor.stride())}: its last dimension must be contiguous; "
            f"pass {name}.contiguous()"
        )


def check_float(name: str, tensor: Tensor) -> None:
    """Raises ConfigError unless the tensor is bf16, fp16 or fp32."""
    if tensor.dtype not in FLOATS:
        raise ConfigError(f"{name} is {tensor.dtype}: must be bfloat16, float16 or float32")


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raises ConfigError unless the tensor has `shape`; None stands for any size."""
    fits = tensor.dim() == len(shape)
    if not fits or any(w is not None and w != s for w, s in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ConfigError(f"{name} has shape {tuple(tensor.shape)}: must be ({wanted})")


def check_same_dtype(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raises ConfigError unless both have one dtype."""
    if tensor.dtype != other.dtype:
        raise ConfigError(
            f"{name} is {tensor.dtype} and {other_name} is {other.dtype}: must be the same"
        )


def check_gradient(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """A main gradient: fp32, of `shape`, its last dimension contiguous."""
    if tensor.dtype != torch.float32:
        raise ConfigError(f"{name} is {tensor.dtype}: a main gradient must be torch.float32")
    check_matrix(name, tensor, shape)


def check_statistics(name: str, tensor: Tensor, rows: int) -> None:
    """The mean or 1/σ of each row: fp32, contiguous, (rows,)."""
    if tensor.dtype != torch.float32:
        raise ConfigError(f"{name} is {tensor.dtype}: must be torch.float32")
    check_matrix(name, tensor, (rows,))


def check_dgrad(dY: Tensor, W: Tensor) -> tuple[int, int, int]:
    """(rows, outs, ins) of dX = dY W; W may lie either way."""
    check_matrix("dY", dY, (None, None))
    rows, outs = dY.shape
    check_float("W", W)
    check_shape("W", W, (outs, None))
    if W.numel() > 0 and 1 not in W.stride():
        raise ConfigError(f"W has strides {tuple(W.stride())}: one dimension must be contiguous")
    check_same_dtype("W", W, "dY", dY)
    return rows, outs, int(W.shape[1])


def check_wgrad(dW: Tensor, dY: Sequence[Tensor], X: Sequence[Tensor]) -> tuple[int, int]:
    """(outs, ins) of dW += Σ dY[m]ᵀ X[m] over microbatches m; each has rows of its own."""
    if len(dY) != len(X):
        raise ConfigError(f"X has {len(X)} microbatches and dY has {len(dY)}: must be as many")
    check_gradient("dW", dW, (None, None))
    outs, ins = dW.shape
    for index, (y, x) in enumerate(zip(dY, X, strict=True)):
        names = ("dY", "X") if len(dY) == 1 else (f"dY[{index}]", f"X[{index}]")
        check_matrix(names[0], y, (None, outs))
        check_matrix(names[1], x, (len(y), ins))
        check_same_dtype(names[1], x, names[0], y)
        if index:
            check_same_dtype(names[0], y, "dY[0]", dY[0])
    return outs, ins


def check_norm(dY: Tensor, X: Tensor, rstd: Tensor, mean: Tensor | None) -> tuple[int, int]:
    """(rows, n) of a norm's backward."""
    check_matrix("X", X, (None, None))
    rows, n = X.shape
    check_matrix("dY", dY, (rows, n))
    check_same_dtype("dY", dY, "X", X)
    check_statistics("rstd", rstd, rows)
    if mean is not None:
        check_statistics("mean", mean, rows)
    return rows, n


def check_embedding(dW: Tensor, dY: Tensor, indices: Tensor) -> None:
    """dW (vocabulary, width), dY (tokens, width), indices (tokens,) of int64."""
    if indices.dtype != torch.int64 or indices.dim() != 1:
        raise ConfigError(
            f"indices is {indices.dtype} of shape {tuple(indices.shape)}: must be int64, (tokens,)"
        )
    check_matrix("dY", dY, (len(indices), None))
    check_gradient("dW", dW, (None, dY.shape[1]))


def check_expert_wgrad(dW: Tensor, dY: Tensor, X: Tensor, offsets: Tensor) -> tuple[int, int, int]:
    """(rows, outs, ins) of dW[e] += dY[rows of e]ᵀ X[rows of e]."""
    check_matrix("dY", dY, (None, None))
    rows, outs = dY.shape
    check_matrix("X", X, (rows, None))
    check_same_dtype("X", X, "dY", dY)
    check_gradient("dW", dW, (None, outs, X.shape[1]))
    if offsets.dtype != torch.int32 or not offsets.is_contiguous():
        raise ConfigError(f"offsets is {offsets.dtype}: must be contiguous torch.int32")
    check_shape("offsets", offsets, (len(dW),))
    return rows, outs, int(X.shape[1])
