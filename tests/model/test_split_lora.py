"""Adapters beside frozen weights: their Linears are split, and no W is made for what is frozen."""

from __future__ import annotations

import pytest
import torch
from splitting import assert_same_training
from torch import Tensor, nn

from zbpipe.model.split import Deferred, Splitter


class LoraLinear(nn.Module):
    """As peft's lora.Linear: a frozen base layer, and B A beside it."""

    def __init__(self, fan_in: int, fan_out: int, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = nn.Linear(fan_in, fan_out).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(fan_in, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, fan_out, bias=False)})
        self.scaling = 0.5

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.lora_A["default"], self.lora_B["default"]
        return self.base_layer(x) + up(down(x)) * self.scaling


def test_adapters_are_deferred_and_the_base_is_not_stashed() -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(LoraLinear(6, 8), nn.Tanh(), LoraLinear(8, 6)).double()
    xs = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert_same_training(stage, xs, [torch.randn_like(x) for x in xs])
    report = Splitter(stage).report()
    assert report.deferred_share == 1 and not report.not_split
    assert report.total_flops == 2 * sum(p.numel() for p in stage.parameters() if p.requires_grad)
    entry = Deferred()
    with Splitter(stage).active(entry):
        stage(xs[0]).sum().backward()
    due = {id(p) for p in entry.parameters()}
    assert due == {id(p) for p in stage.parameters() if p.requires_grad}
    # Of each adapter: x, dY of B, and the two (10, 2) between A and B; x of the second is tanh's.
    assert len(list(entry.storages())) == 8


def test_peft_adapters_are_deferred() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra [test])")
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    stage = peft.get_peft_model(inner, peft.LoraConfig(r=2, target_modules=["0", "2"])).double()
    report = Splitter(stage).report()
    assert report.deferred_share == 1 and report.total_flops > 0
    xs = [torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert_same_training(stage, xs, [torch.randn_like(x) for x in xs])
