"""A model as a list of named layers, and the layers as stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import ConfigError

Layer = tuple[str, nn.Module]


def layers_of(model: Any) -> list[Layer]:
    """(name, module) of each layer, in order; names are those of the model's parameters.

    `model`: an nn.Sequential (subclasses that keep its forward too), or a list or tuple of modules,
    named "0", "1", … as nn.Sequential would. Raises ConfigError for anything else.
    """
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise ConfigError(
                f"model is a {type(model).__name__} that overrides nn.Sequential.forward: "
                "its layers cannot be run one after the other; pass a list of layers"
            )
        if own := [name for name, _ in model.named_parameters(recurse=False)]:
            raise ConfigError(
                f"model has a parameter of its own, {own[0]!r}: move it into a layer, "
                "since each stage holds its layers only"
            )
        layers = [(name, module) for name, module in model._modules.items() if module is not None]
    elif isinstance(model, (list, tuple, nn.ModuleList)):
        layers = [(str(i), module) for i, module in enumerate(model)]
        for name, module in layers:
            if not isinstance(module, nn.Module):
                raise ConfigError(
                    f"model[{name}] is a {type(module).__name__}: want a list of nn.Modules"
                )
    else:
        raise ConfigError(
            f"model is a {type(model).__name__}: want an nn.Sequential, a list of layers, or "
            "a Hugging Face model"
        )
    if not layers:
        raise ConfigError("model has no layers")
    return layers


def cut(layers: Sequence[Layer], partition: Sequence[int]) -> list[list[Layer]]:
    """The layers of each stage. Raises ConfigError where two stages would share a parameter."""
    stages, start = [], 0
    for count in partition:
        stages.append(list(layers[start : start + count]))
        start += count
    _check_sharing(stages)
    return stages


def _check_sharing(stages: Sequence[Sequence[Layer]]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for stage, layers in enumerate(stages):
        for prefix, module in layers:
            tensors = [*module.named_parameters(), *module.named_buffers()]
            for name, tensor in tensors:
                first, other = owner.setdefault(id(tensor), (stage, f"{prefix}.{name}"))
                if first != stage:
                    raise ConfigError(
                        f"{other} of stage {first} and {prefix}.{name} of stage {stage} are the "
                        "same tensor: give a partition that puts both into one stage"
                    )


def describe(layers: Sequence[Layer]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Plain data that is equal on two ranks exactly where they hold the same architecture."""
    return [
        (
            name,
            type(module).__qualname__,
            [
                (n, f"{p.dtype}{tuple(p.shape)}{p.requires_grad}")
                for n, p in module.named_parameters()
            ],
        )
        for name, module in layers
    ]
