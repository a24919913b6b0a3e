"""A byte-level GPT, a Sequential of layers, of a size that trains on two CPU cores."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpipe.errors import ConfigError

LEARNING_RATE = 2e-3  # AdamW's, for the default batch; tried 0.5e-3 to 6e-3 over 4 steps and seeds
BATCH_SIZE = 24  # sequences in a step: 8 microbatches × 3


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model; the default suits a step of 8 microbatches × 3 sequences.

    That step takes about 1.6 s in one process on one thread (x86 server core, fp32), so 0.9 to 1 s
    on two ranks, and the default 2-way cut (5 and 5 of the 10 layers) is balanced: a byte's head
    and embedding cost next to nothing.
    """

    vocab: int = 256
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    sequence: int = 128

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "sequence"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.hidden % self.heads:
            raise ConfigError(
                f"hidden={self.hidden} is not a multiple of heads={self.heads}: "
                "every head needs the same width"
            )


class Embed(nn.Module):
    """Bytes (batch, time) to vectors (batch, time, hidden): token plus position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(positions)
        return embedded


class Block(nn.Module):
    """Pre-norm causal attention, then a pre-norm MLP, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden
        self.heads = config.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class Head(nn.Module):
    """Final norm and logits: (batch, time, hidden) to (batch, time, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.logits = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


class GPT(nn.Sequential):
    """Embed, `config.layers` Blocks, Head; bytes (batch, time) to logits (batch, time, vocab).

    The weights depend on `config` and `seed` only, so every rank builds the same ones, and torch's
    global generator is neither read nor advanced.
    """

    def __init__(self, config: GPTConfig | None = None, seed: int = 0) -> None:
        config = config or GPTConfig()
        with torch.device("meta"):  # where torch's own initialisation costs no random numbers
            blocks = [Block(config) for _ in range(config.layers)]
            super().__init__(Embed(config), *blocks, Head(config))
        self.config = config
        self.to_empty(device="cpu")
        self._initialise(torch.Generator().manual_seed(seed))

    def __getitem__(self, index: slice | int) -> nn.Sequential | nn.Module:
        """A layer, or for a slice a plain Sequential of the same layers under the same names."""
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))
        return super().__getitem__(index)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        # GPT-2 (Radford et al. 2019, section 2.3): N(0, 0.02), residual outputs over
        # sqrt(2 layers); but embeddings of about 1, since behind small ones the first norm
        # multiplies gradients by 50, and AdamW without warm-up then throws the loss up.
        std = {"token": 1.0, "position": 0.25}
        std["attention_out"] = std["mlp_out"] = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
                module.bias.zero_()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                spread = std.get(name.rpartition(".")[2], 0.02)
                module.weight.normal_(0.0, spread, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte: logits (batch, time, vocab), targets (batch, time)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
