"""The demo's runs: ranks spawned on this machine, one schedule after the other."""

from __future__ import annotations

import multiprocessing as mp
import queue
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import zbpipe

from ..costs import Costs
from ..errors import ConfigError
from ..plan import Plan
from ..program import compile, virtual
from ..runtime.batch import microbatches as cut
from ..runtime.executor import Crew
from ..runtime.world import World, join, spawn
from ..schedule import families
from ..timeline import Timeline
from . import data
from .gpt import BATCH_SIZE, GPT, LEARNING_RATE, GPTConfig, loss_fn

Report = Any
_HELD_OUT_BATCHES = 2


@dataclass(frozen=True)
class Options:
    """What `zbpipe demo` was asked for; `times`: seconds of F, I, W on the virtual device."""

    stages: int
    microbatches: int
    schedules: tuple[str, ...]
    steps: int
    seed: int
    device: str
    times: tuple[float, float, float]


@dataclass
class Result:
    """One schedule's run. Bubbles are of the stage objective; memory in bytes of the largest rank.

    Losses, gradients and memory are None on the virtual device, which has no model.
    """

    name: str
    plan: Plan
    step_s: float
    bubble_measured: float
    measured: Timeline
    memory_measured: float | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    grad_max_diff: float | None = None
    losses: list[float] = field(default_factory=list)

    @property
    def bubble_planned(self) -> float:
        return self.plan.timeline.bubble("stage")

    @property
    def memory_planned(self) -> float | None:
        if self.memory_measured is None:
            return None
        return max(map(self.plan.timeline.peak, range(self.plan.schedule.ranks)))


@dataclass
class Results:
    """All of a demo's runs, and what they ran on."""

    options: Options
    schedules: dict[str, Result]
    parameters: int = 0

    @property
    def bitwise(self) -> bool:
        """Whether the losses of every step are the same bits under each schedule."""
        first, *rest = self.schedules.values()
        return all(result.losses == first.losses for result in rest)


def run(options: Options) -> Results:
    """Spawn the ranks, run every schedule, and return what rank 0 collected.

    Raises ConfigError on options that do not fit the model, before anything is spawned.
    """
    if options.device == "cpu":
        _check(options)
    context = mp.get_context("spawn")
    reports = context.Queue()
    worker = _virtual if options.device == "virtual" else _train
    process = spawn(worker, options.stages, (options, reports))
    results: Results | None = None
    with _progress(options) as advance:
        # A rank that fails raises here, out of join. Results come last, so that nothing is left in
        # the queue, which a rank could not end with.
        while not process.join(timeout=0.05):
            with suppress(queue.Empty):
                while True:
                    kind, value = reports.get_nowait()
                    if kind == "step":
                        advance(value)
                    else:
                        results = value
    if results is None:
        raise zbpipe.ZbpipeError("the ranks ended without a result")
    return results


def _check(options: Options) -> None:
    layers = GPTConfig().layers + 2
    if options.stages > layers:
        raise ConfigError(f"--stages {options.stages}: the demo's model has {layers} layers")
    if options.microbatches > BATCH_SIZE:
        raise ConfigError(
            f"--microbatches {options.microbatches}: the demo's batch has {BATCH_SIZE} sequences"
        )


@contextmanager
def _progress(options: Options) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description:>6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        tasks = {
            name: bar.add_task(name, total=options.steps, start=False) for name in options.schedules
        }

        def advance(name: str) -> None:
            bar.start_task(tasks[name])
            bar.advance(tasks[name])

        yield advance


def _train(rank: int, options: Options, reports: Report) -> None:
    text = data.load()
    world = join(None)
    model = GPT(GPTConfig(), options.seed)
    expected = _unsplit_gradients(model, text, options)
    found = {}
    for name in options.schedules:
        result = _train_schedule(rank, world, name, options, text, expected, reports)
        found[name] = result
    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        reports.put(("results", Results(options, found, count)))


