"""Triton, cuBLAS or torch: what computes each kernel's result on the device at hand.

On CUDA from sm_80 on the tables say whether Triton or cuBLAS runs a product; Triton, if it is
installed, runs what torch has no one kernel for. Elsewhere torch's own operators do. A group is
then a loop in order: the same additions, hence the same bits, as a call for each. Names that end in
`_` add to their first argument. `ops.py` makes torch operators of these, which the split calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import torch
from torch import Tensor

from . import tables
from .arguments import (
    LOW,
    check_dgrad,
    check_embedding,
    check_expert_wgrad,
    check_gradient,
    check_matrix,
    check_norm,
    check_wgrad,
)
from .target import architecture, can_use_descriptors, has_kernels


def _by_triton(tensor: Tensor) -> bool:
    return has_kernels(tensor.device)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device and its stream, wherever the tensors are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def names(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    transposed: bool = False,
) -> dict[str, str]:
    """What computes "dgrad" and "wgrad" of a layer on `device`, and how that was found.

    `shape`: (rows, outs, ins). `transposed`: the weight lies (ins, outs), as Conv1D's does; dW then
    is XᵀdY, and TMA cannot address W. Tensors are taken to be dense.
    """
    if not has_kernels(device):
        return dict.fromkeys(("dgrad", "wgrad"), f"torch on {device.type}")
    rows, outs, ins = shape
    able = outs * dtype.itemsize % 16 == 0 and ins * dtype.itemsize % 16 == 0
    arch, dW_shape = architecture(device), (rows, ins, outs) if transposed else shape
    found = {
        "dgrad": tables.choose("dgrad", arch, dtype, shape, able and not transposed),
        "wgrad": tables.choose("wgrad", arch, dtype, dW_shape, able),
    }
    return {
        kernel: f"{'Triton' if config.triton else 'cuBLAS'} ({config.how})"
        for kernel, config in found.items()
    }


def dgrad(dY: Tensor, W: Tensor) -> Tensor:
    """dX (rows, ins) = dY (rows, outs) @ W (outs, ins), in their dtype.

    Raises ConfigError naming the argument that does not fit, as all of these do.
    """
    shape = check_dgrad(dY, W)
    if _by_triton(dY):
        # dX, which is not there yet, will be dense.
        able = can_use_descriptors(dY, W) and shape[2] * W.element_size() % 16 == 0
        config = tables.choose("dgrad", architecture(dY.device), dY.dtype, shape, able)
        if config.triton:
            from . import dgrad as kernel

            with _on_device_of(dY):
                return kernel.dgrad(dY, W, config=config)
    return dY.mm(W)


def wgrad_(dW: Tensor, dY: Tensor, X: Tensor) -> None:
    """dW (outs, ins), fp32, += dYᵀ X; dY (rows, outs), X (rows, ins)."""
    grouped_wgrad_(dW, (dY,), (X,))


def grouped_wgrad_(dW: Tensor, dY: Sequence[Tensor], X: Sequence[Tensor]) -> None:
    """dW (outs, ins), fp32, += Σ dY[m]ᵀ X[m] over the microbatches m, in order.

    dY[m] (rows, outs), X[m] (rows, ins); rows may differ. On Triton several are one launch, with
    the bits of a call for each (wgrad.py).
    """
    check_wgrad(dW, dY, X)
    for by_triton, run in groupby(zip(dY, X, strict=True), lambda pair: _wgrad_by_triton(*pair)):
        if by_triton:
            from . import wgrad as kernel

            with _on_device_of(dW):
                kernel.wgrad(dW, *zip(*run, strict=True))
            continue
        for y, x in run:
            add_product(dW, y, x)


def _wgrad_by_triton(dY: Tensor, X: Tensor) -> bool:
    if not _by_triton(dY):
        return False
    able = can_use_descriptors(dY, X)
    shape = (len(dY), dY.shape[1], X.shape[1])
    return tables.choose("wgrad", architecture(dY.device), dY.dtype, shape, able).triton


def add_product(dW: Tensor, dY: Tensor, X: Tensor) -> None:
    """dW += dYᵀ X of one microbatch, by torch."""
    if dY.is_cuda and dY.dtype in LOW and hasattr(torch.ops.aten.mm, "dtype"):
        # torch ≥ 2.8: cuBLAS sums in fp32 and writes fp32; adding is a second kernel. Not yet run.
        dW.add_(torch.mm(dY.t(), X, out_dtype=torch.float32))
        return
    dW.addmm_(dY.to(dW.dtype).t(), X.to(dW.dtype))


def wgrad(dY: Tensor, X: Tensor) -> Tensor:
    """dW (outs, ins), fp32, of dY (rows, outs) and X (rows, ins)."""
    dW = torch.zeros(dY.shape[-1], X.shape[-1], dtype=torch.float32, device=dY.device)
    wgrad_(dW, dY, X)
    return dW


def expert_wgrad_(dW: Tensor, dY: Tensor, X: Tensor, offsets: Tensor) -> None:
    """dW (experts, outs, ins), fp32, += of each expert dYᵀ X over its rows.

    Rows are sorted by expert: offsets (experts,) int32 say where each one's end.
    """
    check_expert_wgrad(dW, dY, X, offsets)
    if _by_triton(dY):
        from . import expert_wgrad as kernel

        with _on_device_of(dY):
            kernel.expert_wgrad(dW, dY, X, offsets)
        return
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if start < end:
            add_product(dW[expert], dY[start:end], X[start:end])
        start = end


def bias_grad_(db: Tensor, dY: Tensor) -> None:
    """db (outs,), fp32, += the column sums of dY (rows, outs)."""
    check_matrix("dY", dY, (None, None))
    check_gradient("db", db, (dY.shape[1],))
    if _by_triton(dY):
        from . import bias_grad as kernel

        with _on_device_of(dY):
            kernel.bias_grad(db, dY)
        return
    db += dY.sum(0, dtype=db.dtype)


def norm_dgrad(
    dY: Tensor, X: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None, offset: float
) -> Tensor:
    """dX (rows, n) of a norm with scale offset + weight; RMS norm where mean is None."""
    _, n = check_norm(dY, X, rstd, mean)
    check_matrix("weight", weight, (n,))
    if _by_triton(X):
        from . import norm_dgrad as kernel

        if n <= kernel.LONGEST:
            with _on_device_of(X):
                return kernel.norm_dgrad(dY, X, weight, rstd, mean, offset)
    x_hat = _normalised(X, rstd, mean)
    g = dY.float() * (weight.float() + offset)
    d = g - x_hat * (g * x_hat).mean(1, keepdim=True)
    if mean is not None:
        d = d - g.mean(1, keepdim=True)
    return (d * rstd[:, None]).to(X.dtype)


def _normalised(X: Tensor, rstd: Tensor, mean: Tensor | None) -> Tensor:
    return (X.float() if mean is None else X.float() - mean[:, None]) * rstd[:, None]


def norm_wgrad_(
    dW: Tensor, db: Tensor | None, dY: Tensor, X: Tensor, rstd: Tensor, mean: Tensor | None
) -> None:
    """dW (n,), fp32, += Σ dY x̂ over the rows; db, if there is one, += Σ dY."""
    _, n = check_norm(dY, X, rstd, mean)
    check_gradient("dW", dW, (n,))
    if db is not None:
        check_gradient("db", db, (n,))
    if _by_triton(X):
        from . import norm_wgrad as kernel

        with _on_device_of(X):
            kernel.norm_wgrad(dW, db, dY, X, rstd, mean)
        return
    dW += (dY.float() * _normalised(X, rstd, mean)).sum(0)
    if db is not None:
        db += dY.sum(0, dtype=db.dtype)


def embedding_grad_(dW: Tensor, dY: Tensor, indices: Tensor, padding_idx: int = -1) -> None:
    """dW (vocabulary, width), fp32, += rows of dY at `indices`, except those of `padding_idx`."""
    check_embedding(dW, dY, indices)
    if _by_triton(dY):
        from . import embedding_grad as kernel

        with _on_device_of(dY):
            kernel.embedding_grad(dW, dY, indices, padding_idx)
        return
    kept = indices != padding_idx
    # accumulate=True sorts on CUDA, and so is deterministic; index_add_ is not.
    dW.index_put_((indices[kept],), dY[kept].to(dW.dtype), accumulate=True)
