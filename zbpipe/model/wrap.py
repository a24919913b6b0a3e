"""wrap: arguments checked, model cut, ranks found; what comes out is a Pipeline."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import ConfigError
from ..flow import Flow
from ..runtime import planner
from ..runtime.hosts import forced_pairs
from ..runtime.pipeline import Pipeline, Settings
from ..runtime.world import World, join
from .cut import Taken, measured_partition, placed, take
from .stages import describe

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def wrap(
    model: Any,
    microbatches: int,
    schedule: Any = "auto",
    memory: Any = None,
    partition: Any = "auto",
    example: Any = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    loss_weight: Callable[[Any], Any] | None = None,
    shared: Collection[str] = (),
    timeout: float = 30.0,
    seed: int = 0,
    mesh: Any = None,
    local_ranks: int | None = None,
    transport: Any = None,
) -> Pipeline:
    """Split `model` over the ranks of the job, one after the other in depth.

    Under torchrun every process calls this with the same arguments and a model of the same
    architecture, and drives one rank; with `local_ranks=n` this process drives n ranks (for tests
    and notebooks, never a timing); else there is one rank. The modules are not copied and stay
    ordinary modules outside `step`.

    Args:
        model: an nn.Sequential, or a list of layers or of stages, called one after the other; or a
            Hugging Face decoder, whose step takes the model's own arguments, and whose own loss is
            used if there are labels.
        microbatches: m, the slices of a global batch, cut as numpy.array_split does.
        schedule: a family ("gpipe", "1f1b", "interleaved", "zb_v", …), a Schedule, or the path of
            a CSV. "zb1p", "zb2p": a search under p or 2p microbatches of memory where costs are
            measured (`memory` or `example`), else the shapes ZB-H1 and ZB-H2. "auto": a search
            under `memory` alone, for measured costs.
        memory: budget a rank for activations and stash: bytes, text such as "60GiB", or a list
            with one a rank. None: no limit. With a budget, costs are measured at the first step.
        partition: layers of each stage; or "auto": those with which the schedule takes the least
            time, embedding and head included, for the layers' times if there is an `example`, else
            by their parameters; or {0: 7, -1: 6}: as "auto", with these stages' layers given.
        example: a batch: the input of the first layer, or a dict of a Hugging Face model's
            arguments. With it each layer's F, I, W and memory are measured on rank 0 (layers that
            are alike once), "auto" tries V placements as well (two stages a rank), and the plan's
            costs are measured in trial runs at the first step. None of that leaves a trace in
            gradients, buffers or random state. On the meta device there is nothing to measure.
        loss_fn: loss_fn(output, target) → mean over a microbatch, 0-d; without it the last layer's
            output is the loss.
        loss_weight: loss_weight(target) → weight of a microbatch's mean in the batch's; default
            its number of samples.
        shared: keys of a dict input that are not split along dim 0.
        timeout: seconds without any progress on any rank after which a step is an error.
        seed: of dropout and other random numbers, which depend on (seed, step, stage, microbatch).
        mesh: not supported yet.
        local_ranks: ranks that this process drives.
        transport: how messages go from rank to rank. None: the fastest that works for each pair,
            in shared memory ("local" in a process, "shm" or on CUDA "ipc" on a host), else "tcp",
            or on CUDA "nccl" if both processes can load it. One of the latter or "torch" (by
            torch.distributed, with the job's own backend) for all pairs, or {(from, to): "tcp"}
            for some, of ranks that exchange messages. Which host a rank is on is found out;
            ZBPIPE_HOST, set to different names, keeps processes apart that could share memory.

    Raises:
        ConfigError, ScheduleError: an argument that cannot be right, or a model that differs
            between ranks; the same error on every rank.
    """
    world = join(local_ranks, mesh)

    def prepare() -> tuple[Settings, Taken]:
        settings = _settings(
            world,
            microbatches,
            schedule,
            memory,
            example,
            loss_fn,
            loss_weight,
            shared,
            timeout,
            seed,
            transport,
        )
        return settings, take(model, partition, settings)

    prepared: list[Any] = []

    def measurable() -> bool:
        prepared.append(prepare())
        return example is not None and not prepared[0][1].on_meta()

    everyone = world.agree(measurable, "wrapping the model")
    settings, taken = prepared[0]
    if len(set(everyone)) > 1:
        raise ConfigError(
            f"rank {everyone.index(not everyone[0])} differs from rank 0 in whether there is an "
            "example, or a model with numbers (not on meta): want the same on every rank"
        )
    if taken.fixed is not None and everyone[0]:
        placement, sizes = world.agree(
            lambda: measured_partition(settings, taken, example) if world.rank == 0 else None,
            "timing the layers",
        )[0]
        settings, taken = placed(settings, placement), replace(taken, sizes=sizes)

    def compared() -> tuple[str, str]:
        if isinstance(transport, Mapping):
            _check_channels(settings, taken)
        return _digest(settings, taken)

    digests = world.agree(compared, "wrapping the model")
    for rank, (digest, what) in enumerate(digests):
        if digest != digests[0][0]:
            raise ConfigError(
                f"rank {rank} wraps another model or other arguments than rank 0: "
                f"{what} against {digests[0][1]}"
            )
    return Pipeline(world, taken.cut(), settings)


def _settings(
    world: World,
    microbatches: Any,
    schedule: Any,
    memory: Any,
    example: Any,
    loss_fn: Any,
    loss_weight: Any,
    shared: Collection[str],
    timeout: Any,
    seed: Any,
    transport: Any,
) -> Settings:
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ConfigError(f"microbatches = {microbatches!r}: want a number, at least 1")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ConfigError(f"timeout = {timeout!r}: want seconds, more than 0")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed = {seed!r}: want an integer")
    for name, value in (("loss_fn", loss_fn), ("loss_weight", loss_weight)):
        if value is not None and not callable(value):
            raise ConfigError(f"{name} is a {type(value).__name__}: want a callable")
    if isinstance(shared, str):
        raise ConfigError(f"shared = {shared!r}: want a list of names, [{shared!r}]")
    schedules = planner.resolve(schedule, world.size, microbatches)
    budget = _budget(memory, world.size)
    return Settings(
        microbatches=microbatches,
        schedules=tuple(schedules),
        search=planner.searched(schedule),
        memory=budget,
        profile=len(schedules) > 1 or budget is not None or example is not None,
        loss_fn=loss_fn,
        loss_weight=loss_weight,
        shared=frozenset(shared),
        timeout=float(timeout),
        seed=seed,
        forced=forced_pairs(transport, world.size, world.local),
    )


def _check_channels(settings: Settings, taken: Taken) -> None:
    """Raises ConfigError where a transport was given to a pair of ranks without a channel."""
    channels = Flow(settings.schedules[0], False, bool(taken.cut().tied)).channels
    for pair, name in settings.forced.items():
        if pair not in channels:
            there = ", ".join(map(str, sorted(channels)))
            raise ConfigError(
                f"transport = {{{pair!r}: {name!r}}}: rank {pair[0]} sends nothing to rank "
                f"{pair[1]}; "
                + (f"want pairs (from, to) of {there}" if there else "no rank sends any")
            )


def _budget(memory: Any, ranks: int) -> tuple[float, ...] | None:
    if memory is None:
        return None
    each = list(memory) if isinstance(memory, (list, tuple)) else [memory] * ranks
    if len(each) != ranks:
        raise ConfigError(f"memory has {len(each)} entries: want one number, or {ranks}")
    return tuple(parse_bytes(value) for value in each)


def parse_bytes(value: Any) -> float:
    """Bytes of a number or of text as "60GiB" or "1.5 GB". Raises ConfigError on anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value) and value > 0:
            return float(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS and float(match[1]) > 0:
            return float(match[1]) * _UNITS[match[2].lower()]
    raise ConfigError(f'memory = {value!r}: want bytes, or text such as "60GiB" or "1.5GB"')


def _digest(settings: Settings, taken: Taken) -> tuple[str, str]:
    sizes, around = taken.sizes, taken.decoder
    layers = taken.layers if around is None else [*around.before, *taken.layers, *around.after]
    schedules = [schedule.digest() for schedule in settings.schedules]
    forced = sorted(settings.forced.items())
    parts = (schedules, settings.memory, settings.seed, describe(layers), list(sizes), forced)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    count = sum(p.numel() for _, module in layers for p in module.parameters())
    names = [schedule.name for schedule in settings.schedules]
    return digest, (
        f"{len(layers)} layers, {count} parameters, microbatches={settings.microbatches}, "
        f"schedule {'/'.join(names)}, partition {list(sizes)}, seed {settings.seed}"
        + (f", transport {dict(forced)}" if forced else "")
    )