def _batch(text: data.Text, step: int, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    return text.batch("train", step, BATCH_SIZE, GPTConfig().sequence, options.seed)


def _unsplit_gradients(
    model: nn.Module, text: data.Text, options: Options
) -> dict[str, torch.Tensor]:
    """Gradients of the first batch through the whole model in this process, by name."""
    inputs, targets = _batch(text, 0, options)
    count = options.microbatches
    for x, y in zip(cut(inputs, count, BATCH_SIZE), cut(targets, count, BATCH_SIZE), strict=True):
        (loss_fn(model(x), y) * (len(x) / BATCH_SIZE)).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def _train_schedule(
    rank: int,
    world: World,
    name: str,
    options: Options,
    text: data.Text,
    expected: dict[str, torch.Tensor],
    reports: Report,
) -> Result:
    inputs, targets = _batch(text, 0, options)
    model = GPT(GPTConfig(), options.seed)
    pipe = zbpipe.wrap(
        model,
        microbatches=options.microbatches,
        schedule=name,
        example=inputs,
        loss_fn=loss_fn,
        seed=options.seed,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)
    before = _held_out_loss(pipe, text)
    losses, starts, parts, error = [], [], [], 0.0
    for step in range(options.steps):
        inputs, targets = _batch(text, step, options)
        pipe.measure_memory(step == options.steps - 1)
        starts.append(time.perf_counter())
        losses.append(pipe.step(inputs, target=targets).item())
        parts.append(pipe.local_timeline())
        if step == 0:
            error = _largest_difference(pipe, expected)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            reports.put(("step", name))
    starts.append(time.perf_counter())
    after = _held_out_loss(pipe, text)
    everyone = world.gather((parts, error))
    timelines = [
        Timeline.merge(rows[step] for rows, _ in everyone).zeroed() for step in range(options.steps)
    ]
    assert pipe.plan is not None
    plan = pipe.plan
    pipe.close()
    steps = [end - start for start, end in pairwise(starts[1:])]
    return Result(
        name=name,
        plan=plan,
        step_s=statistics.median(steps),
        bubble_measured=statistics.median(t.bubble("stage") for t in timelines[1:]),
        measured=timelines[-1],
        memory_measured=max(map(timelines[-1].peak, range(options.stages))),
        loss_before=before,
        loss_after=after,
        grad_max_diff=max(error for _, error in everyone),
        losses=losses,
    )


def _held_out_loss(pipe: Any, text: data.Text) -> float:
    size = BATCH_SIZE * _HELD_OUT_BATCHES
    inputs, targets = text.batch("held_out", 0, size, GPTConfig().sequence)
    loss: float = pipe.eval_step(inputs, target=targets).item()
    return loss


def _largest_difference(pipe: Any, expected: dict[str, torch.Tensor]) -> float:
    """Of this rank's gradients to the unsplit model's, relative to each tensor's maximum."""
    return max(
        float((p.grad - expected[name]).abs().max() / expected[name].abs().max())
        for name, p in pipe.named_parameters()
    )


def _virtual(rank: int, options: Options, reports: Report) -> None:
    world = join(None)
    costs = Costs.uniform(options.stages, *options.times, source="given")
    found = {}
    for name in options.schedules:
        plan = Plan.make(families.build(name, options.stages, options.microbatches), costs)
        programs = virtual(compile(plan.schedule), costs.duration, lambda _: 0.0)
        crew = Crew(world, timeout=60.0 + sum(options.times))
        crew.connect(programs.slots)
        loaded = crew.load(programs)
        starts, parts = [], []
        for _ in range(options.steps):
            starts.append(time.perf_counter())
            crew.run(loaded, dict.fromkeys(world.local))
            parts.append(crew.timeline(loaded, "virtual"))
            if rank == 0:
                reports.put(("step", name))
        starts.append(time.perf_counter())
        everyone = world.gather(parts)
        crew.close()
        timelines = [
            Timeline.merge(rows[step] for rows in everyone).zeroed()
            for step in range(options.steps)
        ]
        steps = [end - start for start, end in pairwise(starts[1:])]
        bubble = statistics.median(t.bubble("stage") for t in timelines[1:])
        found[name] = Result(name, plan, statistics.median(steps), bubble, timelines[-1])
    if rank == 0:
        reports.put(("results", Results(options, found)))
