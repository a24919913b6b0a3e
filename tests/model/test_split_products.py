"""Products inside a forward that is not ours: found, deferred, and otherwise left to autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from splitting import assert_same_training
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import Llama4TextConfig
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from zbpipe.model.graph import used_directly
from zbpipe.model.rules import choose
from zbpipe.model.rules.products import Products
from zbpipe.model.split import Deferred, Splitter


@pytest.fixture(autouse=True)
def as_of_a_library(monkeypatch):
    """Let this file's classes be tried like those of transformers."""
    monkeypatch.setattr(choose, "TRIED", (*choose.TRIED, __name__.partition(".")[0]))


def double(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Scaled(nn.Linear):
    """A subclass that calls its parent, and remembers that it did."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * super().forward(x)


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 0.5, self.bias)


class Twice(nn.Linear):
    """Its weight in a product, and in another way."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.weight.sum()


class Stubborn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * float(x.sum().item())


class ScaledEmbedding(nn.Embedding):
    def forward(self, indices: Tensor) -> Tensor:
        return super().forward(indices) * 3.0


@pytest.mark.parametrize(
    "layer", [FalconLinear(3, 5), FalconLinear(3, 5, bias=False), Scaled(3, 5)]
)
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (0, 3)])
def test_a_subclass_with_products_is_deferred(layer, shape) -> None:
    layer = layer.double()
    assert Splitter(layer).report().deferred_share == 1
    xs = [double(*shape, seed=i).requires_grad_() for i in range(3)]
    assert_same_training(layer, xs, [double(*shape[:-1], 5, seed=9 + i) for i in range(3)])
    entry = Deferred()
    with Splitter(layer).active(entry):
        layer(double(*shape)).sum().backward()
    due = {id(p) for p in entry.parameters()}
    assert due == {id(p) for p in layer.parameters()}
    assert all(p.grad is None for p in layer.parameters())


def test_a_users_own_forward_is_not_tried(monkeypatch) -> None:
    monkeypatch.undo()
    layer = Scaled(3, 5)
    report = Splitter(layer).report()
    assert report.deferred_share == 0 and layer.calls == 0
    assert "not tried on made-up data" in report.not_split[0][1]


def test_a_trial_leaves_no_trace() -> None:
    layer = Scaled(3, 5)
    before = dict(layer.__dict__), dict(layer._parameters)
    Splitter(layer)
    assert (dict(layer.__dict__), dict(layer._parameters)) == before


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Masked(3, 5), "in another way"),
        (Twice(3, 5), "in another way"),
        (Stubborn(3, 5), "raised"),
    ],
)
def test_other_uses_stay_in_i(layer, reason) -> None:
    layer = layer.double()
    ((_, found),) = Splitter(layer).report().not_split
    assert reason in found
    xs = [double(2, 3).requires_grad_()]
    assert_same_training(layer, xs, [double(2, 5)])


def test_an_embedding_that_scales() -> None:
    layer = ScaledEmbedding(7, 3, padding_idx=2).double()
    assert not Splitter(layer).report().not_split
    xs = [torch.tensor([[1, 2, 2], [6, 0, 1]]), torch.tensor([[2, 2, 2], [5, 5, 5]])]
    assert_same_training(layer, xs, [double(2, 3, 3), double(2, 3, 3, seed=1)])


