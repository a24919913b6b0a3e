"""What `pipe.summary()` says of kernels is what the rules and the tables do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from zbpipe.kernels import dispatch
from zbpipe.runtime import summary
from zbpipe.runtime.stage import Stage


def lines(*layers: nn.Module) -> list[str]:
    stage = Stage(0, [(str(i), layer) for i, layer in enumerate(layers)], 0)
    return list(summary._kernels(stage))


def test_on_cpu_torch_computes() -> None:
    assert lines(nn.Linear(8, 16)) == ["16 × 8: dgrad by torch on cpu; wgrad by torch on cpu"]


@pytest.fixture
def on_sm_90(monkeypatch):
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    monkeypatch.setattr(dispatch, "architecture", lambda device: 90)


def test_a_layer_of_16_bits_runs_what_the_tables_say(on_sm_90) -> None:
    layer = nn.Linear(4096, 2048).bfloat16()
    named = dispatch.names(layer.weight.device, torch.bfloat16, (4096, 2048, 4096))
    want = f"2048 × 4096: dgrad by {named['dgrad']}; wgrad by {named['wgrad']}"
    assert lines(layer) == [want] and "wgrad by Triton (" in want


def test_a_conv1d_is_looked_up_as_it_lies(on_sm_90) -> None:
    layer = Conv1D(2048, 4096).bfloat16()
    named = dispatch.names(layer.weight.device, torch.bfloat16, (4096, 2048, 4096), True)
    assert lines(layer) == [f"2048 × 4096: dgrad by {named['dgrad']}; wgrad by {named['wgrad']}"]


def test_torch_computes_what_no_kernel_is_asked_for(on_sm_90) -> None:
    whole, main = nn.Linear(32, 4096), nn.Linear(32, 4096)
    (line,) = lines(whole)  # fp32 operands
    assert line == "4096 × 32: dgrad by torch on cpu; wgrad by torch on cpu"
    main.bfloat16().weight.main_grad = torch.zeros(4096, 32, dtype=torch.bfloat16)
    (line,) = lines(main)
    assert "dgrad by cuBLAS (" in line and line.endswith("wgrad by torch on cpu")
