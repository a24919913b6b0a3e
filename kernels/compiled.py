"""Compile every kernel ahead of time, without a GPU, and look at what came out.

For each kernel, dtype and target: no spilled registers, shared memory under the target's limit, and
the tensor-core instruction where there is a product. `python -m zbpipe.kernels.compiled --write`
renews COMPILED.md for the Triton that is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import (
    bias_grad,
    dgrad,
    embedding_grad,
    expert_wgrad,
    norm_dgrad,
    norm_wgrad,
    tables,
    wgrad,
)
from .recorded import TABLE, recorded
from .target import SUPPORTED

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Bytes of shared memory a block may ask for: CUDA C++ Programming Guide, Compute Capabilities.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_CORE = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}  # of 16-bit operands
# Launchers may pass these as 1 or 0, or as no multiple of 16: not specialised.
ODD = ("rows", "count", "padding", "offset", "chunk", "count_parts")
FP32 = ("dW", "mean", "rstd", "parts", "parts_w", "parts_b", "total")


@dataclass(frozen=True)
class Case:
    """One compilation: a kernel, its arguments' types, its constants.

    `variant`: "" if widths and strides are multiples of 16 and W lies (outs, ins), as most are;
    "ragged" if they are not; "turned" if W lies the other way; "grouped" if dW is of as many
    microbatches as a launch takes. Pointers are aligned to 16 bytes.
    """

    kernel: Any
    architecture: int
    dtype: str
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    variant: str = ""

    @property
    def name(self) -> str:
        """As in COMPILED.md: kernel and variant, target, dtype."""
        suffix = "" if self.architecture == 80 else "a"
        kernel = self.kernel.fn.__name__.removesuffix("_kernel")
        kernel += f"_{self.variant}" if self.variant else ""
        return f"{kernel} sm_{self.architecture}{suffix} {self.dtype}"

    @property
    def instruction(self) -> str | None:
        """The tensor-core instruction that must be there; fp32 products are exact and have none."""
        product = self.kernel.fn.__name__.startswith(("dgrad", "wgrad", "expert_wgrad"))
        return TENSOR_CORE[self.architecture] if product and self.dtype != "fp32" else None


@dataclass(frozen=True)
class Report:
    """What came of a case: registers a thread, bytes spilled a thread, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int
    has_instruction: bool

    def complaints(self, case: Case) -> list[str]:
        """What is wrong with it, nothing if all is well."""
        limit = SHARED_LIMIT[case.architecture]
        found = []
        if self.spilled:
            found.append(f"{self.spilled} bytes a thread are spilled")
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory are over the limit of {limit}")
        if not self.has_instruction:
            found.append(f"there is no {case.instruction} in it")
        return found


def cases() -> Iterator[Case]:
    """Every kernel for every target and dtype, with the tables' defaults."""
    for architecture in SUPPORTED:
        for dtype in DTYPES:
            for case in _products(architecture, dtype):
                yield case
                yield from _variants(case)
            yield from _sums(architecture, dtype)


def _products(architecture: int, dtype: str) -> Iterator[Case]:
    bits = 32 if dtype == "fp32" else 16
    for name, pointers, descriptors in (
        ("dgrad", dgrad.dgrad_kernel, dgrad.dgrad_tma_kernel),
        ("wgrad", wgrad.wgrad_kernel, wgrad.wgrad_tma_kernel),
    ):
        for tma in (False, True):
            config = tables.DEFAULTS.get((name, architecture, bits, tma))
            if config is None:
                continue
            constants = {k: v for k, v in config.meta().items() if not k.startswith("num_")}
            constants["UPCAST"] = False
            constants["PRECISION"] = "ieee"
            types = _descriptors(name, dtype, config) if tma else {}
            if name == "dgrad" and not tma:
                constants["stride_wi"] = 1
            if name == "wgrad" and not tma:
                yield Case(
                    expert_wgrad.expert_wgrad_kernel, architecture, dtype, types, constants,
                    config.warps, config.stages,
                )  # fmt: skip
            case = Case(
                descriptors if tma else pointers, architecture, dtype, types, constants,
                config.warps, config.stages,
            )  # fmt: skip
            if name == "dgrad":
                yield case
                continue
            for count in sorted({1, wgrad.most(DTYPES[dtype])}):
                variant = "grouped" if count > 1 else ""
                yield replace(case, constants=constants | _count(count), variant=variant)


def _count(count: int) -> dict[str, Any]:
    """The constants of a dW of so many microbatches: there are no operands past the last."""
    names = (f"{name}{m}" for m in range(count, tables.MOST) for name in ("dY", "X", "rows"))
    return {"COUNT": count, **dict.fromkeys(names)}


def _variants(case: Case) -> Iterator[Case]:
    """A product through pointers, as other shapes and layouts have it compiled once more."""
    if case.types:
        return
    ragged = replace(case, variant=f"{case.variant}_ragged".strip("_"))
    if case.dtype != "fp32":
        config = tables.RAGGED["dgrad" if case.kernel is dgrad.dgrad_kernel else "wgrad"]
        constants = {k: config.meta().get(k, v) for k, v in case.constants.items()}
        ragged = replace(ragged, constants=constants, warps=config.warps, stages=config.stages)
    yield ragged
    if "stride_wi" in case.constants:
        constants = {k: v for k, v in case.constants.items() if k != "stride_wi"}
        yield replace(case, variant="turned", constants=constants | {"stride_wo": 1})


