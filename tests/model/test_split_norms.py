"""Norms of every class: recognised by what they compute; deferred where that is asked for."""

from __future__ import annotations

import importlib

import pytest
import torch
from splitting import assert_same_training, run_plain, run_split
from torch import Tensor, nn

from zbpipe.model.rules.norm import Form, form_of
from zbpipe.model.split import Deferred, Splitter

CLASSES = {
    "llama.modeling_llama.LlamaRMSNorm": Form(False, 0.0, 1e-6),
    "qwen3.modeling_qwen3.Qwen3RMSNorm": Form(False, 0.0, 1e-6),
    "gemma.modeling_gemma.GemmaRMSNorm": Form(False, 1.0, 1e-6),
    "gemma3.modeling_gemma3.Gemma3RMSNorm": Form(False, 1.0, 1e-6),
    "olmo2.modeling_olmo2.Olmo2RMSNorm": Form(False, 0.0, 1e-6),
    "mixtral.modeling_mixtral.MixtralRMSNorm": Form(False, 0.0, 1e-6),
    "t5.modeling_t5.T5LayerNorm": Form(False, 0.0, 1e-6),
}


def made(path: str) -> nn.Module:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)(8)


def shaken(module: nn.Module) -> nn.Module:
    """With weights that are not all alike."""
    with torch.no_grad():
        for index, p in enumerate(module.parameters()):
            p += torch.linspace(-0.5, 0.5 + index, p.numel())
    return module


class ScaledRMSNorm(nn.Module):
    """Looks like one, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)


class DetachedLayerNorm(nn.Module):
    """The right values, other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach()


@pytest.mark.parametrize("path", CLASSES)
def test_a_class_is_known_by_what_it_computes(path) -> None:
    assert form_of(made(path)) == CLASSES[path]


@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-12])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_torch_norms_are_known_with_their_eps(kind, eps) -> None:
    assert form_of(kind(8, eps=eps)) == Form(kind is nn.LayerNorm, 0.0, eps)


@pytest.mark.parametrize("module", [ScaledRMSNorm(), DetachedLayerNorm()])
def test_what_only_looks_like_a_norm_stays_in_i(module) -> None:
    state = torch.get_rng_state()
    ((_, reason),) = Splitter(module, norms=True).report().not_split
    assert "no layer norm or RMS norm" in reason
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert_same_training(module.double(), [x], [torch.randn(3, 8, dtype=torch.float64)])


def test_norms_stay_in_i_by_choice() -> None:
    ((_, reason),) = Splitter(nn.LayerNorm(8)).report().not_split
    assert "by choice" in reason
    assert Splitter(nn.LayerNorm(8), norms=True).report().deferred_share == 1


MODULES = [
    lambda: nn.LayerNorm(8),
    lambda: nn.LayerNorm(8, bias=False),
    lambda: nn.RMSNorm(8, eps=1e-6),
    *(lambda path=path: made(path) for path in CLASSES),
]


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
@pytest.mark.parametrize("needs_dx", [True, False])
def test_a_deferred_norm_gives_autograds_gradients(make, frozen, needs_dx) -> None:
    stages = [shaken(make()).double() for _ in range(3)]
    generator = torch.Generator().manual_seed(3)
    draw = {"generator": generator, "dtype": torch.float64}
    xs = [torch.randn(2, 5, 8, **draw).requires_grad_(needs_dx) for _ in range(2)]
    dYs = [torch.randn(2, 5, 8, **draw) for _ in range(2)]
    for stage in stages:
        if getattr(stage, frozen or "", None) is not None:
            getattr(stage, frozen).requires_grad_(False)
    want = run_plain(stages[0], xs, dYs)
    for stage, fused in zip(stages[1:], (True, False), strict=True):
        got = run_split(stage, xs, dYs, fused=fused, splitter=Splitter(stage, norms=True))
        for g, w in zip(got, want, strict=True):
            # transformers' classes compute in fp32 inside.
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
    for p, b, iw in zip(*(s.parameters() for s in stages), strict=True):
        assert (p.grad is None) == (b.grad is None) == (iw.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(iw.grad, p.grad, rtol=1e-5, atol=1e-5)
            assert torch.equal(b.grad, iw.grad)


def test_forward_keeps_its_bits_in_bf16() -> None:
    norm = shaken(made("llama.modeling_llama.LlamaRMSNorm")).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    with Splitter(norm, norms=True).active(Deferred()):
        assert torch.equal(norm(x.clone().requires_grad_()), norm(x))


def test_a_norm_inside_autograd_grad_accumulates_nothing() -> None:
    norm = shaken(nn.LayerNorm(8)).double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(norm(x).square().sum(), (x, *norm.parameters()))
    entry = Deferred()
    with Splitter(norm, norms=True).active(entry):
        got = torch.autograd.grad(norm(x).square().sum(), (x, *norm.parameters()))
    assert len(entry) == 0
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-12)
