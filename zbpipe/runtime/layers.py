"""What each layer of a model costs, measured on a real microbatch before the model is cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..costs import Costs
from ..model.profile import untouched
from . import device as devices
from .boundary import Inputs, enter, split_tree
from .device import Device
from .memory import Meter
from .stage import Stage

# The first run counts memory and warms caches up; of the others the fastest counts.
_TIMED_RUNS = 3
# A hop between two processes over shm (bench/transport.py); trial runs measure it once it is cut.
_HOP_S = 30e-6
_HOP_BYTES_S = 8e9


class _Cost(NamedTuple):
    """One layer: seconds of F, I and W, bytes held until I and until W, and only meanwhile."""

    forward: float
    input_grad: float
    weight_grad: float
    act: float
    stash: float
    transient: float


def layer_costs(stages: Sequence[Stage], microbatch: Any) -> Costs:
    """Costs of each layer, given as a stage of its own, called one after the other.

    `microbatch`: the first stage's input, or the keyword arguments of a model that keeps its own
    forward. Layers that are alike in structure are measured once.
    Gradients, buffers and the random generator are put back as they were.
    """
    known: dict[str, _Cost] = {}
    costs, boundary = [], []
    modules = [stage.root for stage in stages]
    home = devices.of(*modules) or Device()
    for stage in stages:
        stage.device = home
    microbatch = home.place(microbatch)
    value = microbatch
    with home.current(), home.kept_random(), untouched(modules):
        for stage in stages:
            first, last = stage is stages[0], stage is stages[-1]
            key = "" if first or last else _signature(stage, value)
            give = _giver(value, first)
            if key not in known or not key:
                known[key] = _measure(stage, give, microbatch)
            costs.append(known[key])
            if not last:
                value = _output(stage, give, microbatch)
                tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
                boundary.append(float(sum(t.numel() * t.element_size() for t in tensors)))
    return Costs(
        forward=tuple(cost.forward for cost in costs),
        input_grad=tuple(cost.input_grad for cost in costs),
        weight_grad=tuple(cost.weight_grad for cost in costs),
        comm=tuple(_HOP_S + nbytes / _HOP_BYTES_S for nbytes in boundary),
        act=tuple(cost.act for cost in costs),
        stash=tuple(cost.stash for cost in costs),
        transient=tuple(cost.transient for cost in costs),
        boundary=tuple(boundary),
        source="profiled",
    )


def _giver(value: Any, first: bool) -> Callable[[], Inputs]:
    """Makes fresh inputs for each run: layers may change what they get in place."""
    if first:
        return lambda: Inputs(value)
    tensors, skeleton = split_tree(value, "the output of a layer")

    def give() -> Inputs:
        fresh = [tensor.detach().clone() for tensor in tensors]
        with torch.enable_grad():
            return enter(fresh, [tensor.is_floating_point() for tensor in fresh], skeleton)

    return give


def _measure(stage: Stage, give: Callable[[], Inputs], batch: Any) -> _Cost:
    root = stage.root
    given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    meter = Meter([*root.parameters(), *root.buffers(), *given], allocations=True)
    stage.begin(meter)
    _, held = _run(stage, give(), batch, meter)
    stage.begin(None)
    runs = [_run(stage, give(), batch, None)[0] for _ in range(_TIMED_RUNS)]
    f, i, w = (min(run[k] for run in runs) for k in range(3))
    return _Cost(f, i, w, *held)


def _run(
    stage: Stage, inputs: Inputs, batch: Any, meter: Meter | None
) -> tuple[list[float], tuple[float, float, float]]:
    """Seconds of F, I, W and, with a meter, bytes of act, stash and transient."""
    act = stash = transient = 0.0
    clock = [_now(stage)]
    outputs = _roots(stage.forward(0, inputs, batch, 0, None))
    del inputs  # what holds it now is the graph
    stage.keep(0, outputs)
    grads = [torch.ones_like(t) for t in outputs]
    outputs.clear()
    clock.append(_now(stage))
    if meter is not None:
        meter.sample()
        act = float(meter.held)
    stage.backward(0, list(grads), fused=False)
    clock.append(_now(stage))
    if meter is not None:
        meter.sample()
        stash = float(meter.held)
    stage.weights(0)
    clock.append(_now(stage))
    if meter is not None:
        meter.sample()
        transient = max(meter.transients)
    return [b - a for a, b in pairwise(clock)], (act, stash, transient)


def _now(stage: Stage) -> float:
    stage.device.synchronize()
    return time.perf_counter()


def _roots(output: Any) -> list[torch.Tensor]:
    """What a backward may start from: the loss, where the output of the whole model has one."""
    loss = getattr(output, "loss", None)
    leaves = [loss] if isinstance(loss, torch.Tensor) else tree_leaves(output)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]


def _output(stage: Stage, give: Callable[[], Inputs], batch: Any) -> Any:
    with torch.no_grad():
        output = stage(give().value, batch)
    return tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, output)


def _signature(stage: Stage, value: Any) -> str:
    """Equal for layers that do the same work on inputs of the same shapes."""
    modules = [
        (
            str(module),
            sorted(
                (k, v)
                for k, v in vars(module).items()
                if isinstance(v, (bool, int, float, str)) and not k.endswith("idx")
            ),
        )
        for module in stage.root.modules()
        if module is not stage.root
    ]
    shapes = [(str(p.dtype), tuple(p.shape), p.requires_grad) for p in stage.parameters]
    inputs = [
        (str(t.dtype), tuple(t.shape)) for t in tree_leaves(value) if isinstance(t, torch.Tensor)
    ]
    return repr((modules, shapes, inputs))