def _descriptors(name: str, dtype: str, config: tables.Config) -> dict[str, str]:
    rows, outs, ins = config.rows, config.outs, config.ins
    of_y = f"tensordesc<{dtype}[{rows},{outs}]>"
    of_x = f"tensordesc<{dtype}[{rows},{ins}]>"
    if name == "dgrad":
        return {"dY": of_y, "W": f"tensordesc<{dtype}[{outs},{ins}]>", "dX": of_x}
    return {f"{n}{m}": t for m in range(tables.MOST) for n, t in (("dY", of_y), ("X", of_x))}


def _sums(architecture: int, dtype: str) -> Iterator[Case]:
    block = norm_dgrad.LONGEST
    columns = {"BLOCK_ROWS": norm_wgrad.ROWS, "BLOCK": bias_grad.COLUMNS}
    both = {"CENTRED": True, "BIAS": True}
    for kernel, constants, warps, stages in (
        (
            bias_grad.bias_grad_kernel,
            {"BLOCK_ROWS": bias_grad.ROWS, "BLOCK_OUTS": bias_grad.COLUMNS}, 4, 3,
        ),
        (
            bias_grad.parts_sum_kernel,
            {"BLOCK_PARTS": bias_grad.MOST_PARTS, "BLOCK_OUTS": bias_grad.COLUMNS}, 4, 2,
        ),
        (
            norm_dgrad.norm_dgrad_kernel,
            {"CENTRED": True, "BLOCK": block}, norm_dgrad.warps(block), 1,
        ),
        (norm_wgrad.norm_wgrad_kernel, both | columns, 4, 3),
        (embedding_grad.embedding_grad_kernel, {"BLOCK": embedding_grad.COLUMNS}, 4, 1),
    ):  # fmt: skip
        yield Case(kernel, architecture, dtype, {}, constants, warps, stages)


def _type(case: Case, argument: str) -> str:
    if argument in case.constants:
        return "constexpr"
    if argument in case.types:
        return case.types[argument]
    argument = argument.rstrip("0123456789")  # of which microbatch
    if argument in FP32:
        return "*fp32"
    if argument in ("tokens", "order"):
        return "*i64"
    if argument == "offsets":
        return "*i32"
    if argument in ("dY", "X", "W", "dX", "weight"):
        return f"*{case.dtype}"
    return "fp32" if argument == "offset" else "i32"


def compile_case(case: Case) -> Report:
    """Compile it for its target and read the machine code."""
    names = case.kernel.arg_names
    types = {name: _type(case, name) for name in names}
    multiples = "*" if case.variant.endswith("ragged") else "*i"
    odd = [name.rstrip("0123456789") in ODD for name in names]
    aligned = [i for i, n in enumerate(names) if types[n][0] in multiples and not odd[i]]
    source = ASTSource(
        fn=case.kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", case.architecture, 32),
        options={"num_warps": case.warps, "num_stages": case.stages},
    )
    registers, spilled = _resources(made.asm["cubin"])
    wanted = case.instruction
    there = wanted is None or re.search(rf"\b{wanted}\b", made.asm["sass"]) is not None
    return Report(registers, spilled, int(made.metadata.shared), there)


def _compile_nth(index: int) -> Report:
    """A kernel cannot be sent to another process, its place among the cases can."""
    return compile_case(list(cases())[index])


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) a thread, from Triton's own cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout + done.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers: {done.stdout}{done.stderr}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


def section(reports: dict[str, Report]) -> str:
    """COMPILED.md's section on the Triton that is installed."""
    lines = [f"## Triton {triton.__version__}", ""]
    lines += ["| kernel, target, dtype | registers | shared memory, bytes |", "|---|---|---|"]
    lines += [f"| {name} | {r.registers} | {r.shared} |" for name, r in reports.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help="renew this Triton's part of the table"
    )
    parser.add_argument("--json", type=Path, help="write what was found here")
    args = parser.parse_args()
    reports, complaints = {}, {}
    every = list(cases())
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found_reports = list(pool.map(_compile_nth, range(len(every))))
    for case, report in zip(every, found_reports, strict=True):
        reports[case.name] = report
        wrong = complaints[case.name] = report.complaints(case)
        print(f"{case.name}: {report.registers} registers, {report.shared} bytes", *wrong)
    if args.json:
        found = {name: asdict(r) | {"complaints": complaints[name]} for name, r in reports.items()}
        known = {version: {n: r for n, (r, _) in c.items()} for version, c in recorded().items()}
        text = {"triton": triton.__version__, "cases": found, "recorded": known}
        args.json.write_text(json.dumps(text, indent=2))
    if args.write:
        head, *others = re.split(r"(?m)^(?=## Triton )", TABLE.read_text())
        others = [
            part for part in others if not part.startswith(f"## Triton {triton.__version__}\n")
        ]
        parts = sorted([*(part.strip() + "\n" for part in others), section(reports)], reverse=True)
        TABLE.write_text(head.strip() + "\n\n" + "\n".join(parts))
    return 1 if any(complaints.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
