"""Which tile sizes a kernel runs with, and whether it or cuBLAS runs: static tables, no autotune.

Autotuning inside a step would make ranks wait for each other, and needs a driver at import. The
defaults below come from compiled code; `python -m zbpipe.kernels.tune` measures on a GPU and writes
`measured.json` beside this file, whose entries come first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Microbatches in one launch of a grouped W: wgrad's kernels take a pair of operands for each. The
# fourth saves a twelfth of what reading and writing dW costs, a fifth would save a twentieth, and
# each number of them is a compilation of its own.
MOST = 4
MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Config:
    """Tile sizes in elements, warps a program, pipeline stages; `how` it was found.

    `rows` are tokens, `outs` and `ins` the layer's features. `tma`: through tensor descriptors.
    `triton` False: leave it to cuBLAS; a measured entry then has no tiles, all sizes are 0.
    """

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int
    how: str
    tma: bool = False
    triton: bool = True
    group: int = 8

    def meta(self) -> dict[str, Any]:
        """As the matrix kernels take it."""
        return {
            "BLOCK_ROWS": self.rows,
            "BLOCK_OUTS": self.outs,
            "BLOCK_INS": self.ins,
            "GROUP": self.group,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


SMALL = "compiles without spills on every target (COMPILED.md); not yet run"
LARGE = "the largest tile tried that compiles without spills (COMPILED.md); not yet run"

# (kernel, architecture, bits of the operands, through descriptors) → what to run. For dX, and for
# an fp32 dW, cuBLAS has one kernel too, and runs until a measured entry says otherwise. For 16-bit
# operands and an fp32 dW that is added to it has none: Triton runs, if it has a tile for each SM.
DEFAULTS: dict[tuple[str, int, int, bool], Config] = {
    ("dgrad", 80, 16, False): Config(128, 32, 128, 8, 3, LARGE, triton=False),
    ("dgrad", 80, 32, False): Config(64, 16, 64, 8, 2, SMALL, triton=False),
    ("dgrad", 90, 16, False): Config(128, 64, 128, 8, 3, LARGE, triton=False),
    ("dgrad", 90, 16, True): Config(128, 64, 256, 8, 4, LARGE, tma=True, triton=False),
    ("dgrad", 90, 32, False): Config(64, 16, 64, 8, 2, SMALL, triton=False),
    ("dgrad", 100, 16, False): Config(128, 64, 128, 8, 3, LARGE, triton=False),
    ("dgrad", 100, 16, True): Config(128, 64, 256, 8, 4, LARGE, tma=True, triton=False),
    ("dgrad", 100, 32, False): Config(64, 16, 64, 8, 2, SMALL, triton=False),
    ("wgrad", 80, 16, False): Config(32, 128, 128, 8, 3, LARGE),
    ("wgrad", 80, 32, False): Config(16, 64, 64, 8, 2, SMALL, triton=False),
    ("wgrad", 90, 16, False): Config(64, 128, 128, 8, 3, LARGE),
    ("wgrad", 90, 16, True): Config(64, 128, 256, 8, 4, LARGE, tma=True),
    ("wgrad", 90, 32, False): Config(16, 64, 64, 8, 2, SMALL, triton=False),
    ("wgrad", 100, 16, False): Config(64, 128, 128, 8, 3, LARGE),
    ("wgrad", 100, 16, True): Config(64, 128, 128, 8, 4, LARGE, tma=True),
    ("wgrad", 100, 32, False): Config(16, 64, 64, 8, 2, SMALL, triton=False),
}
# Of 16-bit operands whose widths are no multiples of 16, which descriptors cannot address and loads
# take apart: with the tiles above the compiled code spills up to 256 bytes a thread.
RAGGED: dict[str, Config] = {
    "dgrad": Config(128, 32, 128, 8, 3, SMALL, triton=False),
    "wgrad": Config(32, 64, 128, 8, 3, SMALL),
}
# SMs of the GPU each generation's tables are for: NVIDIA's data sheets of A100, H100 and B200. One
# program makes a tile of dW over all rows, so with fewer tiles than SMs some of them idle; cuBLAS
# can split the rows among them. It runs then, until a measured entry says otherwise.
SMS = {80: 108, 90: 132, 100: 148}
# Interpreted programs cost milliseconds each: few and small ones, that still have ragged edges.
INTERPRETED = Config(16, 16, 32, 4, 2, "small, for the interpreter", group=2)


@cache
def measured() -> tuple[dict[str, Any], ...]:
    """The entries that `tune` wrote, none if it was never run."""
    if not MEASURED.exists():
        return ()
    return tuple(json.loads(MEASURED.read_text())["entries"])


@cache
def choose(
    kernel: str,
    architecture: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    descriptors: bool,
    need_tiles: bool = False,
) -> Config:
    """What to run `kernel` ("dgrad", "wgrad") with on operands of `dtype`.

    `shape` is (rows, outs, ins), `descriptors` whether TMA can address the operands. The measured
    entry for this kernel, architecture, dtype, outs and ins whose rows are nearest, if there is
    one that these operands can use; else the default. `need_tiles`: Triton is to run whatever is
    faster, so entries without tiles, where cuBLAS won, are passed over.
    """
    rows, outs, ins = shape
    key = {"kernel": kernel, "architecture": architecture, "dtype": str(dtype).split(".")[1]}
    key |= {"outs": outs, "ins": ins}
    fitting = [
        entry
        for entry in measured()
        if all(entry[name] == value for name, value in key.items())
        and (descriptors or not entry["config"].get("tma", False))
        and (entry["config"]["rows"] > 0 or not need_tiles)
    ]
    if fitting:
        nearest = min(fitting, key=lambda entry: (abs(entry["rows"] - rows), entry["rows"]))
        return Config(**nearest["config"])
    bits = 8 * dtype.itemsize
    default = DEFAULTS.get((kernel, architecture, bits, descriptors and bits == 16))
    default = default or DEFAULTS[kernel, architecture, bits, False]
    if bits == 16 and not descriptors and (outs % 16 or ins % 16):
        default = RAGGED[kernel]
    tiles, sms = -(-outs // default.outs) * -(-ins // default.ins), SMS[architecture]
    if kernel == "wgrad" and default.triton and tiles < sms:
        return replace(default, triton=False, how=f"{tiles} tiles for {sms} SMs; not yet run")
    return default
