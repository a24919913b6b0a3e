"""How fast could the kernels be? A static roofline for each kernel and shape on H100 and H200.

FLOPs and bytes are the least that the operation needs; `bound_s` is the larger of FLOPs ÷ peak and
bytes ÷ bandwidth. `waves` is how often all SMs are filled, at the blocks an SM that registers and
shared memory allow (kernels/COMPILED.md). Some SMs have one program more than others: `balance` is
the mean number ÷ the largest, and `bound_s` ÷ `balance` is what can be hoped for. Where
kernels/measured.json, which `python -m zbpipe.kernels.tune` writes, has the case, its seconds stand
beside. Not yet run on a GPU.

    python bench/roofline.py --json roofline.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zbpipe.kernels import tables
from zbpipe.kernels.recorded import recorded

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Llama 3 8B and 70B: attention, up, down; and a layer too small to fill the device.
LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (1024, 1024))
ROWS = (2048, 4096, 8192)
COUNTS = (1, tables.MOST)  # microbatches of a W: alone, and as many as a launch takes
ARCHITECTURE = 90
SM_REGISTERS, SM_SHARED, SM_WARPS = 65536, 228 * 1024, 64  # CUDA C++ Programming Guide, 9.0
RESERVED_SHARED = 1024  # bytes a block, likewise


@dataclass(frozen=True)
class Device:
    """Peaks of a data sheet: FLOP/s dense, bytes/s, and the number of SMs."""

    flops: dict[str, float]
    bandwidth: float
    sms: int


# NVIDIA H100 and H200 Tensor Core GPU data sheets, SXM; sparsity figures halved.
PEAKS = {"bf16": 989.4e12, "fp32": 66.9e12}
DEVICES = {"H100": Device(PEAKS, 3.35e12, 132), "H200": Device(PEAKS, 4.8e12, 132)}


@dataclass(frozen=True)
class Work:
    """One launch: what it computes, moves, and how many programs of which compiled case it is."""

    kernel: str
    case: str  # name in COMPILED.md
    flops: float
    bytes: float
    programs: int
    warps: int


def product(kernel: str, dtype: str, rows: int, outs: int, ins: int, count: int = 1) -> Work:
    """dgrad or wgrad with the tiles of the tables; `count` microbatches in one launch."""
    size = DTYPES[dtype].itemsize
    able = outs * size % 16 == 0 and ins * size % 16 == 0
    shape = (rows, outs, ins)
    config = tables.choose(kernel, ARCHITECTURE, DTYPES[dtype], shape, able, need_tiles=True)
    if kernel == "dgrad":
        moved = size * (rows * outs + outs * ins + rows * ins)
        programs = math.ceil(rows / config.rows) * math.ceil(ins / config.ins)
    else:
        moved = size * count * rows * (outs + ins) + 2 * 4 * outs * ins  # dW is read and written
        programs = math.ceil(outs / config.outs) * math.ceil(ins / config.ins)
    name = kernel + ("_tma" if config.tma else "") + ("_grouped" if count > 1 else "")
    flops = 2.0 * count * rows * outs * ins
    case = f"{name} sm_{ARCHITECTURE}a {dtype}"
    return Work(kernel, case, flops, moved, programs, config.warps)


def sums(kernel: str, dtype: str, rows: int, n: int) -> Work:
    """The kernels that only add up: bound by memory whatever their FLOPs."""
    size = DTYPES[dtype].itemsize
    # As bias_grad.COLUMNS and bias_grad.parts_of, which need Triton to be imported.
    columns = math.ceil(n / 64) * min(max(rows // 128, 1), 16)
    passes, programs, warps, flops = {
        "bias_grad": (1, columns, 4, 1),
        "norm_dgrad": (3, rows, min(max(n // 512, 1), 16), 10),
        "norm_wgrad": (2, columns, 4, 4),
        "embedding_grad": (1, rows * math.ceil(n / 512), 4, 1),
    }[kernel]
    moved = float(passes * rows * n * size)
    if kernel == "embedding_grad":
        moved += 2 * 4 * rows * n  # its rows of dW, if all tokens differ
    case = f"{kernel} sm_{ARCHITECTURE}a {dtype}"
    return Work(kernel, case, float(flops * rows * n), moved, programs, warps)


def row(
    work: Work, dtype: str, device: Device, compiled: dict[str, tuple[int, int]]
) -> dict[str, Any]:
    """The figures of one launch on one device."""
    registers, shared = compiled[work.case]
    # Registers are given out to warps in units of 256.
    a_block = work.warps * math.ceil(registers * 32 / 256) * 256
    resident = min(
        SM_REGISTERS // a_block, SM_SHARED // (shared + RESERVED_SHARED), SM_WARPS // work.warps
    )
    waves = work.programs / (device.sms * resident)
    by_flops, by_bytes = work.flops / device.flops[dtype], work.bytes / device.bandwidth
    bound = max(by_flops, by_bytes)
    an_sm = work.programs / device.sms
    balance = an_sm / math.ceil(an_sm)
    return {
        "kernel": work.kernel,
        "case": work.case,
        "dtype": dtype,
        "flops": work.flops,
        "bytes": work.bytes,
        "bound_by": "compute" if by_flops >= by_bytes else "memory",
        "bound_s": bound,
        "blocks_an_sm": resident,
        "waves": waves,
        "balance": balance,
        "hoped_s": bound / balance,
    }


def measured(name: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """(kernel, dtype, rows, outs, ins) → measured seconds on the device of that name, if any."""
    return {
        (e["kernel"], e["dtype"], e["rows"], e["outs"], e["ins"]): {
            "measured_s": e["seconds"],
            "cublas_s": e["cublas_seconds"],
        }
        for e in tables.measured()
        if name in e["config"]["how"]
    }


def table(name: str, dtypes: list[str]) -> list[dict[str, Any]]:
    """Every kernel and shape on one device."""
    device, known = DEVICES[name], measured(name)
    compiled = recorded()[max(recorded(), key=lambda v: [int(part) for part in v.split(".")])]
    rows = []
    for dtype in dtypes:
        torch_name = str(DTYPES[dtype]).split(".")[1]
        for tokens in ROWS:
            for outs, ins in LAYERS:
                shape = {"rows": tokens, "outs": outs, "ins": ins}
                counts = COUNTS if dtype != "fp32" else COUNTS[:1]  # as wgrad.most
                for kernel, count in (("dgrad", 1), *(("wgrad", c) for c in counts)):
                    work = product(kernel, dtype, tokens, outs, ins, count)
                    case = known.get((kernel, torch_name, tokens, outs, ins), {})
                    found = row(work, dtype, device, compiled)
                    rows.append(shape | {"count": count} | found | (case if count == 1 else {}))
            for kernel in ("bias_grad", "norm_dgrad", "norm_wgrad", "embedding_grad"):
                work = sums(kernel, dtype, tokens, 4096)
                rows.append({"rows": tokens, "n": 4096} | row(work, dtype, device, compiled))
    return rows


def grouping_saves(rows: int, outs: int, ins: int, count: int, device: Device) -> float:
    """What part of a bf16 W one launch for `count` microbatches saves at most.

    That is if reading and writing dW is never hidden behind the products.
    """
    products = 2.0 * rows * outs * ins / device.flops["bf16"]
    gradient = 2 * 4 * outs * ins / device.bandwidth
    return (1 - 1 / count) * gradient / (products + gradient)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    devices = {name: table(name, args.dtypes) for name in DEVICES}
    for name, rows in devices.items():
        print(f"{name}\n{'kernel':<15}{'rows':>6}{'outs × ins':>15}{'group':>6}", end="")
        print(f"{'bound µs':>10}{'by':>9}{'waves':>7}{'hoped µs':>10}{'measured':>10}")
        for r in rows:
            layer = f"{r['outs']} × {r['ins']}" if "outs" in r else str(r["n"])
            took = f"{1e6 * r['measured_s']:.1f}" if "measured_s" in r else "not yet"
            print(f"{r['kernel']:<15}{r['rows']:>6}{layer:>15}{r.get('count', 1):>6}", end="")
            print(f"{1e6 * r['bound_s']:>10.1f}{r['bound_by']:>9}{r['waves']:>7.2f}", end="")
            print(f"{1e6 * r['hoped_s']:>10.1f}{took:>10}")
    saves = grouping_saves(2048, 4096, 4096, 4, DEVICES["H100"])
    result = {"devices": devices, "grouping_saves_at_most": saves}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
