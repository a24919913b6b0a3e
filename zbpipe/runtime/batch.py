"""A global batch: cut into microbatches, weighed, and given a digest to compare between ranks."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..errors import ConfigError
from ..model.hf import label_counter

# Bytes of a tensor that its digest looks at: all of any batch of tokens, head and tail of images.
_DIGEST_BYTES = 1 << 20


# Arguments of a Hugging Face model whose dim 0 is the batch for sure.
_LEADING = ("input_ids", "inputs_embeds")


def batch_size(value: Any) -> int:
    """Dim 0 of the first tensor (not 0-d) in `value`; of a Hugging Face batch, of its tokens.

    Raises ConfigError where there is none.
    """
    leading = [value[k] for k in _LEADING if isinstance(value, dict) and k in value]
    for leaf in tree_leaves([*leading, value]):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    raise ConfigError("the batch holds no tensor with a batch dimension")


def microbatches(value: Any, count: int, size: int, shared: Collection[str] = ()) -> list[Any]:
    """`value` cut into `count` trees along dim 0 of each tensor whose dim 0 is `size`.

    Sizes are numpy.array_split's: they differ by one at most, the larger first. Other leaves, and
    entries of dicts whose key is in `shared`, are the same object in every microbatch.
    """
    if isinstance(value, dict) and shared:
        parts = {k: microbatches(v, count, size) for k, v in value.items() if k not in shared}
        return [
            {k: parts[k][i] if k in parts else v for k, v in value.items()} for i in range(count)
        ]
    leaves, _ = tree_flatten(value)
    cut = {
        id(leaf): torch.tensor_split(leaf, count)
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
    }
    return [
        tree_map(lambda leaf, i=i: cut[id(leaf)][i] if id(leaf) in cut else leaf, value)
        for i in range(count)
    ]


def check_size(size: int, count: int) -> None:
    """Raises ConfigError where a microbatch would be empty."""
    if size < count:
        raise ConfigError(
            f"the batch has {size} samples for microbatches={count}: "
            f"want at least {count} samples, or fewer microbatches"
        )


def check_target(target: Any, size: int) -> None:
    """Raises ConfigError where a target's tensor has another batch size than the inputs."""
    for leaf in tree_leaves(target):
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] != size):
            raise ConfigError(
                f"target has shape {tuple(leaf.shape)}, the inputs a batch of {size}: "
                "want the same dim 0"
            )


def loss_weights(
    whole: nn.Module | None,
    value: Any,
    target: Any,
    parts: tuple[list[Any], list[Any]],
    size: int,
    loss_weight: Callable[[Any], Any] | None,
) -> list[float]:
    """What each microbatch's loss counts in the batch's: of a mean its share, of a sum all.

    `whole`: a model with a loss of its own over labels in `value`, unless there is a `target`.
    `parts`: microbatches of inputs and of targets. `loss_weight` takes a target, or a microbatch of
    such a model's own arguments.
    """
    inputs, targets = parts
    count = len(inputs)
    sizes = [size // count + (i < size % count) for i in range(count)]
    if whole is None or target is not None:
        return weights(targets, sizes, loss_weight)
    if loss_weight is None and value.get("labels") is not None:
        loss_weight = label_counter(whole, value)
        if loss_weight is None:
            return [1.0] * count
    return weights(inputs, sizes, loss_weight)


def weights(
    targets: list[Any], sizes: list[int], loss_weight: Callable[[Any], Any] | None
) -> list[float]:
    """wᵢ / Σw of each microbatch: of its samples, or of what `loss_weight(target)` says.

    Raises ConfigError on a weight that is negative or not finite, and where all are 0.
    """
    if loss_weight is None:
        raw = [float(size) for size in sizes]
    else:
        given = [loss_weight(target) for target in targets]
        if all(isinstance(weight, torch.Tensor) and weight.numel() == 1 for weight in given):
            # At once: each number by itself may have to wait for a device.
            given = torch.stack([weight.detach().double().reshape(()) for weight in given]).tolist()
        raw = [float(weight) for weight in given]
    for i, weight in enumerate(raw):
        if not (0.0 <= weight < float("inf")):
            raise ConfigError(f"loss_weight is {weight} for microbatch {i}: want a number ≥ 0")
    total = sum(raw)
    if total == 0.0:
        raise ConfigError("loss_weight is 0 for every microbatch: the batch has no loss")
    return [weight / total for weight in raw]


def digest(value: Any) -> str:
    """A short hash of a batch: structure, shapes, dtypes, data (of big tensors, a part)."""
    leaves, spec = tree_flatten(value)
    hashed = hashlib.blake2b(str(spec).encode(), digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            hashed.update(f"{leaf.dtype}{tuple(leaf.shape)}{_checksum(leaf)}".encode())
        else:
            hashed.update(repr(leaf).encode())
    return hashed.hexdigest()


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    limit = max(1, _DIGEST_BYTES // tensor.element_size())
    if flat.numel() > limit:
        flat = torch.cat([flat[: limit // 2], flat[-limit // 2 :]])
    return zlib.crc32(flat.cpu().view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
