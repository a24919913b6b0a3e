"""The model on disk: safetensors, one file a process and an index, as Hugging Face names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..model.load import INDEX
from .world import World


def save(
    world: World, state: dict[str, Any], directory: Path, whole: nn.Module | None = None
) -> None:
    """Write `state` of every process into `directory` (made if need be), and rank 0 the index.

    With the configuration of `whole`, a Hugging Face model, so that from_pretrained can read it.
    """

    def write() -> tuple[str, list[str], int]:
        directory.mkdir(parents=True, exist_ok=True)
        parts = world.size if world.group else 1
        name = f"model-{world.rank + 1:05d}-of-{parts:05d}.safetensors"
        # Shared tensors are written once for each name: safetensors wants distinct memory.
        tensors = {
            k: v.detach().clone().contiguous() for k, v in state.items() if torch.is_tensor(v)
        }
        save_file(tensors, directory / name, metadata={"format": "pt"})
        return name, list(tensors), sum(t.numel() * t.element_size() for t in tensors.values())

    parts = world.agree(write, "saving")

    def describe() -> None:
        if world.rank != 0:
            return
        index = {
            "metadata": {"total_size": sum(size for _, _, size in parts)},
            "weight_map": {key: name for name, keys, _ in parts for key in keys},
        }
        for part in ("config", "generation_config"):
            if (config := getattr(whole, part, None)) is not None:
                config.save_pretrained(directory)
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))

    world.agree(describe, "saving")
