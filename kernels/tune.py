"""Measure the matrix kernels on a GPU against cuBLAS, and write the winners into the table.

    python -m zbpipe.kernels.tune --shapes 4096x4096 14336x4096 --rows 2048 8192

For each kernel, dtype, layer (outs × ins) and number of rows: the median time of each candidate and
of cuBLAS, and the fastest as an entry of measured.json, which `tables.choose` reads. An entry is
written as soon as it is there, in place of the one of the same case. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import tables
from .target import architecture, can_use_descriptors

# Layers of Llama 3 8B and 70B: attention, up and down.
LAYERS = ("4096x4096", "14336x4096", "4096x14336", "8192x8192", "28672x8192", "8192x28672")
KERNELS = ("dgrad", "wgrad")
ROWS = (1024, 2048, 4096, 8192)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MILLISECONDS = 100  # of repetitions for each median


def candidates(kernel: str, arch: int, bits: int, descriptors: bool) -> Iterator[tables.Config]:
    """The default, and tiles, warps and stages around it."""
    for tma in (False, True):
        default = tables.DEFAULTS.get((kernel, arch, bits, tma))
        if default is None or (tma and not descriptors):
            continue
        default = replace(default, triton=True)
        yield default
        for stages in (default.stages - 1, default.stages + 1):
            yield replace(default, stages=stages)
        for name in ("rows", "outs", "ins"):
            yield replace(default, **{name: max(getattr(default, name) // 2, 16)})
        for group in (1, 16):
            yield replace(default, group=group)
        yield replace(default, warps=4)


Contender = tuple[tables.Config, Callable[[], Any], Callable[[], Tensor]]


def contenders(
    kernel: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> Iterator[Contender]:
    """(what it is, a call to time, a call that returns its result) of cuBLAS and each candidate."""
    from . import dgrad, dispatch, wgrad

    rows, outs, ins = shape
    dY, X, W = (
        torch.randn(size, device=device, dtype=dtype)
        for size in ((rows, outs), (rows, ins), (outs, ins))
    )
    dW = torch.zeros(outs, ins, device=device)

    def contender(config: tables.Config) -> Contender:
        if kernel == "dgrad":
            by_triton = partial(dgrad.dgrad, dY, W, config=config)
            call = by_triton if config.triton else partial(dY.mm, W)
            return config, call, call
        by_triton = partial(wgrad.wgrad, dW, dY, X, config=config)
        call = by_triton if config.triton else partial(dispatch.add_product, dW, dY, X)

        def result() -> Tensor:
            dW.zero_()
            call()
            return dW.clone()

        return config, call, result

    yield contender(tables.Config(0, 0, 0, 0, 0, "", triton=False))
    able = can_use_descriptors(dY, X, W)
    arch = architecture(dY.device)
    for config in candidates(kernel, arch, 8 * dtype.itemsize, able):
        yield contender(config)


def median_seconds(call: Callable[[], Any]) -> float:
    """Of the call on the GPU, with a cold L2 before each repetition."""
    import triton

    return 1e-3 * float(triton.testing.do_bench(call, rep=MILLISECONDS, return_mode="median"))


def measure(
    kernel: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str = "cuda",
    seconds_of: Callable[[Callable[[], Any]], float] = median_seconds,
) -> dict[str, Any]:
    """The table's entry for one case, with the seconds of the winner and of cuBLAS.

    A candidate that Triton cannot compile or launch is none. Raises RuntimeError if a result is not
    cuBLAS's to 1 % of its largest value.
    """
    import triton
    from triton.errors import TritonError

    times: list[tuple[float, tables.Config]] = []
    want: Tensor | None = None
    for config, call, result in contenders(kernel, shape, dtype, device):
        try:
            got = result()
            seconds = seconds_of(call)
        except TritonError as error:  # too large a tile, most often
            case = f"{kernel} {dtype} {shape}"
            print(f"{case} with {config}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        want = got if want is None else want
        if not bool((got - want).abs().max() <= 1e-2 * want.abs().max()):
            raise RuntimeError(f"{kernel} {shape} with {config} differs from cuBLAS")
        times.append((seconds, config))
    seconds, best = min(times, key=lambda pair: pair[0])
    name = torch.cuda.get_device_name() if device == "cuda" else device
    how = f"fastest of {len(times)} on {name}, torch {torch.__version__}, "
    rows, outs, ins = shape
    return {
        "kernel": kernel,
        "architecture": architecture(torch.device(device)),
        "dtype": str(dtype).split(".")[1],
        "rows": rows,
        "outs": outs,
        "ins": ins,
        "config": asdict(replace(best, how=how + f"triton {triton.__version__}")),
        "seconds": seconds,
        "cublas_seconds": times[0][0],
    }


CASE = ("kernel", "architecture", "dtype", "rows", "outs", "ins")


def enter(entry: dict[str, Any], path: Path) -> None:
    """Write the entry into the table at `path`, in place of one of the same case."""
    known = json.loads(path.read_text())["entries"] if path.exists() else []
    others = [e for e in known if any(e[name] != entry[name] for name in CASE)]
    whole = path.with_suffix(".new")  # a run that is ended while it writes leaves the table whole
    whole.write_text(json.dumps({"entries": [*others, entry]}, indent=1) + "\n")
    os.replace(whole, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kernels", nargs="+", choices=("dgrad", "wgrad"), default=["dgrad", "wgrad"]
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--shapes", nargs="+", default=LAYERS, help="layers, OUTSxINS")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="tokens a microbatch")
    parser.add_argument("--json", type=Path, default=tables.MEASURED, help="the table to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tune measures on a GPU, and torch.cuda finds none")
    for kernel in args.kernels:
        for dtype in args.dtypes:
            for layer in args.shapes:
                outs, ins = (int(size) for size in layer.split("x"))
                for rows in args.rows:
                    case = f"{kernel} {dtype} {rows} × {layer}"
                    try:
                        entry = measure(kernel, (rows, outs, ins), DTYPES[dtype])
                    except Exception as error:
                        raise RuntimeError(f"{case}: {type(error).__name__}: {error}") from error
                    enter(entry, args.json)
                    ratio = entry["cublas_seconds"] / entry["seconds"]
                    print(f"{case}: {ratio:.2f} times cuBLAS")
    return 0


if __name__ == "__main__":
    sys.exit(main())
