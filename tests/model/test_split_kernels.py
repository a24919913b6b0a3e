"""W through zbpipe.kernels, as on a GPU; on CPU the same functions run on torch."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from splitting import run_split
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from counting import kernels_counted
from zbpipe.kernels import dispatch, ops
from zbpipe.model.rules import accumulate
from zbpipe.model.rules.products import Products
from zbpipe.model.split import Deferred, Splitter, wide_gradients
from zbpipe.runtime.memory import Allocations


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=2)
        self.up, self.down = nn.Linear(8, 12), Conv1D(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(x)).relu())


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Counts the kernels that W and I run."""
    return kernels_counted(monkeypatch)


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
    assert sorted(as_on_a_gpu) == ["bias_grad_", "dgrad", "embedding_grad_", "wgrad_"]
    assert as_on_a_gpu.total() == 3 * 7
    monkeypatch.setattr(accumulate, "_on_gpu", lambda tensor: False)
    for g, w in zip(got, grads(plain), strict=True):
        assert g.dtype == w.dtype == torch.float32
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "layer without bias": lambda: nn.LayerNorm(8, bias=False),
    "rms": lambda: nn.RMSNorm(8, eps=1e-6),
    "gemma": lambda: GemmaRMSNorm(8),
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("frozen", [False, True])
def test_norms_run_their_kernels(as_on_a_gpu, monkeypatch, make, dtype, frozen) -> None:
    """I and W of a deferred norm, of 3 microbatches; as torch has them, and as fp64 has them."""
    norm = make()
    with torch.no_grad():
        for p in norm.parameters():
            p += torch.linspace(-0.5, 0.5, p.numel())
    norm = norm.to(dtype)
    norm.weight.requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(3, 4, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    dYs = [torch.randn(3, 4, 8, generator=generator).to(dtype) for _ in range(3)]

    def trained(norm: nn.Module) -> list[torch.Tensor]:
        splitter = Splitter(norm, norms=True)
        with wide_gradients(norm.parameters()):
            seen = run_split(norm, xs, dYs, fused=False, delay=1, splitter=splitter)
            return seen[1::2] + [p.grad for p in norm.parameters() if p.grad is not None]

    plain, exact = copy.deepcopy(norm), copy.deepcopy(norm).double()
    got = trained(norm)
    # A bias alone is a plain sum, and of a norm that is frozen as a whole nothing is split.
    some = not frozen or getattr(norm, "bias", None) is not None
    assert as_on_a_gpu == Counter(norm_dgrad=3 * some, norm_wgrad_=3 * (not frozen))
    monkeypatch.setattr(accumulate, "_on_gpu", lambda tensor: False)
    rounding = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype]
    for g, w in zip(got, trained(plain), strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=rounding, atol=rounding)
    xs, dYs = [x.detach().double().requires_grad_() for x in xs], [dY.double() for dY in dYs]
    for g, w in zip(got, trained(exact), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=2 * rounding, atol=2 * rounding)


def test_a_norm_whose_output_is_wider_than_its_input_stays_with_torch(as_on_a_gpu) -> None:
    """transformers' have fp32 weights beside 16-bit activations; kernels take one dtype."""
    norm = LlamaRMSNorm(8)
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    run_split(norm, [x], [torch.randn(3, 8)], fused=False, splitter=Splitter(norm, norms=True))
    assert norm.weight.grad is not None and not as_on_a_gpu


