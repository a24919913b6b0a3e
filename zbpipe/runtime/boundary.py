"""What crosses a stage boundary: any tree of tensors and constants, as a header and a payload.

A header says the shape of every tensor, so that nothing is probed and everything may change from
step to step. A received tensor is the slot's own memory; `Receive` puts it into the autograd graph
as an ordinary (non-leaf) tensor, so that layers may change it in place, and catches its gradient.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ConfigError
from .device import Device

_ALIGN = 64  # bytes; what vector loads and BLAS like

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    enum.Enum,
)


class Meta(NamedTuple):
    """How a tensor lies in a payload: strides in elements, offset in bytes."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


@dataclass
class Packet:
    """A message ready to be sent. `keep` owns the memory that `pieces` point into."""

    header: bytes
    pieces: list[tuple[int, int, int]]
    payload: int
    keep: list[torch.Tensor]


@dataclass
class Inputs:
    """What a stage received for one microbatch, and what came of it.

    `tensors` are those that want a gradient, in the order their gradients travel; `grads` is
    filled when the stage's backward reaches them, None where it did not.
    """

    value: Any
    count: int = 0
    grads: list[torch.Tensor | None] = field(default_factory=list)


class _Receive(torch.autograd.Function):
    """Gives tensors a place in the graph, without a copy, and catches their gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, inputs: Inputs, tensors: list[torch.Tensor]) -> Any:
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.inputs.grads = list(grads)
        return None, None, None


def split_tree(value: Any, what: str) -> tuple[list[torch.Tensor], Any]:
    """(tensors, skeleton) of a tree: the skeleton is the tree with a hole for each tensor.

    Raises ConfigError on a leaf that cannot travel: its gradient would be lost silently.
    """
    if type(value) is torch.Tensor:
        _check_tensor(value, what)
        return [value], _Hole
    leaves, spec = tree_flatten(value)
    tensors: list[torch.Tensor] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            _check_tensor(leaf, what)
            tensors.append(leaf)
            leaves[i] = _Hole
        elif not isinstance(leaf, _CONSTANTS):
            raise ConfigError(
                f"{what} holds a {type(leaf).__module__}.{type(leaf).__qualname__}: between stages "
                "travel tensors, None, numbers, strings and tuples, lists and dicts of them"
            )
    return tensors, tree_unflatten(leaves, spec)


class _Hole:
    """Stands in a skeleton for a tensor."""


def _check_tensor(tensor: torch.Tensor, what: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(
            f"{what} holds a {tensor.layout} tensor on {tensor.device}: want a dense one"
        )


def join_tree(tensors: Sequence[torch.Tensor], skeleton: Any) -> Any:
    """Inverse of `split_tree`."""
    if skeleton is _Hole:
        return tensors[0]
    leaves, spec = tree_flatten(skeleton)
    it = iter(tensors)
    return tree_unflatten([next(it) if leaf is _Hole else leaf for leaf in leaves], spec)


def pack(tensors: Sequence[torch.Tensor | None], extra: Any) -> Packet:
    """A message of `tensors` (None travels as such) and a picklable `extra`.

    Strides are kept where the tensor is dense in memory in some order; else it is made contiguous.
    """
    metas: list[Meta | None] = []
    pieces: list[tuple[int, int, int]] = []
    keep: list[torch.Tensor] = []
    end = 0
    for tensor in tensors:
        if tensor is None:
            metas.append(None)
            continue
        plain = tensor.detach().resolve_conj().resolve_neg()
        if not plain.is_contiguous() and not _dense(plain):
            plain = plain.contiguous()
        nbytes = plain.numel() * plain.element_size()
        metas.append(
            Meta(plain.dtype, tuple(plain.shape), plain.stride(), end, tensor.requires_grad)
        )
        if nbytes:
            pieces.append((plain.data_ptr(), nbytes, end))
            keep.append(plain)
        end += -(-nbytes // _ALIGN) * _ALIGN
    return Packet(pickle.dumps((extra, metas), protocol=5), pieces, end, keep)


def _dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill their memory without holes or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def unpack(
    header: bytes, slot: Any, device: Device
) -> tuple[list[torch.Tensor | None], list[bool], Any]:
    """(tensors, which require a gradient, extra) of a message; tensors alias the slot's memory."""
    extra, metas = pickle.loads(header)
    storage, there = device.storage(slot), device.where
    tensors: list[torch.Tensor | None] = []
    for meta in metas:
        if meta is None:
            tensors.append(None)
            continue
        dtype, size, stride, offset, _ = meta
        if storage is None or 0 in size:
            tensors.append(torch.empty_strided(size, stride, dtype=dtype, device=there))
            continue
        # Not a view: layers may change what they receive in place.
        fresh = torch.empty(0, dtype=dtype, device=there)
        tensors.append(fresh.set_(storage, offset // fresh.element_size(), size, stride))
    return tensors, [meta is not None and meta.requires_grad for meta in metas], extra


def enter(tensors: list[torch.Tensor], wants_grad: list[bool], skeleton: Any) -> Inputs:
    """The value that a stage's module is called with, for tensors that came from a neighbour."""
    inputs = Inputs(None)
    wanted = [i for i, wants in enumerate(wants_grad) if wants]
    if wanted and torch.is_grad_enabled():
        token = torch.empty(0, requires_grad=True)
        live = _Receive.apply(  # type: ignore[no-untyped-call]
            token, inputs, [tensors[i] for i in wanted]
        )
        for i, tensor in zip(wanted, live, strict=True):
            tensors[i] = tensor
        inputs.grads = [None] * len(wanted)
    inputs.count = len(wanted)
    inputs.value = join_tree(tensors, skeleton)
    return inputs
