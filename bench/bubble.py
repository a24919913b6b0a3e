"""Bubbles of zbpipe's schedules and of torch's own, side by side, on the ranks that you have.

    torchrun --nproc-per-node 2 bench/bubble.py --preset h100        # a GPU a rank
    python bench/bubble.py --json bubble.json                        # two CPU ranks, spawned

One model under 1F1B, interleaved 1F1B, ZB1P, ZB2P and ZB-V of zbpipe and every schedule of
torch.distributed.pipelining, the same global batch and the same layers a rank. For each: step time,
tokens/s, peak memory, and the largest difference of a gradient from the unsplit model's; for
zbpipe's, which have a timeline, the bubble planned and measured (stage objective) and the P2P time
exposed: the part of a rank's idle time in which the message it waits for is on its way.

What has not been run is said in bench/h100.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import write_json
from pairs import Row, machine, run, show, take_turns
from sides import TORCH, TORCH_1F1B, ZBPIPE, Work, torch_side, unsplit, zbpipe_side

import zbpipe
from zbpipe.demo.gpt import GPTConfig
from zbpipe.schedule.core import Action
from zbpipe.timeline import Timeline


@dataclass(frozen=True)
class Preset:
    """A model, a microbatch, and the numbers of microbatches to try."""

    config: GPTConfig
    samples: int
    microbatches: tuple[int, ...]
    dtype: torch.dtype = torch.float32


PRESETS = {
    "cpu": Preset(GPTConfig(layers=8), 2, (4, 8)),
    "quick": Preset(GPTConfig(61, 16, 4, 2, 8), 1, (4,)),
    # Sequence, microbatch and m of the two-H100 table in bench/h100.md; 1.4 B parameters.
    "h100": Preset(GPTConfig(50304, 2048, 24, 16, 2048), 4, (2, 4, 8, 16), torch.bfloat16),
}


def exposed(timeline: Timeline, schedule: zbpipe.Schedule) -> float:
    """Seconds, over all ranks, that a rank idles while the message it waits for is on its way."""
    ends = {s.action: s.end for r in range(timeline.ranks) for s in timeline.compute(r)}
    arrivals = {s.action: s.end for s in timeline.spans if s.lane.startswith("recv")}
    total = 0.0
    for rank in range(timeline.ranks):
        idle_from = None
        for span in timeline.compute(rank):
            made_by = next(_makers(span.action, schedule, ends), None)
            if idle_from is not None and made_by in arrivals:
                begins = max(idle_from, ends[made_by])
                total += max(0.0, min(span.start, arrivals[made_by]) - begins)
            idle_from = span.end
    return total


def _makers(
    action: Action | None, schedule: zbpipe.Schedule, ran: dict[Any, float]
) -> Iterator[Action]:
    """What made the message that `action` needs."""
    if action is None or action.kind == "W":
        return
    stage = action.stage + (-1 if action.kind == "F" else 1)
    if 0 <= stage < schedule.stages:
        for kind in "F" if action.kind == "F" else "IB":
            found = Action(stage, kind, action.microbatch)
            if found in ran:
                yield found


def look(pipe: zbpipe.Pipeline, step: Any) -> Row:
    """Bubbles, exposed P2P and memory of one more step. A collective."""
    pipe.measure_memory()
    step()
    timeline, plan = pipe.timeline(), pipe.plan
    pipe.measure_memory(False)
    assert plan is not None
    return {
        "bubble_planned": plan.timeline.bubble(),
        "bubble_measured": timeline.bubble(),
        "p2p_exposed_s": exposed(timeline, plan.schedule),
        "held_bytes": [timeline.peak(rank) for rank in range(timeline.ranks)],
    }


def measure(rank: int, work: Work, steps: int, rounds: int) -> dict[str, Row]:
    """All sides on this rank; the same rows on every rank."""
    ours, theirs = work.model(), work.model()
    pipes: dict[str, zbpipe.Pipeline] = {}
    sides, extra = {}, {}
    for name in (n for n in ZBPIPE if n != "zbpipe dualpipe_v"):
        sides[name], pipes[name] = zbpipe_side(name, work, ours)
    for name in TORCH:
        try:
            sides[name] = torch_side(name, work, theirs, rank)
        except ValueError as error:  # torch's own bounds on m; the same on every rank
            if rank == 0:
                print(f"{name} is left out: {error}")
    for name, side in sides.items():
        peak_of(work)  # from here on
        side.step()
        if name in pipes:
            extra[name] = look(pipes[name], side.step)
        side.settle()
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak_of(work))
        extra.setdefault(name, {})["peak_bytes"] = peaks
    rows = take_turns(sides, unsplit(work), steps, rounds)
    tokens = work.microbatches * work.samples * work.config.sequence
    for name, row in rows.items():
        row |= extra[name]
        row["tokens_s"] = [tokens / seconds for seconds in row["step_s"]]
    return rows


def peak_of(work: Work) -> int:
    """Bytes at most since the last call: of the device, on the CPU of the process so far."""
    if work.device == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = torch.cuda.max_memory_allocated(work.device)
    torch.cuda.reset_peak_memory_stats(work.device)
    return peak


def report(rows: dict[str, Row], count: int) -> None:
    print(f"\nm = {count}")
    show(rows, TORCH_1F1B)
    print(f"{'':22}{'tokens/s':>10}{'planned':>9}{'measured':>10}{'P2P exposed ms':>16}", end="")
    print(f"{'held MB':>9}{'peak MB':>9}")
    for name, row in rows.items():
        middle = sorted(row["tokens_s"])[len(row["tokens_s"]) // 2]
        print(f"{name:22}{middle:10.0f}", end="")
        if "bubble_planned" in row:
            print(f"{row['bubble_planned']:9.2%}{row['bubble_measured']:10.2%}", end="")
            print(f"{1e3 * row['p2p_exposed_s']:16.3f}{max(row['held_bytes']) / 1e6:9.1f}", end="")
        else:
            print(f"{'':44}", end="")
        print(f"{max(row['peak_bytes']) / 1e6:9.0f}")


def all_counts(rank: int, preset: str, device: str, args: argparse.Namespace) -> dict[str, Any]:
    chosen = PRESETS[preset]
    found = {}
    for count in args.microbatches or chosen.microbatches:
        ranks = dist.get_world_size()
        work = Work(chosen.config, count, chosen.samples, ranks, device, chosen.dtype)
        found[str(count)] = measure(rank, work, args.steps, args.rounds)
    return found


def spawned(rank: int, preset: str, args: argparse.Namespace, out: str) -> None:
    found = all_counts(rank, preset, "cpu", args)
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def under_torchrun(preset: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """On a GPU a rank where there are any; the rows on rank 0."""
    rank = int(os.environ["RANK"])
    device = "cpu"
    if torch.cuda.is_available() and not args.cpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    try:
        found = all_counts(rank, preset, device, args)
    finally:
        dist.destroy_process_group()
    return found if rank == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--microbatches", type=int, nargs="*", help="in place of the preset's")
    parser.add_argument("--ranks", type=int, default=2, help="to spawn, without torchrun")
    parser.add_argument("--steps", type=int, default=6, help="of a block, without a barrier")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each side")
    parser.add_argument("--cpu", action="store_true", help="under torchrun, even if there are GPUs")
    parser.add_argument("--quick", action="store_true", help="a tiny run; its numbers mean nothing")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    args = parser.parse_args()
    preset = "quick" if args.quick else args.preset
    if args.quick:
        args.steps = args.rounds = 1
    about = machine()
    if "RANK" in os.environ:
        found = under_torchrun(preset, args)
    else:
        found = run(spawned, args.ranks, preset, args)
    if found is None:
        return 0
    for count, rows in found.items():
        report(rows, int(count))
    if args.json:
        about |= {"preset": preset, "load_after": os.getloadavg()[0]}
        shape = dataclasses.asdict(PRESETS[preset].config)
        write_json(args.json, {"machine": about, "model": shape, "microbatches": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
