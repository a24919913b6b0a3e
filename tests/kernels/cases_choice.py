"""dispatch and tune with kernels that do run; test_kernels.py runs this file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import pytest
import torch
from drawing import DEVICE, DTYPES, HERE, POINTERS, assert_close, draw, sum_of_products
from torch import Tensor
from triton.compiler.errors import CompilationError

from zbpipe.kernels import (
    bias_grad,
    dgrad,
    dispatch,
    embedding_grad,
    expert_wgrad,
    norm_dgrad,
    norm_wgrad,
    tables,
    tune,
    wgrad,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dispatch_runs_the_kernels_as_torch_would(dtype, monkeypatch) -> None:
    launched = []
    inside = []

    @contextlib.contextmanager
    def on_device_of(tensor):
        inside.append(tensor)
        yield
        inside.pop()

    monkeypatch.setattr(dispatch, "_on_device_of", on_device_of)
    for module in (dgrad, wgrad, expert_wgrad, bias_grad, norm_dgrad, norm_wgrad, embedding_grad):
        name = module.__name__.rpartition(".")[2]
        plain = getattr(module, name)

        def counted(*args, plain=plain, name=name, **kwargs):
            launched.append(name)
            assert any(inside[-1] is arg for arg in args), name
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    measured = {"kernel": "dgrad", "architecture": HERE, "rows": 9, "outs": 16, "ins": 32}
    measured |= {"dtype": str(dtype).split(".")[1], "config": dataclasses.asdict(POINTERS)}
    both = [measured, measured | {"kernel": "wgrad"}]
    monkeypatch.setattr(tables, "measured", lambda: tuple(both))
    results = []
    for by_triton in (True, False):
        tables.choose.cache_clear()
        monkeypatch.setattr(dispatch, "_by_triton", lambda tensor, on=by_triton: on)
        results.append(everything(dtype))
    tables.choose.cache_clear()
    wanted = ["bias_grad", "dgrad", "embedding_grad", "expert_wgrad", "norm_dgrad", "norm_wgrad"]
    assert sorted(launched) == [*wanted, "wgrad", "wgrad"]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


OFFSETS = torch.tensor([2, 2, 8], dtype=torch.int32)
INDICES = torch.tensor([1, 6, 1, 0, 2, 3, 3, 5, 4])


def everything(dtype: torch.dtype) -> list[Tensor]:
    """A result of each function of dispatch.py."""
    dY, X, W = draw(2, 9, 16, dtype=dtype), draw(2, 9, 32, dtype=dtype), draw(16, 32, dtype=dtype)
    dW, db, dn, dm, table = draw(16, 32), draw(16), draw(32), draw(32, seed=1), draw(7, 16)
    rstd, mean = draw(9).abs(), draw(9, seed=1)
    experts = draw(3, 16, 32)
    dispatch.grouped_wgrad_(dW, list(dY), list(X))
    dispatch.wgrad_(dW, dY[0], X[0])
    dispatch.expert_wgrad_(experts, dY[0], X[0], OFFSETS.to(DEVICE))
    dispatch.bias_grad_(db, dY[0])
    dispatch.norm_wgrad_(dn, dm, X[0], X[1], rstd, mean)
    dispatch.embedding_grad_(table, dY[0], INDICES.to(DEVICE), 5)
    dX = dispatch.norm_dgrad(X[0], X[1], W[0], rstd, mean, 1.0)
    return [dispatch.dgrad(dY[0], W), experts, dW, db, dn, dm, table, dX]


@pytest.mark.parametrize("kernel", tune.KERNELS)
@pytest.mark.parametrize("winner", [0, 3])
def test_tune_enters_the_fastest_of_right_candidates(kernel, winner) -> None:
    timed = []

    def seconds_of(call) -> float:
        call()
        timed.append(call)
        return 1.0 if len(timed) - 1 == winner else 2.0

    entry = tune.measure(kernel, (40, 48, 64), torch.bfloat16, DEVICE, seconds_of)
    assert entry["seconds"] == 1.0 and entry["cublas_seconds"] == (2.0 if winner else 1.0)
    assert entry["config"]["triton"] == (winner > 0)
    assert (entry["rows"], entry["outs"], entry["ins"]) == (40, 48, 64)
    assert len(timed) > 5 and f"fastest of {len(timed)}" in entry["config"]["how"]


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_tune_passes_over_what_triton_cannot_compile(kernel, monkeypatch, capsys) -> None:
    module = {"dgrad": dgrad, "wgrad": wgrad}[kernel]
    plain, asked = getattr(module, kernel), []

    def failing(*args, config):
        asked.append(config)
        if len(asked) == 1:
            raise CompilationError(None, None, "too large a tile")
        return plain(*args, config=config)

    monkeypatch.setattr(module, kernel, failing)
    entry = tune.measure(kernel, (40, 48, 64), torch.bfloat16, DEVICE, lambda call: 1.0)
    assert len(asked) > 5 and f"fastest of {len(set(asked))} on" in entry["config"]["how"]
    said = capsys.readouterr().err
    assert f"{kernel} torch.bfloat16 (40, 48, 64)" in said and "too large a tile" in said


def test_what_tune_enters_can_be_launched(tmp_path, monkeypatch) -> None:
    """Also where cuBLAS won and the entry has no tiles; with tiles from the tables."""
    path, timed = tmp_path / "measured.json", itertools.count()
    for kernel in tune.KERNELS:
        won = tune.measure(kernel, (40, 48, 64), torch.bfloat16, DEVICE, lambda _: next(timed))
        assert won["config"]["rows"] == 0 and not won["config"]["triton"]
        tune.enter(won, path)
    monkeypatch.setattr(tables, "measured", lambda: tuple(json.loads(path.read_text())["entries"]))
    for module in (dgrad, wgrad, expert_wgrad):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    tables.choose.cache_clear()
    dY, X, W = (draw(*s, dtype=torch.bfloat16) for s in ((40, 48), (40, 64), (48, 64)))
    dW, experts = draw(48, 64), draw(1, 48, 64)
    want = [
        wgrad.reference(dW, dY, X),
        expert_wgrad.reference(experts, dY, X, torch.tensor([40])),
    ]
    wgrad.wgrad(dW, dY, X)
    expert_wgrad.expert_wgrad(experts, dY, X, torch.tensor([40]).int().to(DEVICE))
    tables.choose.cache_clear()
    for got, wanted in zip((dW, experts), want, strict=True):
        assert_close(got, wanted, *sum_of_products(torch.bfloat16))
    assert_close(dgrad.dgrad(dY, W), dgrad.reference(dY, W), 1e-2, 1e-2)


def test_tune_refuses_a_wrong_candidate(monkeypatch) -> None:
    monkeypatch.setattr(dgrad, "dgrad", lambda dY, W, config: dY @ W + 1)
    with pytest.raises(RuntimeError, match="differs from cuBLAS"):
        tune.measure("dgrad", (40, 48, 64), torch.float32, DEVICE, lambda call: 1.0)