def test_an_input_gradient_is_differentiated_again(as_on_a_gpu) -> None:
    """A gradient penalty inside F: with an operator that has a backward of its own."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).bfloat16()
    plain = copy.deepcopy(layer).double()
    x = torch.randn(3, 8).bfloat16()

    def penalty(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        (dX,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return dX.square().sum()

    entry = Deferred()
    with Splitter(layer).active(entry):
        penalty(layer, x.clone()).backward()
    entry.run()
    assert "dgrad" in as_on_a_gpu
    penalty(plain, x.clone().double()).backward()
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        error = (p.grad.double() - q.grad).abs().max() / q.grad.abs().max()
        assert float(error) < 3e-2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_of_32_bits_are_looked_up_too(as_on_a_gpu, dtype) -> None:
    embed = nn.Embedding(11, 8).bfloat16()
    embed.weight.main_grad = torch.zeros(11, 8)
    tokens, dY = torch.tensor([[3, 1, 3], [0, 10, 1]], dtype=dtype), torch.randn(2, 3, 8).bfloat16()
    run_split(embed, [tokens], [dY], fused=False)
    want = torch.zeros(11, 8).index_add(0, tokens.flatten(), dY.flatten(0, 1).float())
    assert as_on_a_gpu == {"embedding_grad_": 1}
    torch.testing.assert_close(embed.weight.main_grad, want)


def test_autocast_sums_in_the_gradient(as_on_a_gpu) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 12)
    x, dY = torch.randn(3, 4, 8), torch.randn(3, 4, 12).bfloat16()
    entry = Deferred()
    with Splitter(layer).active(entry), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(dY)
    entry.run()
    assert as_on_a_gpu == {"bias_grad_": 1, "wgrad_": 1}
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
    assert as_on_a_gpu == {"expert_wgrad_": 1}
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    assert bool((grads[0][1] == 1).all())


class Raw(nn.Module):
    """Products with parts of raw parameters, as eager experts make them, both ways round."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 8, 16, generator=generator).bfloat16())
        self.alone = nn.Parameter(torch.randn(16, 8, generator=generator).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.matmul(x, self.w[1]) + nn.functional.linear(x, self.alone)
        return torch.matmul(nn.functional.linear(y, self.w[2]), self.w[0, :, 3:11])


class Stacked(nn.Module):
    """torch.bmm with each expert's weight, (in, out) or (out, in)."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (3, 8, 5) if transposed else (3, 5, 8)
        self.w = nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.w.mT if self.transposed else self.w)


def gradients_of(stage: nn.Module, x: torch.Tensor, dY: torch.Tensor, main: bool) -> list:
    for p in stage.parameters() if main else ():
        p.main_grad = torch.ones(p.shape)
    entry = Deferred()
    with Products(stage.parameters(), entry):
        y = stage(x)
    y.backward(dY)
    entry.run()
    return [p.main_grad if main else p.grad for p in stage.parameters()]


CASES = [
    (Raw, (6, 8), (6, 8), {"dgrad": 2, "grouped_wgrad_": 4}),
    (lambda: Stacked(False), (3, 4, 5), (3, 4, 8), {"expert_wgrad_": 1}),
    (lambda: Stacked(True), (3, 4, 5), (3, 4, 8), {"expert_wgrad_": 1}),
    (lambda: Stacked(True), (3, 0, 5), (3, 0, 8), {"expert_wgrad_": 1}),
]


@pytest.mark.parametrize(("make", "x_shape", "y_shape", "kernels"), CASES)
@pytest.mark.parametrize("main", [True, False])
def test_raw_parameters(as_on_a_gpu, monkeypatch, make, x_shape, y_shape, kernels, main) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dY = (torch.randn(s, generator=generator).bfloat16() for s in (x_shape, y_shape))
    got = gradients_of(make(), x, dY, main)
    if main:
        assert as_on_a_gpu == kernels
    else:  # gradients of 16 bits stay with torch
        assert set(as_on_a_gpu) <= {"dgrad"}
    monkeypatch.setattr(accumulate, "_on_gpu", lambda tensor: False)
    for g, w in zip(got, gradients_of(make(), x, dY, main), strict=True):
        assert g.dtype == w.dtype == (torch.float32 if main else torch.bfloat16)
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
    if main and x.numel():
        plain = make().double()
        plain(x.double()).backward(dY.double())
        for g, p in zip(got, plain.parameters(), strict=True):
            # What lies between two products is rounded to 16 bits.
            torch.testing.assert_close(g.double() - 1, p.grad, rtol=2e-2, atol=2e-1)


def weight(dtype: torch.dtype, **attributes: object) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(4, 6, dtype=dtype))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("parameter", "runs"),
    [
        (weight(torch.float32), (False, False)),
        (weight(torch.float64), (False, False)),
        (weight(torch.bfloat16), (True, True)),
        (weight(torch.float16, main_grad=torch.zeros(4, 6)), (True, True)),
        (weight(torch.bfloat16, main_grad=torch.zeros(4, 6).bfloat16()), (True, False)),
        (weight(torch.bfloat16, main_grad=torch.zeros(6, 4).t()), (True, False)),
    ],
)
def test_what_a_step_leaves_to_the_kernels(as_on_a_gpu, parameter, runs) -> None:
    """What `left_to_kernels` says is what W and I of a Linear then do."""
    assert accumulate.left_to_kernels(parameter) == runs
    layer = nn.Linear(6, 4, bias=False)
    layer.weight = parameter
    x = torch.randn(3, 6).to(parameter.dtype).requires_grad_()
    with wide_gradients([parameter]):
        run_split(layer, [x], [torch.randn(3, 4).to(parameter.dtype)], fused=False)
    assert ("dgrad" in as_on_a_gpu, "wgrad_" in as_on_a_gpu) == runs


FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("operand", FLOATS)
@pytest.mark.parametrize("own", FLOATS)
@pytest.mark.parametrize("summed", [*FLOATS, None])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_short_way_is_the_general_one(
    as_on_a_gpu, monkeypatch, operand, own, summed, transposed
) -> None:
    """Of parameters in `own`, autocast or not, with gradients in `summed`, None: the operands'."""
    generator = torch.Generator().manual_seed(0)
    dY, X, before = (torch.randn(s, generator=generator) for s in ((7, 4), (7, 5), (4, 5)))
    dY, X = dY.to(operand), X.to(operand)
    found = []
    short = accumulate._plainly
    for way in (short, lambda parameter, operand: None):
        monkeypatch.setattr(accumulate, "_plainly", way)
        as_on_a_gpu.clear()
        weight, bias = torch.ones(4, 5, dtype=own), nn.Parameter(torch.ones(4, dtype=own))
        weight = nn.Parameter(weight.t().contiguous().t() if transposed else weight)
        for p, value in ((weight, before), (bias, before[:, 0])):
            p.grad_dtype = summed
            p.grad = torch.empty_like(p, dtype=summed or operand).copy_(value)
        assert (short(weight, dY) is weight.grad) == (weight.grad.dtype == operand)
        accumulate.add_product(weight, dY.t(), X)
        accumulate.add_sum(bias, dY)
        found.append((weight.grad, bias.grad, as_on_a_gpu.copy()))
    for a, b in zip(found[0][:2], found[1][:2], strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    kernels = operand.itemsize == 2 and summed == torch.float32
    expected = {"wgrad_": not transposed, "bias_grad_": 1} if kernels else {}
    assert found[0][2] == found[1][2] == Counter(expected)


class OnCuda(torch.Tensor):
    """Lies on the CPU and says that it does not."""

    is_cuda = True


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_short_way_is_taken_on_a_gpu_too(monkeypatch, dtype) -> None:
    def general(parameter: nn.Parameter, operand: torch.Tensor) -> None:
        raise AssertionError("the general way")

    monkeypatch.setattr(accumulate, "_for_kernel", general)
    weight, bias = nn.Parameter(torch.ones(4, 5).to(dtype)), nn.Parameter(torch.ones(4).to(dtype))
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    dY, X = torch.ones(7, 4, dtype=dtype).as_subclass(OnCuda), torch.ones(7, 5, dtype=dtype)
    accumulate.add_product(weight, dY.t(), X)
    accumulate.add_sum(bias, dY)
    assert bool((weight.grad == 8).all() and (bias.grad == 8).all())


def test_a_norm_that_no_kernel_adds_has_no_gradient_yet(as_on_a_gpu) -> None:
    """One whose bias has a gradient that a user laid out: the weight's is left to the rule."""
    norm = nn.LayerNorm(8)
    norm.bias.grad = torch.zeros(16)[::2]
    x, dY, rstd = torch.randn(3, 8), torch.randn(3, 8), torch.ones(3, 1)
    assert not accumulate.add_norm(norm.weight, norm.bias, dY, x, rstd, None)
    assert norm.weight.grad is None and not as_on_a_gpu
    norm.bias.grad = None
    assert accumulate.add_norm(norm.weight, norm.bias, dY, x, rstd, None)
    assert as_on_a_gpu == {"norm_wgrad_": 1}
    torch.testing.assert_close(norm.weight.grad, (dY * x).sum(0))
    torch.testing.assert_close(norm.bias.grad, dY.sum(0))


def test_trials_see_what_the_operators_allocate_inside() -> None:
    """As cuBLAS's product, before it is added; here the fp32 copies of 16-bit operands."""
    dY, X, dW = torch.zeros(64, 32).bfloat16(), torch.zeros(64, 16).bfloat16(), torch.zeros(32, 16)
    laps = []
    for kernels in (dispatch, ops):
        with torch.no_grad(), Allocations() as allocations:
            kernels.wgrad_(dW, dY, X)
            kernels.grouped_wgrad_(dW, [dY, dY], [X, X])
            dX = kernels.dgrad(dY, dW.bfloat16())
            laps.append((allocations.lap(), allocations._live))
            del dX
    assert laps[0] == laps[1] and laps[0][0] >= 4 * 64 * 32
