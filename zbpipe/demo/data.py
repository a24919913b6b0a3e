"""Real text that every machine has: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from zbpipe.errors import ConfigError

Split = Literal["train", "held_out"]

# Not the standard library, or generated, or tests with odd bytes in them.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_EVERY = 10  # one file in ten is held out
BYTES = 4 << 20  # reads in well under 0.5 s from a warm disk


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes of other files to measure on, both 1-D uint8."""

    train: Tensor
    held_out: Tensor

    def batch(
        self, split: Split, step: int, batch_size: int, sequence: int, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets), both int64 (batch_size, sequence); targets are one byte further on.

        `train` windows are drawn from (seed, step) alone: the same on every rank. `held_out`
        windows lie evenly over the held-out text, the same for every step and seed.
        Raises ConfigError if the text is shorter than one window.
        """
        text = {"train": self.train, "held_out": self.held_out}.get(split)
        if text is None:
            raise ConfigError(f"split={split!r}: must be 'train' or 'held_out'")
        last = len(text) - sequence - 1
        if last < 0:
            raise ConfigError(
                f"sequence={sequence} needs {sequence + 1} bytes, and the {split} text has only "
                f"{len(text)}: use a shorter sequence or more text"
            )
        if split == "train":
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
            starts = torch.randint(last + 1, (batch_size,), generator=generator)
        else:
            starts = torch.arange(batch_size) * last // max(batch_size - 1, 1)
        windows = text[starts[:, None] + torch.arange(sequence + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load(root: str | Path | None = None, limit: int = BYTES) -> Text:
    """Read .py files below `root` (default: the standard library) in sorted order.

    Every tenth file is held out. Reading ends once there are `limit` bytes. Raises ConfigError if
    there are too few files (some minimal installations ship no sources).
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    parts: dict[Split, list[bytes]] = {"train": [], "held_out": []}
    total = 0
    for index, path in enumerate(_sources(root)):
        source = path.read_bytes()[: limit - total]
        parts["held_out" if index % HELD_OUT_EVERY == 1 else "train"].append(source)
        total += len(source)
        if total >= limit:
            break
    train, held_out = b"".join(parts["train"]), b"".join(parts["held_out"])
    if not train or not held_out:
        raise ConfigError(
            f"root={str(root)!r}: fewer than two .py files with text in them, so there is nothing "
            "to train and measure on; pass a folder of .py files, or install Python with its "
            "standard library sources"
        )
    return Text(_as_tensor(train), _as_tensor(held_out))


def _sources(root: Path) -> Iterator[Path]:
    """The .py files below root, folders and files in sorted order, without SKIPPED folders."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED:
                yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
