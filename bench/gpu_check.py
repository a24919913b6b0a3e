"""Everything that only a GPU can tell, in one run of a few minutes; JSON out.

    python bench/gpu_check.py [--json FILE] [--only PART ...]

build      the extension, from source
doctor     what `zbpipe doctor` finds
tests      the tests marked gpu: several ranks on one GPU, in a process and by IPC; graphs
overhead   what an instruction costs the host, and the device lanes, at p = 1
flags      one hop between two ranks on one GPU: action's end → stream-written flag → action's start
transport  messages between two processes on one GPU: by IPC, and staged through the host's memory
copy       a copy to another rank under a running GEMM, against each alone
step       a training step at p = 1 against plain PyTorch and torch's own 1F1B
kernels    dW into fp32 by Triton against cuBLAS, alone and four microbatches in one launch

Each part runs in a process of its own, says "ok", "failed" or "no device", and keeps no other from
running. The exit status is 1 where a part failed; without a device nothing has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from figures import write_json

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
MARK = "gpu_check result: "
# Of a part, in seconds; together they are meant to take under 5 minutes. The tests compile and run
# every kernel.
PATIENCE_S, TESTS_S = 120, 400


def build() -> dict[str, Any]:
    start = time.monotonic()
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return {"seconds": time.monotonic() - start}


def doctor() -> dict[str, Any]:
    from zbpipe.doctor import examine

    return examine().as_json()


def gpu_tests() -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests", "-q", "-rfE"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-12:]
    if done.returncode != 0:
        raise RuntimeError("\n".join(last))
    return {"pytest": last}


def overhead() -> dict[str, Any]:
    import executor_overhead

    on_cpu, on_gpu = executor_overhead.overhead(5), executor_overhead.overhead(5, {0: 0})
    return {
        where: {name: statistics.median(values) for name, values in samples.items()}
        for where, samples in (("cpu", on_cpu), ("gpu", on_gpu))
    }


def _crew(nbytes: int, callbacks: bool) -> tuple[Any, Any, Any]:
    """Two ranks of this process on device 0; rank 1 answers what rank 0 sends."""
    from zbpipe.program import compile, virtual
    from zbpipe.runtime.executor import Crew
    from zbpipe.runtime.world import World
    from zbpipe.schedule.core import Action, Schedule

    rows = tuple(
        tuple(Action(stage, kind, i) for i in range(50) for kind in "FB") for stage in (0, 1)
    )
    programs = compile(Schedule(rows, 50, (0, 1)))
    crew = Crew(World(2, (0, 1)), 60.0, devices={0: 0, 1: 0})
    crew.connect(programs.slots)
    wanted = programs if callbacks else virtual(programs, lambda _: 0.0, lambda _: nbytes)
    return crew, programs, crew.load(wanted)


def flags() -> dict[str, Any]:
    from zbpipe.schedule.core import Action

    out: dict[str, Any] = {}
    for name, nbytes in (("4b", 4), ("1mib", MIB), ("64mib", 64 * MIB)):
        crew, _, loaded = _crew(nbytes, callbacks=False)
        hops: list[float] = []
        for run in range(4):
            crew.run(loaded, {0: None, 1: None})
            spans = {(s.rank, s.lane, s.action): s for s in crew.timeline(loaded).spans}
            for i in range(50) if run else ():
                made = spans[0, "compute", Action(0, "F", i)].end
                hops.append(spans[1, "compute", Action(1, "F", i)].start - made)
        crew.close()
        out[f"hop_{name}_us"] = statistics.median(hops) * 1e6
    return out


def transport(repeats: int = 3) -> dict[str, Any]:
    """bench/transport.py's figures: microseconds, GB/s."""
    import transport as between

    return {k: statistics.median(v) for k, v in between.samples(repeats, device=0).items()}


def copy() -> dict[str, Any]:
    """Rank 0's actions are GEMMs; it sends 64 MiB after each, from memory that nothing changes."""
    import torch

    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    data = torch.empty(64 * MIB, device="cuda", dtype=torch.uint8)
    torch.cuda.synchronize()

    def measure(gemms: int, sends: int) -> float:
        crew, programs, loaded = _crew(0, callbacks=True)
        streams = {
            rank: torch.cuda.ExternalStream(crew.executors[rank].stream(0)) for rank in (0, 1)
        }

        def act(rank: int) -> Callable[[int], None]:
            program = programs.ranks[rank]

            def callback(index: int) -> None:
                with torch.cuda.stream(streams[rank]), torch.no_grad():
                    for _ in range(gemms if rank == 0 else 0):
                        torch.mm(a, b)
                send = program.sends.get(index)
                if send is not None:
                    nbytes = data.numel() if rank == 0 and sends else 4
                    crew.executors[rank].post(send, b"", [(data.data_ptr(), nbytes, 0)], nbytes)

            return callback

        seconds = []
        for _ in range(4):
            crew.run(loaded, {0: act(0), 1: act(1)})
            spans = crew.timeline(loaded).spans
            seconds.append(max(s.end for s in spans) - min(s.start for s in spans))
        crew.close()
        return statistics.median(seconds[1:])

    return {
        "gemm_s": measure(2, 0),
        "copy_s": measure(0, 1),
        "both_s": measure(2, 1),
        "note": "50 rounds of 4 GEMMs (4096, bf16) and one copy of 64 MiB",
    }


