"""Ranks on a real CUDA device (marked gpu), and the same actions on the CPU to prove them."""

from __future__ import annotations

import pytest
import torch
from torch_relay import relay

from crews import spawned
from zbpipe import _native
from zbpipe.runtime.executor import Crew
from zbpipe.runtime.world import World, join

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICES = [pytest.param(None, id="cpu"), pytest.param(0, id="gpu", marks=gpu)]
SIZES = [1000, 1000, 300_000, 7, 2_000_000, 1000]
GRAPH = 4  # zb::Work::kGraph


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2", "zb_v"])
def test_ranks_in_one_process_compute_exactly(name, device):
    relay(World(3, (0, 1, 2)), name, 6, device, SIZES)


def separate(rank: int, name: str, device: int | None, transport: str | None) -> None:
    relay(join(None), name, 6, device, SIZES, transport)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transport", [None, "tcp", "torch"])
def test_ranks_in_separate_processes_compute_exactly(device, transport):
    """By shared memory or IPC; the others are staged through the host's memory on a device."""
    spawned(separate, 2, "zb_h1", device, transport)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_graph_runs_as_an_instruction():
    crew = Crew(World(1, (0,)), 60.0, devices={0: 0})
    crew.connect({})
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x += 1
    graph.instantiate()
    if not hasattr(graph, "raw_cuda_graph_exec"):
        pytest.skip("this torch does not give a graph's executable as an integer")
    torch.cuda.synchronize()
    rows = [(0, GRAPH, -1, -1, graph.raw_cuda_graph_exec(), 0, "F", i, [], False) for i in range(5)]
    program = _native.Program(1, rows)
    assert _native.run(crew.board, 0, [(crew.executors[0], program, None)], 10**9)
    assert x.eq(5).all()
    crew.close()
