"""The pipeline object that `wrap` returns: step, eval_step, and a module's everyday methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..costs import Costs
from ..errors import ConfigError, ZbpipeError
from ..model.load import load, on_meta
from ..model.profile import untouched
from ..model.stages import Layer
from ..plan import Plan
from ..program import Programs, compile
from ..schedule.core import Schedule
from ..schedule.families import evaluation
from ..timeline import Timeline
from . import batch, planner
from . import device as devices
from .checkpoint import save
from .device import Device
from .executor import Crew, Loaded
from .module import StagedModule
from .optimizer import clip_grad_norm
from .rank import Loss, LossFn, Rank, Run, mismatch
from .stage import Stage
from .summary import summary
from .world import World

# Trial runs: the first counts memory and warms up, the others are timed.
_TIMED_TRIALS = 2


@dataclass(frozen=True)
class Settings:
    """What `wrap` was told, checked."""

    microbatches: int
    schedules: tuple[Schedule, ...]
    search: str | None  # the name that a schedule is searched by, once costs are known
    memory: tuple[float, ...] | None
    profile: bool
    loss_fn: LossFn | None
    loss_weight: Callable[[Any], Any] | None
    shared: frozenset[str]
    timeout: float
    seed: int
    forced: Mapping[tuple[int, int], str] = field(default_factory=dict)  # transports
    poison: bool = False


@dataclass(frozen=True)
class Cut:
    """A model in stages: (name, module) of what each holds; how the stages run, if not in order.

    `sizes`: how many layers each stage has, without what stands before and after all of them.
    `whole`: a model that keeps its own forward, and takes keyword arguments; `everywhere`: modules
    of it that run on every stage. `tied`: parameters that the first and the last stage share.
    """

    stages: Sequence[Sequence[Layer]]
    sizes: Sequence[int]
    runners: Sequence[Callable[[Any, Any], Any]] | None = None
    whole: nn.Module | None = None
    everywhere: Sequence[nn.Module] = ()
    tied: Sequence[nn.Parameter] = ()


class Pipeline(StagedModule):
    """A model split over ranks by depth. Made by `zbpipe.wrap`; see there for the arguments.

    `plan` is the Plan that is being run: None until the first step has chosen it.
    """

    plan: Plan | None

    def __init__(self, world: World, cut: Cut, settings: Settings) -> None:
        self.plan = None
        self._world, self._settings = world, settings
        self._layers = [list(stage) for stage in cut.stages]
        self._placement = placement = settings.schedules[0].placement
        self._tied = tied = list(cut.tied)
        stages = {
            index: Stage(
                index,
                layers,
                settings.seed,
                run=None if cut.runners is None else cut.runners[index],
                tied=tied if index in (0, len(self._layers) - 1) else (),
            )
            for index, layers in enumerate(self._layers)
            if placement[index] in world.local
        }
        super().__init__(stages, cut.whole)
        self._sizes, self._everywhere = cut.sizes, cut.everywhere
        # Whether the tied parameters of the last stage are copies of those in another process.
        self._copies = placement[0] not in world.local
        self._crew: Crew | None = None
        self._ranks: dict[int, Rank] = {}
        self._loaded: dict[str, Loaded] = {}
        self._last: Loaded | None = None
        self._steps = {"step": 0, "eval_step": 0}
        self._metering = False

    # --- one global batch -----------------------------------------------------------------------

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of one global batch, as `loss.backward()` over it would.

        Takes the input of the first layer: a tensor, or a tuple, list or dict of them, whose dim 0
        is the batch; and `target` for `loss_fn(output, target)`. A Hugging Face model takes its own
        keyword arguments, `labels` among them. Gradients are added to `.grad`.
        Returns the loss (0-d) of the whole batch on every rank, without a collective.

        Raises ConfigError on input that cannot be right and StageError where a rank failed, on
        every rank; after that the pipeline is spent: wrap the model again.
        """
        return self._step("step", lambda: self._input(args, kwargs), target)

    def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """The loss of one global batch, in eval mode and without gradients, on every rank."""
        flags = [(m, m.training) for root in self._roots() for m in root.modules()]
        try:
            self.eval()
            return self._step("eval_step", lambda: self._input(args, kwargs), target)
        finally:
            for module, training in flags:
                module.training = training

    def _step(self, mode: str, value: Callable[[], Any], target: Any) -> torch.Tensor:
        if self._crew is not None:
            self._crew.raise_failure()
        if mode not in self._loaded:
            run = self._prepare_together(mode, value, target)
            self._start(run)
        else:
            assert self._crew is not None
            try:
                run = self._prepare(mode, value(), target)
            except Exception as error:
                self._crew.fail(self._world.rank, error)
                raise
        self._steps[mode] += 1
        assert self._crew is not None
        self._execute(self._crew, self._loaded[mode], replace(run, meter=self._metering))
        self._last = self._loaded[mode]
        return _total(self._ranks[self._world.rank].losses, self._settings.microbatches)

    def _prepare_together(self, mode: str, value: Callable[[], Any], target: Any) -> Run:
        """The first batch: compared over the control group, since there are no channels yet."""
        prepared: list[Run] = []

        def prepare() -> tuple[str, int, str]:
            prepared.append(self._prepare(mode, value(), target))
            return prepared[0].key

        keys = self._world.agree(prepare, "preparing the first batch")
        for rank, key in enumerate(keys):
            if key != keys[0]:
                raise ConfigError(mismatch(keys[0], 0, key, rank))
        return prepared[0]

    def _prepare(self, mode: str, value: Any, target: Any) -> Run:
        settings = self._settings
        if self._crew is None and (
            name := next(on_meta(s.root for s in self._stages.values()), None)
        ):
            raise ConfigError(f"{name} is on the meta device: call load(path) before {mode}()")
        count = settings.microbatches
        size = batch.batch_size(value)
        batch.check_size(size, count)
        batch.check_target(target, size)
        if target is not None and settings.loss_fn is None:
            raise ConfigError("target was given, but wrap got no loss_fn to compare it with")
        if target is None and settings.loss_fn is not None:
            raise ConfigError("target is missing: wrap got a loss_fn(output, target)")
        inputs = batch.microbatches(value, count, size, settings.shared)
        targets = batch.microbatches(target, count, size) if target is not None else [None] * count
        weights = [0.0] * count
        if self._last_stage in self._stages:
            weights = batch.loss_weights(
                self._whole, value, target, (inputs, targets), size, settings.loss_weight
            )
        digest = batch.digest((value, target)) if self._world.size > 1 else ""
        # What threads do not inherit.
        autocast, kind = None, (self._device(self._world.rank) or Device()).kind
        if torch.is_autocast_enabled(kind):
            autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        key = (mode, self._steps[mode], digest)
        default = torch.get_default_device()
        home = None if default.type == "cpu" else default
        return Run(key, inputs, targets, weights, settings.loss_fn, autocast, home)

    def _execute(self, crew: Crew, loaded: Loaded, run: Run) -> None:
        try:
            for rank, runner in self._ranks.items():
                runner.executor = crew.executors[rank]
                if rank in crew.cuda:
                    runner.device.after_caller(crew.cuda[rank])
                runner.begin(loaded.programs[rank], run)
            crew.run(loaded, self._ranks)
        finally:
            for runner in self._ranks.values():
                runner.end()

    # --- the first step: costs, plan, channels --------------------------------------------------

    def _start(self, run: Run) -> None:
        settings, world = self._settings, self._world
        lock: Any = nullcontext() if len(world.local) == 1 else threading.Lock()
        threads = max(1, torch.get_num_threads() // len(world.local))
        for rank in world.local:
            own = settings.schedules[0].stages_of(rank)
            self._ranks[rank] = Rank(
                rank,
                {stage: self._stages[stage] for stage in own},
                self._last_stage,
                settings.microbatches,
                None,
                threads,
                lock,
                self._copies,
                self._device(rank) or Device(),
            )
        order = settings.schedules[0]
        programs = {}
        if run.training:
            costs = self._measure(run) if settings.profile else None
            # Rank 0 decides. An error of its decision is raised by all.
            choose = world.agree(
                lambda: self._choose(costs) if world.rank == 0 else None, "planning"
            )
            self.plan = choose[0]
            order = choose[0].schedule
            programs["step"] = compile(planner.fused(order), tied=bool(self._tied))
        # An evaluation may come first; its batch says nothing about the costs of a step.
        programs["eval_step"] = compile(evaluation(order), forward_only=True)
        crew = self._new_crew()
        crew.connect(_most_slots(programs.values()))
        self.close()
        self._loaded = {mode: crew.load(program) for mode, program in programs.items()}
        self._crew = crew

    def _device(self, rank: int) -> Device | None:
        """Where a rank of this process has its parameters and buffers; None if it has none."""
        own = [stage for i, stage in self._stages.items() if self._placement[i] == rank]
        return devices.of(*(stage.root for stage in own))

    def _new_crew(self) -> Crew:
        world, settings = self._world, self._settings
        found = devices.agreed(world, lambda: {rank: self._device(rank) for rank in world.local})
        return Crew(world, settings.timeout, settings.poison, found, settings.forced)

    def _choose(self, costs: Costs | None) -> Plan | None:
        if self._world.rank != 0:
            return None
        schedules = self._settings.schedules
        if costs is None:
            return Plan.make(schedules[0], Costs.uniform(schedules[0].stages))
        settings = self._settings
        return planner.choose(schedules[0], settings.search, costs, settings.memory)

    def _measure(self, run: Run) -> Costs:
        """Costs from trial runs on this batch, which leave no trace in the model."""
        trial = planner.split_backward(self._settings.schedules[-1])
        programs = compile(trial)
        crew = self._new_crew()
        crew.connect(programs.slots)
        loaded = crew.load(programs)
        run = replace(run, key=("step", -1, run.key[2]), hooks=False)
        try:
            with untouched([stage.root for stage in self._stages.values()]):
                self._execute(crew, loaded, replace(run, meter=True, trial=True))
                held = {}
                for runner in self._ranks.values():
                    held.update(planner.held_by_stage(loaded.programs[runner.rank], runner))
                timelines = []
                for _ in range(_TIMED_TRIALS):
                    self._execute(crew, loaded, run)
                    timelines.append(crew.timeline(loaded))
        finally:
            crew.close()
        boundary = {b: n for r in self._ranks.values() for b, n in r.sent_bytes.items()}
        parts = self._world.gather(planner.Measured(timelines, held, boundary))
        return planner.costs_from(parts, trial.stages)

    def _input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._whole is None:
            return _only_input(args, kwargs)
        if len(args) > 1 or (args and "input_ids" in kwargs):
            raise ConfigError(f"step() got {len(args)} positional inputs: want input_ids=, labels=")
        return dict(kwargs) if not args else {"input_ids": args[0], **kwargs}

    @property
    def _last_stage(self) -> int:
        return len(self._layers) - 1

    # --- what it did ------------------------------------------------------------------------------

    def measure_memory(self, on: bool = True) -> None:
        """Count live storages in the steps that follow (a few percent slower), for `timeline`."""
        self._metering = on

    def timeline(self) -> Timeline:
        """What all ranks did in the last step, and the memory they held if it was measured.

        A collective: every rank must call it. Raises ZbpipeError before the first step.
        """
        return Timeline.merge(self._world.gather(self.local_timeline())).zeroed()

    def local_timeline(self) -> Timeline:
        """This process's part of `timeline`, in seconds of rank 0's host's clock; no collective."""
        if self._crew is None or self._last is None:
            raise ZbpipeError("timeline() before the first step: nothing has run yet")
        part = self._crew.timeline(self._last)
        clock = self._crew.clock
        curves = {
            rank: tuple((time + clock, held) for time, held in runner.meter.curve)
            for rank, runner in self._ranks.items()
            if runner.meter is not None
        }
        memory = tuple(curves.get(rank, ()) for rank in range(self._world.size))
        return Timeline(part.spans, part.ranks, memory, part.kind)

    def summary(self) -> str:
        """Each stage's layers, costs and split, transports, and the plan once there is one."""
        transports = {} if self._crew is None else self._crew.transports()
        return summary(self._layers, self._sizes, self._stages, self.plan, transports)

    # --- all ranks together -----------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is `max_norm` at most; returns the norm.

        A collective over the pipeline's ranks, as torch.nn.utils.clip_grad_norm_ over the model.
        """
        own = list(self.parameters())
        elsewhere = set(map(id, self._tied)) if self._copies else set()
        counted = [parameter for parameter in own if id(parameter) not in elsewhere]
        return clip_grad_norm(self._world, own, counted, max_norm, norm_type)

    def save(self, directory: str | Path) -> None:
        """Write the whole model as safetensors, a file a rank and an index. A collective.

        `load` reads it, and from_pretrained, where it is a Hugging Face model.
        """
        save(self._world, self.state_dict(), Path(directory), self._whole)

    def load(self, path: str | Path, device: torch.device | str = "cpu") -> None:
        """Read this process's stages, and nothing else, from a checkpoint. A collective.

        `path`: what `save`, or a Hugging Face model's save_pretrained, wrote: a folder, or a
        safetensors file. What is on the meta device gets its memory here, on `device`.
        Raises ConfigError on every rank, before anything is changed, where entries are missing.
        """
        roots = [stage.root for stage in self._stages.values()]
        self._world.agree(
            lambda: load(Path(path), roots, self._whole, self._everywhere, torch.device(device)),
            "loading a checkpoint",
        )

    def close(self) -> None:
        """Stop the executor's threads and give its memory back; happens at exit by itself."""
        if self._crew is not None:
            self._crew.close()


def _only_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs:
        raise ConfigError(
            f"step() got {', '.join(map(repr, kwargs))}: a list of layers takes one input, "
            "step(x, target=y); x may be a tuple or a dict"
        )
    if len(args) != 1:
        raise ConfigError(f"step() got {len(args)} inputs, want one: x, or a tuple or dict of them")
    return args[0]


def _total(losses: Mapping[int, Loss], count: int) -> torch.Tensor:
    # In microbatch order, so that schedules agree to the bit.
    total = 0.0
    for i in range(count):
        total += losses[i][0].item()
    return torch.tensor(total, dtype=losses[0][1])


def _most_slots(programs: Collection[Programs]) -> dict[tuple[int, int], int]:
    slots: dict[tuple[int, int], int] = {}
    for program in programs:
        for pair, count in program.slots.items():
            slots[pair] = max(count, slots.get(pair, 0))
    return slots