def _median_s(run: Callable[[], Any], device: str, times: int = 8) -> float:
    """Seconds of a call, with the device idle before and after; the first few warm up."""
    import torch

    seconds = []
    for _ in range(times):
        if device != "cpu":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[times // 3 :])


def kernels(device: str = "cuda:0", n: int = 4096, tokens: int = 2048) -> dict[str, Any]:
    """dW into fp32 against cuBLAS: once at n³, and four microbatches of `tokens` in one launch."""
    import torch

    from zbpipe.kernels import dispatch

    def operand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    dW = torch.zeros(n, n, device=device)
    dY, X = operand(n, n), operand(n, n)
    stash = [[operand(tokens, n) for _ in range(4)] for _ in range(2)]

    def separate() -> None:
        for y, x in zip(*stash, strict=True):
            dispatch.wgrad_(dW, y, x)

    def by_cublas() -> None:
        for y, x in zip(*stash, strict=True):
            dispatch.add_product(dW, y, x)

    found = {
        "wgrad_s": _median_s(lambda: dispatch.wgrad_(dW, dY, X), device),
        "cublas_bf16_out_s": _median_s(lambda: dY.t() @ X, device),
        "grouped_by_4_s": _median_s(lambda: dispatch.grouped_wgrad_(dW, *stash), device),
        "4_calls_s": _median_s(separate, device),
        "cublas_4_calls_s": _median_s(by_cublas, device),
        "runs": dispatch.names(torch.device(device), torch.bfloat16, (n, n, n)),
    }
    # Bars: at least 0.95 and 1.10.
    found["wgrad_vs_cublas"] = found["cublas_bf16_out_s"] / found["wgrad_s"]
    found["grouped_vs_cublas"] = found["cublas_4_calls_s"] / found["grouped_by_4_s"]
    found["grouped_vs_4_calls"] = found["4_calls_s"] / found["grouped_by_4_s"]
    return found


def step(device: str = "cuda:0", quick: bool = False) -> dict[str, Any]:
    """One rank: plain PyTorch, zbpipe, and torch.distributed.pipelining's 1F1B of one stage."""
    import torch.distributed as dist
    from sides import Work, torch_side, zbpipe_side

    from zbpipe.demo.gpt import GPTConfig, loss_fn

    config = GPTConfig(hidden=1024, layers=8, heads=16, sequence=512)
    work = Work(GPTConfig(61, 16, 2, 2, 8) if quick else config, 8, 2, 1, device)
    model = work.model()
    x, y = work.batch()

    def plain() -> None:
        model.zero_grad()
        for xs, ys in zip(x.tensor_split(8), y.tensor_split(8), strict=True):
            (loss_fn(model(xs), ys) / 8).backward()

    found = {"plain_s": _median_s(plain, device)}
    ours, _ = zbpipe_side("zbpipe zb1p", work, model)
    found["zbpipe_s"] = _median_s(ours.step, device)
    ours.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        theirs = torch_side("torch 1f1b", work, model, 0)
        found["torch_1f1b_s"] = _median_s(theirs.step, device)
    finally:
        dist.destroy_process_group()
    return found


# What each part does, and whether it needs a device.
PARTS: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "build": (build, False),
    "doctor": (doctor, False),
    "tests": (gpu_tests, True),
    "overhead": (overhead, True),
    "flags": (flags, True),
    "transport": (transport, True),
    "copy": (copy, True),
    "step": (step, True),
    "kernels": (kernels, True),
}


def why_no_device() -> str | None:
    """None where there is a CUDA device; else what is missing."""
    try:
        from zbpipe import _native

        probe = _native.cuda.probe()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None if probe["devices"] else probe["error"] or "the CUDA runtime sees no device"


def run_here(name: str) -> dict[str, Any]:
    """Run a part in this process."""
    act, on_device = PARTS[name]
    missing = why_no_device() if on_device else None
    if missing is not None:
        return {"status": "no device", "detail": missing}
    try:
        return {"status": "ok"} | act()
    except Exception as error:
        return {
            "status": "failed",
            "detail": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-2000:],
        }


def run_apart(name: str) -> dict[str, Any]:
    """Run a part in a process of its own, so that neither a crash nor a hang ends the others."""
    command = [sys.executable, str(Path(__file__)), "--part", name]
    start = time.monotonic()
    patience = TESTS_S if name == "tests" else PATIENCE_S
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "detail": f"did not end in {patience} s"}
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not told:
        words = (done.stdout + done.stderr)[-2000:]
        return {"status": "failed", "detail": f"exit status {done.returncode}: {words}"}
    result: dict[str, Any] = json.loads(told[-1].removeprefix(MARK))
    return result | {"took_s": time.monotonic() - start}


def check(names: Iterable[str]) -> dict[str, Any]:
    """Every part's result by name, printed as they come."""
    results = {}
    for name in names:
        results[name] = run_apart(name)
        shown = {k: v for k, v in results[name].items() if k not in ("trace", "findings")}
        print(f"{name:<10}{json.dumps(shown)}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="these parts")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(MARK + json.dumps(run_here(options.part)))
        return 0
    results = check(options.only or PARTS)
    write_json(options.json, results)
    return int(any(result["status"] == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
