"""Where kernels run: is Triton there, is it interpreting, which architecture is it."""

from __future__ import annotations

import os
import re
from functools import cache

import torch
from torch import Tensor

from zbpipe.errors import ConfigError

SUPPORTED = (80, 90, 100)  # targets with tables, all in COMPILED.md
OLDEST_TRITON = (3, 6)  # COMPILED.md's oldest; 3.3, which came with torch 2.7, has no descriptors


@cache
def has_triton() -> bool:
    """Whether Triton can be imported, and is `OLDEST_TRITON` or newer."""
    try:
        import triton
    except ImportError:
        return False
    major, minor = re.findall(r"\d+", triton.__version__)[:2]
    return (int(major), int(minor)) >= OLDEST_TRITON


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels can run on the device: CUDA, sm_80 or newer, and Triton there."""
    return (
        device.type == "cuda"
        and has_triton()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def interpreting() -> bool:
    """Whether Triton interprets kernels (TRITON_INTERPRET=1, set before they are imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def upcasts(tensor: Tensor) -> bool:
    """Whether operands are made fp32 before a product: `tl.dot` on bf16 is wrong when interpreted.

    Interpreting Triton 3.6 and 3.8 keep bf16 as 16-bit integers in numpy, and multiply those.
    """
    return interpreting() and tensor.dtype == torch.bfloat16


def architecture(device: torch.device) -> int:
    """Whose tables the device uses: 90 and 100 for their own generation, 80 for all others.

    Others share neither their tensor cores nor their shared memory (sm_120 has 99 KB), and what the
    tables say for sm_80 stays under 64 KB. Raises ConfigError before sm_80.
    """
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ConfigError(f"device {device} is sm_{major}{minor}: the kernels need sm_80 or newer")
    return {9: 90, 10: 100}.get(major, 80)


def can_use_descriptors(*tensors: Tensor) -> bool:
    """Whether TMA can address the tensors: 16-byte aligned base, and strides but the last."""
    for tensor in tensors:
        size = tensor.element_size()
        if tensor.numel() == 0 or tensor.data_ptr() % 16 or tensor.stride(-1) != 1:
            return False
        if any(stride * size % 16 or stride == 0 for stride in tensor.stride()[:-1]):
            return False
    return True
