"""Tiny random configurations of every Hugging Face decoder family that is tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2}


def of(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(hf, name)(**(BASE | options))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": of("LlamaConfig"),
    "llama-tied": of("LlamaConfig", tie_word_embeddings=True),
    "mistral": of("MistralConfig", sliding_window=4),
    "qwen2": of("Qwen2Config"),
    "qwen2-mixed-window": of(
        "Qwen2Config", use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "qwen3": of("Qwen3Config", head_dim=8),
    "gemma": of("GemmaConfig", head_dim=8),
    "gemma2": of("Gemma2Config", head_dim=8, sliding_window=4),
    "gemma3": of("Gemma3TextConfig", head_dim=8, sliding_window=4),
    "phi": of("PhiConfig", num_key_value_heads=4),
    "phi3": of("Phi3Config"),
    "gpt-neox": of("GPTNeoXConfig"),
    "olmo2": of("Olmo2Config"),
    "starcoder2": of("Starcoder2Config"),
    "gpt2": lambda: hf.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=61, n_positions=64,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    ),
    "opt": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=32),
    "opt-350m": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "bloom": lambda: hf.BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=61),
    "falcon": lambda: hf.FalconConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=61, alibi=False
    ),
    "mixtral": of("MixtralConfig", num_local_experts=4, **MOE),
    "qwen3-moe": of("Qwen3MoeConfig", head_dim=8, num_experts=4, moe_intermediate_size=16, **MOE),
    "gpt-oss": of("GptOssConfig", head_dim=8, num_local_experts=4, sliding_window=4, **MOE),
    "deepseek-v3": of(
        "DeepseekV3Config", num_key_value_heads=4, n_routed_experts=4, moe_intermediate_size=16,
        first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, **MOE,
    ),
}  # fmt: skip
# transformers itself has no sdpa for these.
EAGER_ONLY = ("gemma2", "bloom", "gpt-oss")
EXPERTS = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3")


def build(name: str, attention: str = "eager", dtype: torch.dtype | None = None) -> nn.Module:
    """The family's model, the same weights each time; fp64, or fp32 where experts need it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation=attention)
    if dtype is None:
        dtype = torch.float32 if name in EXPERTS else torch.float64
    return model.to(dtype)


def batch(size: int = 7, length: int = 12, padded: bool = True) -> dict[str, torch.Tensor]:
    """Tokens, their mask and labels; padding is on the right, and not counted."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 61, (size, length), generator=g)
    out = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        mask[3, -3:] = 0
        out["attention_mask"] = mask
        out["labels"][mask == 0] = -100
        out["labels"][1, :7] = -100
    return out


def table() -> str:
    """The Markdown table in docs/models.md: `python tests/families.py` prints it."""
    rows = ["| family | class | attention | compared in |", "|---|---|---|---|"]
    for name in FAMILIES:
        kind = type(FAMILIES[name]()).__name__.removesuffix("Config")
        attention = "eager" if name in EAGER_ONLY else "eager, sdpa"
        dtype = "fp32" if name in EXPERTS else "fp64"
        rows.append(f"| {name} | {kind} | {attention} | {dtype} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
