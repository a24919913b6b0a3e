"""Every rule gives autograd's gradients, whatever the shapes, strides, dtypes and frozen parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from splitting import assert_close, assert_same_training, gradients, run_plain, run_split
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from zbpipe.model.split import Deferred, Splitter

exhaustive = settings(derandomize=True, deadline=None, max_examples=60)
leading = st.lists(st.integers(0, 4), min_size=0, max_size=3)


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def freeze(module: nn.Module, weight: bool, bias: bool) -> nn.Module:
    module = module.double()
    module.weight.requires_grad_(not weight)
    if getattr(module, "bias", None) is not None:
        module.bias.requires_grad_(not bias)
    return module


@exhaustive
@given(
    leading=leading,
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    kind=st.sampled_from(["linear", "no bias", "conv1d"]),
    frozen=st.tuples(st.booleans(), st.booleans()),
    needs_dx=st.booleans(),
    microbatches=st.integers(1, 3),
    delay=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
def test_linear_matches_autograd(
    leading, sizes, kind, frozen, needs_dx, microbatches, delay, seed
) -> None:
    fan_in, fan_out = sizes
    layer = Conv1D(fan_out, fan_in) if kind == "conv1d" else None
    layer = layer or nn.Linear(fan_in, fan_out, bias=kind == "linear")
    generator = torch.Generator().manual_seed(seed)
    xs = [draw(generator, *leading, fan_in) for _ in range(microbatches)]
    dYs = [draw(generator, *leading, fan_out) for _ in range(microbatches)]
    for x in xs:
        x.requires_grad_(needs_dx)
    assert_same_training(freeze(layer, *frozen), xs, dYs, delay=delay)


@exhaustive
@given(
    leading=leading,
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    padding=st.booleans(),
    frozen=st.booleans(),
    microbatches=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_embedding_matches_autograd(leading, sizes, padding, frozen, microbatches, seed) -> None:
    rows, width = sizes
    layer = nn.Embedding(rows, width, padding_idx=rows - 1 if padding else None)
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randint(rows, leading, generator=generator) for _ in range(microbatches)]
    dYs = [draw(generator, *leading, width) for _ in range(microbatches)]
    assert_same_training(freeze(layer, frozen, False), xs, dYs)


def as_transposed(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("layout", [as_transposed, lambda t: t[:1, :, :1].expand_as(t)])
@pytest.mark.parametrize("layer", [nn.Linear(3, 5), nn.Linear(3, 5, bias=False), Conv1D(5, 3)])
def test_strided_inputs_and_output_gradients(layer, layout) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dY = draw(generator, 4, 6, 3), draw(generator, 4, 6, 5)
    if not isinstance(layer, Conv1D):  # whose own forward asks for .view()
        x = layout(x)
    assert_same_training(layer.double(), [x.requires_grad_()], [layout(dY)])


def test_an_expanded_gradient_of_a_sum() -> None:
    layer, x = nn.Linear(3, 5).double(), torch.ones(2, 4, 3, dtype=torch.float64)
    entry = Deferred()
    with Splitter(layer).active(entry):
        layer(x).sum().backward()
    entry.run()
    assert torch.equal(layer.bias.grad, torch.full((5,), 8.0, dtype=torch.float64))
    assert torch.equal(layer.weight.grad, torch.full((5, 3), 8.0, dtype=torch.float64))


@pytest.mark.parametrize("layer", [nn.Linear(48, 64), Conv1D(64, 48)])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_gives_what_plain_autocast_gives(layer, backward_inside) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 32, 48, requires_grad=True)
    dY = torch.randn(4, 32, 64).bfloat16()
    results = []
    for split in (False, True):
        layer.zero_grad()
        x.grad = None
        entry = Deferred()
        splitter = Splitter(layer, excluded=() if split else layer.parameters())
        with splitter.active(entry), torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            if backward_inside:
                y.backward(dY)
        if not backward_inside:
            y.backward(dY)
        assert len(entry) == split
        entry.run()
        results.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_backward_under_autocast_keeps_the_dtypes_of_forward() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 64)
    x, dY = torch.randn(32, 48, requires_grad=True), torch.randn(32, 64)
    entry = Deferred()
    with Splitter(layer).active(entry):
        y = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            y.backward(dY)
            entry.run()
    assert torch.equal(x.grad, dY @ layer.weight)
    assert torch.equal(layer.weight.grad, dY.t() @ x)


def test_double_is_left_alone_by_autocast() -> None:
    layer, x = nn.Linear(4, 3).double(), torch.randn(2, 4, dtype=torch.float64)
    entry = Deferred()
    with Splitter(layer).active(entry), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.float64


def test_bf16_weights() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
    xs = [torch.randn(2, 16, 32).bfloat16().requires_grad_() for _ in range(3)]
    # dW of several microbatches: one rounding fewer each than autograd, so not bitwise.
    assert_same_training(layer, xs, [torch.randn_like(x) for x in xs], tolerance=2**-6)


def test_gradient_is_kept_and_laid_out_as_autograd_would() -> None:
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.randn(4, 3).t())
    x, dY = torch.randn(5, 4), torch.randn(5, 3)
    run_split(layer, [x], [dY], fused=False)
    first = layer.weight.grad
    assert first.stride() == layer.weight.stride() == (1, 3)
    run_split(layer, [x], [dY], fused=True)
    assert layer.weight.grad is first
    assert_close(first, 2 * dY.t() @ x, 1e-6)


def test_a_gradient_of_another_dtype_is_added_to() -> None:
    layer = nn.Linear(4, 3).bfloat16()
    if not hasattr(layer.weight, "grad_dtype"):
        layer.weight.grad = None  # older torch: .grad has the weight's dtype, nothing to choose
    else:
        layer.weight.grad_dtype = torch.float32
    x, dY = torch.randn(5, 4).bfloat16(), torch.randn(5, 3).bfloat16()
    for _ in range(2):
        run_split(layer, [x], [dY], fused=False)
    want = (2 * dY.t().mm(x)).float()
    assert_close(layer.weight.grad.float(), want, 1e-2)
    assert layer.weight.grad.dtype == getattr(layer.weight, "grad_dtype", torch.bfloat16)


def test_in_place_operations_on_the_output() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert_same_training(layer, [x], [torch.randn(2, 5, 2, dtype=torch.float64)])


def test_output_gradient_shared_with_a_residual_is_not_overwritten() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.a(x)
            return x + self.b(x) + x * 2

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert_same_training(Residual().double(), [x], [torch.randn(3, 4, dtype=torch.float64)])


def test_changing_an_input_in_place_before_backward_is_an_error() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    with Splitter(layer).active(Deferred()):
        y = layer(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_changing_a_weight_before_backward_is_an_error() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3, requires_grad=True)
    with Splitter(layer).active(Deferred()):
        y = layer(x)
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_saved_tensor_hooks_see_the_input_once_and_may_replace_it() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3, requires_grad=True)
    packed: list[Tensor] = []

    def pack(t: Tensor) -> int:
        packed.append(t.detach().clone())
        return len(packed) - 1

    entry = Deferred()
    with Splitter(layer).active(entry):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
            y = layer(x)
        y.backward(torch.ones(2, 4))
    entry.run()
    assert sum(p.shape == x.shape and torch.equal(p, x) for p in packed) == 1
    assert torch.equal(layer.weight.grad, torch.ones(4, 2) @ x.detach())


def test_inner_autograd_grad_accumulates_nothing() -> None:
    """A gradient penalty inside forward must not leave weight gradients in the entry."""

    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = nn.Embedding(7, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            y = self.fc(h).tanh()
            (slope,) = torch.autograd.grad(y.sum(), h, create_graph=True)
            (flat,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
            (own,) = torch.autograd.grad(y.sum(), self.fc.weight, create_graph=True)
            return y + slope * slope + flat + own.sum()

    model, x = Penalty().double(), torch.randint(7, (2, 5))
    dY = torch.randn(2, 5, 3, dtype=torch.float64)
    assert_same_training(model, [x, x], [dY, dY], bitwise=False)


def test_backward_for_chosen_inputs_leaves_the_others_alone() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3, requires_grad=True)
    for wanted in ([x], [layer.bias], [layer.weight, x]):
        layer.zero_grad()
        x.grad = None
        entry = Deferred()
        with Splitter(layer).active(entry):
            torch.autograd.backward(layer(x).sum(), inputs=wanted)
        entry.run()
        for tensor in (x, layer.weight, layer.bias):
            assert (tensor.grad is not None) == any(tensor is w for w in wanted)


def test_an_undefined_output_gradient_leaves_no_zeros() -> None:
    class Blocked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dY):
            return None

    layer = nn.Linear(3, 4)
    entry = Deferred()
    with Splitter(layer).active(entry):
        Blocked.apply(layer(torch.randn(2, 3))).sum().backward()
    assert len(entry) == 0 and layer.weight.grad is None


def test_tensor_subclasses_and_functorch_take_the_plain_path() -> None:
    class Tagged(Tensor):
        pass

    layer = nn.Linear(3, 4).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    entry = Deferred()
    with Splitter(layer).active(entry):
        layer(x.as_subclass(Tagged)).sum().backward()
        torch.func.vmap(layer)(x).sum().backward()
    assert len(entry) == 0
    twice = gradients(layer)
    layer.zero_grad()
    run_plain(layer, [x, x], [torch.ones(2, 4, dtype=torch.float64)] * 2)
    assert_close(twice["weight"], layer.weight.grad, 1e-12)


def test_keyword_and_wrong_arguments_reach_forward_as_ever() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    with Splitter(layer).active(Deferred()):
        assert torch.equal(layer(input=x), layer(x))
        with pytest.raises(TypeError, match="input"):
            layer(nonsense=x)


def test_no_grad_forward_records_nothing() -> None:
    layer = nn.Linear(3, 4)
    with Splitter(layer).active(Deferred()), torch.no_grad():
        assert not layer(torch.randn(2, 3)).requires_grad
