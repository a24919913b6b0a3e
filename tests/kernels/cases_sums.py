"""Sums over rows in Triton: biases, norms, embeddings. test_kernels.py runs this file."""

from __future__ import annotations

import pytest
import torch
from drawing import DEVICE, DTYPES, SUM, TOLERANCES, assert_close, draw
from torch import Tensor

from zbpipe.kernels import bias_grad, embedding_grad, norm_dgrad, norm_wgrad


@pytest.mark.parametrize(("rows", "outs"), [(1, 1), (17, 129), (129, 33), (300, 5), (0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_grad(rows, outs, dtype) -> None:
    dY, db = draw(rows, outs, dtype=dtype), draw(outs)
    want = bias_grad.reference(db, dY)
    assert bias_grad.bias_grad(db, dY) is db
    assert_close(db, want, *SUM)


def norm_of(rows: int, n: int, dtype: torch.dtype, centred: bool) -> tuple[Tensor, ...]:
    X, dY = draw(rows, n, dtype=dtype), draw(rows, n, dtype=dtype, seed=1)
    mean = X.float().mean(1) if centred else None
    x = X.float() if mean is None else X.float() - mean[:, None]
    return dY, X, (x.square().mean(1) + 1e-5).rsqrt(), mean


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("rows", "n"), [(1, 5), (17, 129), (3, 64), (0, 5)])
@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
def test_norm_dgrad(centred, rows, n, dtype, atol, rtol) -> None:
    dY, X, rstd, mean = norm_of(rows, n, dtype, centred)
    weight = draw(n, dtype=dtype)
    poisoned = torch.full((rows, n), torch.nan, dtype=dtype, device=DEVICE)
    norm_dgrad.norm_dgrad(dY, X, weight, rstd, mean, 1.0, out=poisoned)
    assert_close(poisoned, norm_dgrad.reference(dY, X, weight, rstd, mean, 1.0), atol, rtol)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (17, 129), (129, 33), (300, 5), (0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_norm_wgrad(centred, rows, n, dtype, bias) -> None:
    dY, X, rstd, mean = norm_of(rows, n, dtype, centred)
    dW, db = draw(n), draw(n, seed=1) if bias else None
    want = norm_wgrad.reference(dW, db, dY, X, rstd, mean)
    norm_wgrad.norm_wgrad(dW, db, dY, X, rstd, mean)
    assert_close(dW, want[0], *SUM)
    if db is not None:
        assert_close(db, want[1], *SUM)


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (17, 33), (40, 513), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_grad(padding_idx, tokens, width, dtype) -> None:
    indices = torch.randint(7, (tokens,), generator=torch.Generator().manual_seed(tokens))
    indices = indices.to(DEVICE)
    dY, dW = draw(tokens, width, dtype=dtype), draw(9, width)
    again, want = dW.clone(), embedding_grad.reference(dW, dY, indices, padding_idx)
    embedding_grad.embedding_grad(dW, dY, indices, padding_idx)
    assert_close(dW, want, *SUM)
    # In the order of the tokens: bitwise what a loop of additions gives.
    for index, row in zip(indices.tolist(), dY, strict=True):
        if index != padding_idx:
            again[index] += row.float()
    assert torch.equal(dW, again)