class Uses(nn.Module):
    """Every kind of use that the mode knows, of one module's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = Parameter(double(3, 4, 6))
        self.grouped = Parameter(double(3, 4, 4, seed=1))
        self.table = Parameter(double(5, 4, seed=2))
        self.shift = Parameter(double(4, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        one = torch.tensor(1)
        y = x @ self.stacked[one] @ self.stacked[one].t()
        y = y + F.linear(torch.matmul(x, self.stacked[2]), self.stacked[0])
        y = F.linear(y, self.stacked[0].t()[:4, :]) + torch.mm(y, self.grouped[0].T)
        y = y + self.table[torch.tensor([0, 4, 4, 1, 0, 2])] + self.table[one]
        return torch.add(y, self.shift) + self.shift


def run(stage: nn.Module, fused: bool, xs: list[Tensor], dYs: list[Tensor]) -> list[Tensor]:
    entries, seen = [], []
    for x, dY in zip(xs, dYs, strict=True):
        x = x.clone().requires_grad_()
        entry = Deferred(fused)
        with Products(stage.parameters(), entry):
            y = stage(x)
        assert not used_directly([y]) & set(stage.parameters())
        y.backward(dY)
        entries.append(entry)
        seen += [y.detach(), x.grad]
    for entry in entries:
        entry.run()
    return seen + [p.grad for p in stage.parameters() if p.grad is not None]


def test_every_use_gives_autograds_gradients() -> None:
    torch.manual_seed(0)
    xs, dYs = [double(6, 4, seed=i) for i in range(3)], [double(6, 4, seed=7 + i) for i in range(3)]
    plain, fused, split = Uses(), Uses(), Uses()
    want = []
    for x, dY in zip(xs, dYs, strict=True):
        x = x.clone().requires_grad_()
        y = plain(x)
        y.backward(dY)
        want += [y.detach(), x.grad]
    want += [p.grad for p in plain.parameters() if p.grad is not None]
    one, other = run(fused, True, xs, dYs), run(split, False, xs, dYs)
    for a, b, w in zip(one, other, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, w, rtol=1e-12, atol=1e-12)


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Parameter(double(5, 4))

    def forward(self, index: Tensor) -> Tensor:
        return self.table[index]


@pytest.mark.parametrize("index", [[-1, 0, -5, 4, -1], [-2], -3, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_negative_indices_count_from_the_end(index, dtype) -> None:
    index = torch.tensor(index, dtype=dtype)
    dY = double(*index.shape, 4, seed=1)
    assert_same_training(Picks(), [index], [dY])
    stage, entry = Picks(), Deferred()
    with Products(stage.parameters(), entry):
        stage(index).backward(dY)
    assert stage.table.grad is None
    entry.run()
    plain = Picks()
    plain(index).backward(dY)
    assert torch.equal(stage.table.grad, plain.table.grad)


@pytest.mark.parametrize("index", [-6, 5])
def test_indices_outside_the_table_still_raise(index) -> None:
    stage = Picks()
    with Products(stage.parameters(), Deferred()), pytest.raises(IndexError):
        stage(torch.tensor([0, index]))


class Llama4Like(nn.Module):
    """As transformers' Llama4TextExperts: every expert sees as many rows."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        first, second = double(3, 4, 10) / 3, double(3, 5, 4, seed=1) / 3
        if transposed:
            first, second = (w.transpose(1, 2).contiguous() for w in (first, second))
        self.gate_up_proj, self.down_proj = Parameter(first), Parameter(second)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.gate_up_proj, self.down_proj
        if self.transposed:
            first, second = first.transpose(1, 2), second.mT
        gate, up = torch.bmm(x.view(3, -1, 4), first).chunk(2, dim=-1)
        return ((up * gate.sigmoid()) @ second).view(-1, 4)


@pytest.mark.parametrize("make", [Llama4Like, lambda: Llama4Like(transposed=True)])
@pytest.mark.parametrize("frozen", [None, "gate_up_proj", "down_proj"])
def test_experts_with_equal_rows(make, frozen) -> None:
    stage = make()
    assert Splitter(stage).report().deferred_share == 1
    if frozen:
        getattr(stage, frozen).requires_grad_(False)
    xs = [double(6, 4, seed=i).requires_grad_(i > 0) for i in range(3)]
    assert_same_training(stage, xs, [double(6, 4, seed=7 + i) for i in range(3)])
    entry = Deferred()
    with Splitter(stage).active(entry):
        stage(double(6, 4)).sum().backward()
    assert {id(p) for p in entry.parameters()} == {
        id(p) for p in stage.parameters() if p.requires_grad
    }


def test_llama4_experts_are_deferred() -> None:
    experts = Llama4TextExperts(Llama4TextConfig(hidden_size=4, intermediate_size=5))
    report = Splitter(experts).report()
    assert report.deferred_share == 1 and report.total_flops > 0


class Experts(nn.Module):
    """Rows that are sorted by expert, through one product for all of them; fp32, as it is given."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        shape = (4, 8, 16) if transposed else (4, 16, 8)
        self.w, self.transposed = Parameter(double(*shape).float()), transposed
        self.offsets = torch.tensor([3, 3, 7, 8], dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        w = self.w if self.transposed else self.w.transpose(-2, -1)
        return F.grouped_mm(x, w, offs=self.offsets)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_product_skips_rows_without_an_expert(transposed) -> None:
    stages = [Experts(transposed) for _ in range(2)]
    xs, dYs = [double(10, 8).float()], [double(10, 16, seed=1).float()]
    one = run(stages[0], True, xs, dYs)
    other = run(stages[1], False, xs, dYs)
    x, dX, dW = xs[0], *one[1:]
    for a, b in zip(one[1:], other[1:], strict=True):
        assert torch.equal(a, b)
    want, dX_want = torch.zeros_like(dW), torch.zeros_like(x)
    for e, (a, b) in enumerate([(0, 3), (3, 3), (3, 7), (7, 8)]):
        part = x[a:b].t() @ dYs[0][a:b]
        want[e] = part if transposed else part.t()
        w = stages[0].w.detach()[e]
        dX_want[a:b] = dYs[0][a:b] @ (w.t() if transposed else w)
    torch.testing.assert_close(dW, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dX, dX_want, rtol=1e-5, atol=1e-5)


def test_a_parameter_that_hooks_give_back_in_another_layout() -> None:
    stage = Uses()
    stage.stacked = Parameter(double(6, 3, 4).permute(1, 2, 0))
    assert not stage.stacked.is_contiguous()
    x, dY = double(6, 4).requires_grad_(), double(6, 4, seed=1)
    (want,) = torch.autograd.grad(stage(x), x, dY)
    entry = Deferred()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.contiguous())
    with hooks, Products(stage.parameters(), entry):
        y = stage(x)
    y.backward(dY)
    entry.run()
    torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=1e-12)
    assert stage.stacked.grad.stride() == stage.stacked.stride()
