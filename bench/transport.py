"""How fast messages are between two processes: over shm, and over tcp or torch as between hosts.

    python bench/transport.py [--json FILE] [--repeats 7] [--device cuda:0]

latency      rank 0 → rank 1 in ping-pong, from the send's start to the end of the receive; `hop` is
             from the end of the action that made the message to the start of the one that reads it
throughput   messages back to back, first send to last receive; received in place, not copied again

Every figure is a median over runs of one process pair, with the least and the most. Those that
begin with tcp_ or torch_ (by torch.distributed, with gloo) go over the loopback of one machine:
what the software costs, without a network. With --device both processes are on that device: in
place of shm it is ipc, and tcp and torch are staged through the host's memory (not yet run on one).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from figures import report

from zbpipe.program import Programs, compile, virtual
from zbpipe.runtime.executor import Crew
from zbpipe.runtime.world import World, join, spawn
from zbpipe.schedule.core import Action, Schedule

KIB, MIB = 1 << 10, 1 << 20
PINGS = 200  # messages each way in a run
BURST = 24  # messages of a throughput run

# What zbpipe holds itself to on two ordinary cores.
BARS = {
    "latency_64kib_us": ("at most", 60.0),
    "throughput_16mib_gbs": ("at least", 3.0),
}


def ping_pong() -> Programs:
    """Rank 0 makes a message, rank 1 answers it, one at a time."""
    rows = tuple(
        tuple(Action(stage, kind, i) for i in range(PINGS) for kind in "FB") for stage in (0, 1)
    )
    return compile(Schedule(rows, PINGS, (0, 1)))


def burst() -> Programs:
    """Rank 0 sends as fast as rank 1 lets it."""
    rows = tuple(tuple(Action(stage, "F", i) for i in range(BURST)) for stage in (0, 1))
    return compile(Schedule(rows, BURST, (0, 1)), forward_only=True)


def measure(rank: int, path: str, repeats: int, device: int | None) -> None:
    """In a spawned rank: run every case, gather both ranks' times, write them from rank 0."""
    world = join(None)
    out: dict[str, list[float]] = {}
    for transport in ("", "tcp", "torch"):
        for name, values in _figures(world, repeats, transport, device).items():
            out[f"{transport}_{name}" if transport else name] = values
    if rank == 0:
        Path(path).write_text(json.dumps(out))


def samples(repeats: int, device: int | None = None) -> dict[str, list[float]]:
    """Every figure's values; `device`: the CUDA device that both ranks are on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        ranks = spawn(measure, 2, (str(path), repeats, device))
        while not ranks.join():
            pass
        found: dict[str, list[float]] = json.loads(path.read_text())
    return found


def _figures(
    world: World, repeats: int, transport: str, device: int | None
) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for size, name in ((64 * KIB, "64kib"), (MIB, "1mib")):
        for ours in _repeat(world, ping_pong(), size, repeats, transport, device):
            ends, starts = _merge(world.gather(ours), "end"), _merge(world.gather(ours), "start")
            latency, hop = [], []
            for i in range(PINGS):
                action = Action(0, "F", i)
                latency.append(ends[1, "recv:0", action] - starts[0, "send:1", action])
                hop.append(starts[1, "compute", Action(1, "F", i)] - ends[0, "compute", action])
            out.setdefault(f"latency_{name}_us", []).append(statistics.median(latency) * 1e6)
            out.setdefault(f"hop_{name}_us", []).append(statistics.median(hop) * 1e6)
    for ours in _repeat(world, burst(), 16 * MIB, repeats, transport, device):
        ends, starts = _merge(world.gather(ours), "end"), _merge(world.gather(ours), "start")
        first, last = Action(0, "F", 0), Action(0, "F", BURST - 1)
        seconds = ends[1, "recv:0", last] - starts[0, "send:1", first]
        out.setdefault("throughput_16mib_gbs", []).append(BURST * 16 * MIB / seconds / 1e9)
    return out


def _repeat(
    world: World, programs: Programs, nbytes: int, repeats: int, transport: str, device: int | None
) -> list[list[Any]]:
    """This rank's spans of `repeats` runs, after one that touches all memory."""
    forced = {(0, 1): transport, (1, 0): transport} if transport else {}
    devices = None if device is None else {world.rank: device}
    crew = Crew(world, timeout=60.0, devices=devices, forced=forced)
    crew.connect(programs.slots)
    used = set(crew.transports().values())
    assert used == {transport or ("shm" if device is None else "ipc")}, used
    loaded = crew.load(virtual(programs, lambda _: 0.0, lambda _: nbytes))
    runs = []
    for _ in range(repeats + 1):
        crew.run(loaded, {world.rank: None})
        runs.append(list(crew.timeline(loaded, "virtual").spans))
    crew.close()
    return runs[1:]


def _merge(parts: list[list[Any]], edge: str) -> dict[tuple[int, str, Action], float]:
    return {(s.rank, s.lane, s.action): getattr(s, edge) for part in parts for s in part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write medians and spreads here")
    parser.add_argument("--repeats", type=int, default=7, help="runs a figure (default 7)")
    parser.add_argument("--device", default="cpu", help="of both ranks: cpu (default) or cuda:0")
    options = parser.parse_args()
    named = re.fullmatch(r"cpu|cuda:(\d+)", options.device)
    if named is None:
        parser.error(f"--device {options.device}: want cpu, or cuda:0 and the like")
    index = None if named[1] is None else int(named[1])
    report(samples(options.repeats, index), BARS if index is None else {}, options.json)


if __name__ == "__main__":
    main()
