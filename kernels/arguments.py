"""What the launchers ask of their arguments; each complaint names the argument and its value."""

from __future__ import annotations

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


def check_ring(first: int, count: int, slots: int) -> None:
    """Microbatches `first` to `first + count` modulo `slots` must be distinct slots."""
    if not 0 <= first < max(slots, 1):
        raise ConfigError(f"first = {first}: must be a slot, 0 to {slots - 1}")
    if not 0 <= count <= slots:
        raise ConfigError(f"count = {count}: must be 0 to {slots}, the number of slots")


def as_ring(name: str, tensor: Tensor) -> Tensor:
    """(rows, n) as (1, rows, n): one microbatch is a ring of one slot."""
    if tensor.dim() == 2:
        return tensor.unsqueeze(0)
    check_shape(name, tensor, (None, None, None))
    return tensor


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


def check_wgrad(dW: Tensor, dY: Tensor, X: Tensor, first: int, count: int) -> tuple[int, int, int]:
    """(rows, outs, ins) of dW += Σ dY[s]ᵀ X[s]; dY and X are rings."""
    check_matrix("dY", dY, (None, None, None))
    slots, rows, outs = dY.shape
    check_matrix("X", X, (slots, rows, None))
    check_same_dtype("X", X, "dY", dY)
    ins = int(X.shape[2])
    check_gradient("dW", dW, (outs, ins))
    check_ring(first, count, slots)
    return rows, outs, ins


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
