"""Blocks of Hugging Face decoders, as they are, through the split."""

from __future__ import annotations

import pytest
import torch
from splitting import assert_same_training
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from zbpipe.model.split import Splitter

WIDTH, TOKENS = 16, 6


class Gpt2Stage(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        config = GPT2Config(
            n_embd=WIDTH, n_head=2, n_layer=1, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
        )
        config._attn_implementation = "sdpa"
        self.block = GPT2Block(config, layer_idx=0)
        checkpoint_layer(self.block, checkpointed)

    def forward(self, x: Tensor) -> Tensor:
        return first(self.block(x))


class LlamaStage(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        config._attn_implementation = "sdpa"
        self.rotary = LlamaRotaryEmbedding(config)
        self.block = LlamaDecoderLayer(config, layer_idx=0)
        checkpoint_layer(self.block, checkpointed)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(TOKENS)[None]
        return first(self.block(x, position_embeddings=self.rotary(x, positions)))


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def checkpoint_layer(layer: nn.Module, checkpointed: bool) -> None:
    """As `model.gradient_checkpointing_enable()` does it."""
    layer.gradient_checkpointing = checkpointed
    layer._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    if checkpointed:
        layer._gradient_checkpointing_func = lambda f, *args, **kwargs: (
            torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False, **kwargs)
        )


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("make", [Gpt2Stage, LlamaStage])
def test_a_decoder_block_matches_autograd(make, checkpointed) -> None:
    torch.manual_seed(0)
    stage = make(checkpointed).double().train()
    xs, dYs = (
        [torch.randn(2, TOKENS, WIDTH, dtype=torch.float64) for _ in range(3)] for _ in range(2)
    )
    for x in xs:
        x.requires_grad_()
    assert_same_training(stage, xs, dYs)


@pytest.mark.parametrize(("make", "matrices"), [(Gpt2Stage, 4), (LlamaStage, 7)])
def test_every_matrix_of_a_block_is_deferred(make, matrices) -> None:
    stage = make(False)
    report = Splitter(stage).report()
    assert all("norm" in name or "ln_" in name for name, _ in report.not_split)
    weights = [p for p in stage.parameters() if p.dim() == 2]
    assert len(weights) == matrices
    assert report.deferred_flops >= 2 * sum(p.numel() for p in weights)
    assert report.deferred_share > 0.97
