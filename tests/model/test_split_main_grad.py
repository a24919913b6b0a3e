"""Low-precision weights: gradients summed in fp32, in `.main_grad` or in `.grad` during a step."""

from __future__ import annotations

import pytest
import torch
from splitting import run_split
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from zbpipe.errors import ZbpipeError
from zbpipe.model.split import Deferred, Splitter, fire_hooks, mute_hooks, wide_gradients

MICROBATCHES = 64
LAYERS = [lambda: nn.Linear(8, 4), lambda: Conv1D(4, 8), lambda: nn.LayerNorm(8)]


def data(out: int) -> tuple[list[Tensor], list[Tensor]]:
    """One-sided, so that a bf16 sum soon stops growing."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.rand(2, 8, generator=generator).bfloat16() for _ in range(MICROBATCHES)]
    return xs, [torch.rand(2, out, generator=generator).bfloat16() for _ in range(MICROBATCHES)]


def exact(layer: nn.Module, xs: list[Tensor], dYs: list[Tensor]) -> list[Tensor]:
    """The gradients of the layer's bf16 weights in fp64."""
    twin = type(layer)(4, 8) if isinstance(layer, Conv1D) else None
    twin = twin or (nn.LayerNorm(8) if isinstance(layer, nn.LayerNorm) else nn.Linear(8, 4))
    twin.load_state_dict(layer.state_dict())
    twin = twin.double()
    for x, dY in zip(xs, dYs, strict=True):
        twin(x.double()).backward(dY.double())
    return [p.grad for p in twin.parameters()]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("make", LAYERS)
def test_main_grad_takes_what_w_adds(make) -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        layer = make().bfloat16()
        for p in layer.parameters():
            p.main_grad = torch.zeros(p.shape)
        xs, dYs = data(8 if isinstance(layer, nn.LayerNorm) else 4)
        splitter = Splitter(layer, norms=True)
        run_split(layer, xs, dYs, fused=fused, delay=2, splitter=splitter)
        assert all(p.grad is None for p in layer.parameters())
        results.append([p.main_grad for p in layer.parameters()])
    for b, iw, want in zip(*results, exact(layer, xs, dYs), strict=True):
        assert torch.equal(b, iw)
        assert error(iw, want) < 1e-6


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("norms", [True, False])
def test_a_step_in_fp32_is_rounded_once(make, norms) -> None:
    torch.manual_seed(0)
    wide, narrow = make().bfloat16(), make().bfloat16()
    narrow.load_state_dict(wide.state_dict())
    xs, dYs = data(8 if isinstance(wide, nn.LayerNorm) else 4)
    with wide_gradients(wide.parameters()):
        run_split(wide, xs, dYs, fused=False, delay=1, splitter=Splitter(wide, norms=norms))
        assert all(p.grad.dtype == torch.float32 for p in wide.parameters())
    run_split(narrow, xs, dYs, fused=False, delay=1, splitter=Splitter(narrow, norms=norms))
    for w, n, want in zip(
        wide.parameters(), narrow.parameters(), exact(wide, xs, dYs), strict=True
    ):
        assert w.grad.dtype == torch.bfloat16
        assert error(w.grad, want) <= 2**-8 < error(n.grad, want)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_optimizers_take_the_gradients(optimizer) -> None:
    layer = nn.Linear(8, 4).bfloat16()
    before = layer.weight.detach().clone()
    xs, dYs = data(4)
    for _ in range(2):  # the second on top of the first
        with wide_gradients(layer.parameters()):
            run_split(layer, xs, dYs, fused=False)
    optimizer(layer.parameters(), lr=0.1).step()
    assert not torch.equal(layer.weight, before)


def test_gradients_are_narrow_again_after_an_exception() -> None:
    layer = nn.Linear(8, 4).bfloat16()
    with pytest.raises(KeyError), wide_gradients(layer.parameters()):
        raise KeyError
    layer(torch.randn(2, 8).bfloat16()).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16


def test_wide_parameters_are_left_alone() -> None:
    layer = nn.Linear(8, 4)
    layer.weight.grad = grad = torch.ones(4, 8)
    with wide_gradients(layer.parameters()):
        assert layer.weight.grad is grad
    assert layer.weight.grad is grad


def test_an_older_torch_is_told_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr("zbpipe.model.split.Parameter", object)
    with pytest.raises(ZbpipeError, match=r"torch ≥ 2.9.*main_grad"):
        wide_gradients([]).__enter__()


def test_hooks_fire_for_a_main_grad() -> None:
    layer, fired = nn.Linear(8, 4, bias=False).bfloat16(), []
    layer.weight.main_grad = torch.zeros(4, 8)
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.main_grad.sum()))
    entry = Deferred()
    with Splitter(layer).active(entry), mute_hooks([layer.weight]):
        layer(torch.ones(2, 8).bfloat16()).sum().backward()
    entry.run()
    fire_hooks([layer.weight])
    assert fired == [64]
