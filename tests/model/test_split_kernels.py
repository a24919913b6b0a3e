"""W through zbpipe.kernels, as on a GPU; on CPU the same functions run on torch."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import run_split
from torch import nn
from transformers.pytorch_utils import Conv1D

from zbpipe.model.rules import accumulate
from zbpipe.model.rules.products import Products
from zbpipe.model.split import Deferred, Splitter, wide_gradients

dispatch = pytest.importorskip(
    "zbpipe.kernels.dispatch", reason="zbpipe is not installed, only on the path"
)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.up, self.down = nn.Linear(8, 12), Conv1D(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(x)).relu())


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Counts the kernels that W runs."""
    calls = []

    class Counting:
        def __getattr__(self, name: str):
            calls.append(name)
            return getattr(dispatch, name)

    monkeypatch.setattr(accumulate, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(accumulate, "_kernels", Counting)
    return calls


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("main", [True, False])
def test_the_kernels_add_what_torch_adds(as_on_a_gpu, monkeypatch, fused, main) -> None:
    torch.manual_seed(0)
    stage = Stage().bfloat16()
    plain = copy.deepcopy(stage)
    xs = [torch.randint(11, (3, 4)) for _ in range(3)]
    dYs = [torch.randn(3, 4, 8).bfloat16() for _ in range(3)]

    def grads(stage: nn.Module) -> list[torch.Tensor]:
        for p in stage.parameters() if main else ():
            p.main_grad = torch.zeros(p.shape)
        with wide_gradients(stage.parameters()):
            run_split(stage, xs, dYs, fused=fused, delay=1)
            return [p.main_grad if main else p.grad for p in stage.parameters()]

    got = grads(stage)
    assert sorted(set(as_on_a_gpu)) == ["bias_grad_", "dgrad", "embedding_grad_", "wgrad_"]
    assert len(as_on_a_gpu) == 3 * 7
    monkeypatch.setattr(accumulate, "_on_gpu", lambda tensor: False)
    for g, w in zip(got, grads(plain), strict=True):
        assert g.dtype == w.dtype == torch.float32
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


def test_autocast_sums_in_the_gradient(as_on_a_gpu) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 12)
    x, dY = torch.randn(3, 4, 8), torch.randn(3, 4, 12).bfloat16()
    entry = Deferred()
    with Splitter(layer).active(entry), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(dY)
    entry.run()
    assert sorted(as_on_a_gpu) == ["bias_grad_", "wgrad_"]
    rows = dY.flatten(0, 1).double()
    want = rows.t() @ x.bfloat16().flatten(0, 1).double()
    assert float((layer.weight.grad - want).abs().max() / want.abs().max()) < 1e-6


def test_gradients_of_16_bits_stay_with_torch(as_on_a_gpu) -> None:
    stage = Stage().bfloat16()
    x, dY = [torch.randint(11, (3, 4))], [torch.randn(3, 4, 8).bfloat16()]
    run_split(stage, x, dY, fused=False)
    assert set(as_on_a_gpu) == {"dgrad"}
    assert stage.up.weight.grad.dtype == torch.bfloat16


class Experts(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (3, 8, 16) if transposed else (3, 16, 8)
        self.w = nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.w if self.transposed else self.w.transpose(-2, -1)
        return nn.functional.grouped_mm(x, w, offs=torch.tensor([4, 4, 9], dtype=torch.int32))


@pytest.mark.parametrize("transposed", [True, False])
def test_experts_are_one_kernel(as_on_a_gpu, monkeypatch, transposed) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dY = (torch.randn(10, n, generator=generator).bfloat16() for n in (8, 16))
    grads = []
    for on_gpu in (True, False):
        monkeypatch.setattr(accumulate, "_on_gpu", lambda tensor, on=on_gpu: on)
        stage, entry = Experts(transposed), Deferred()
        stage.w.main_grad = torch.ones(stage.w.shape)
        with Products(stage.parameters(), entry):
            y = stage(x)
        y.backward(dY)
        entry.run()
        grads.append(stage.w.main_grad)
    assert as_on_a_gpu == ["expert_wgrad_"]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    assert bool((grads[0][1] == 1).all())
