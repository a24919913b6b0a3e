"""One rank's side of a step: what each instruction of its Program does in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError
from ..program import Program
from ..schedule.core import SUMS, Action
from .boundary import Inputs, enter, pack, split_tree, unpack
from .device import Device
from .memory import Meter, keep_freed_memory
from .stage import Stage
from .tied import add_sums

LossFn = Callable[[Any, Any], torch.Tensor]
# A microbatch's loss, weighted, as fp64 on the device (0-d), and the dtype that it has to the user.
Loss = tuple[torch.Tensor, torch.dtype]


@dataclass
class Run:
    """What a step is about. `key` must be equal on all ranks; it travels in every header."""

    key: tuple[str, int, str]  # "step" or "eval_step", its number, digest of the batch
    inputs: list[Any]
    targets: list[Any]
    weights: list[float]
    loss_fn: LossFn | None
    autocast: tuple[str, torch.dtype, bool] | None = None  # device type, dtype, cache
    home: torch.device | None = None  # the default device, if it is not the CPU
    meter: bool = False
    trial: bool = False  # measures what actions need while they run, too
    hooks: bool = True  # fire post-accumulate-grad hooks

    @property
    def training(self) -> bool:
        return self.key[0] == "step"

    @property
    def step(self) -> int:
        return self.key[1]

    def casting(self) -> AbstractContextManager[Any]:
        """Autocast and default device as where the user called step: threads inherit neither."""
        stack = ExitStack()
        if self.autocast is not None:
            kind, dtype, cache = self.autocast
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        if self.home is not None:
            stack.enter_context(self.home)
        return stack


@dataclass
class Rank:
    """Interprets a Program's compute instructions for one rank.

    `lock` keeps ranks that share a process apart where they use the process's random generator.
    `copies`: a parameter that the first and the last stage share is one of either's process.
    """

    rank: int
    stages: Mapping[int, Stage]
    last: int  # the pipeline's last stage
    microbatches: int
    executor: Any
    threads: int
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    copies: bool = True
    device: Device = field(default_factory=Device)
    # Loss and byte counts are known when the run is over.
    losses: dict[int, Loss] = field(default_factory=dict)
    sent_bytes: dict[int, int] = field(default_factory=dict)  # by the boundary's lower stage
    meter: Meter | None = None

    def __post_init__(self) -> None:
        if self.device.kind == "cpu":
            keep_freed_memory()

    def begin(self, program: Program, run: Run) -> None:
        """Make ready for one run of `program`."""
        self._program, self._run = program, run
        self._outgoing: list[tuple[int, list[torch.Tensor]]] = []
        self._handed: dict[Action, Any] = {}
        self._lent: list[torch.Tensor] = []
        self._unfinished = dict.fromkeys(self.stages, self.microbatches)
        self.losses = {}
        self.meter = None
        if run.meter:
            modules = [stage.root for stage in self.stages.values()]
            tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
            # The batch is the user's, whole as long as the step lasts.
            given = tree_leaves((run.inputs, run.targets))
            tensors += [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
            self.meter = Meter(tensors, allocations=run.trial)
        for stage in self.stages.values():
            stage.device = self.device
            stage.begin(self.meter)
            if run.training:
                stage.widen()

    def end(self) -> None:
        """Let go of everything the run held."""
        self._outgoing, self._handed, self._lent = [], {}, []
        for stage in self.stages.values():
            stage.begin(None)

    def __call__(self, index: int) -> None:
        """Run the action of callback instruction `index`, on its lane's thread."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)  # a new thread would take all cores
        instruction = self._program.instructions[index]
        with self.device.lane(self.executor, instruction.lane):
            self._run_action(index, instruction.action)

    def _run_action(self, index: int, action: Action) -> None:
        if action.kind in SUMS:
            self._tied(index, action)
            return
        self._outgoing = [item for item in self._outgoing if not self.executor.finished(item[0])]
        if action.kind == "F":
            self._forward(index, action)
        elif action.kind == "W":
            self._weights(index, action)
        else:
            self._backward(index, action)
        if self.meter is not None:
            self.meter.sample()
        if action.kind in "WB" and self._run.training:
            self._unfinished[action.stage] -= 1
            if self._unfinished[action.stage] == 0 and self._run.hooks:
                self.stages[action.stage].finish()

    def _forward(self, index: int, action: Action) -> None:
        run, stage, mb = self._run, self.stages[action.stage], action.microbatch
        finish = self._loss if action.stage == self.last else None
        batch = self.device.place(run.inputs[mb])
        inputs = self._inputs(index, action, batch)
        with self.lock, run.casting():
            if run.training:
                tail = None if finish is None else lambda out: finish(out, mb)
                output = stage.forward(mb, inputs, batch, run.step, tail)
            else:
                with torch.no_grad():
                    output = stage(inputs.value, batch)
                    output = output if finish is None else finish(output, mb)
        if finish is not None:
            weight = run.weights[mb]
            value = output.detach().double()
            # Of a microbatch without weight the loss may be nan.
            self.losses[mb] = (value * weight if weight else torch.zeros_like(value), output.dtype)
            if run.training:
                stage.keep_loss(mb, output, weight)
            return
        what = f"the output of stage {action.stage}"
        tensors, skeleton = split_tree(output, what)
        tensors = stage.not_its_own(tensors)
        if run.training:
            stage.keep(mb, tensors)
        self._pass_on(index, action, tensors, (run.key, skeleton))

    def _loss(self, output: Any, microbatch: int) -> torch.Tensor:
        if self._run.loss_fn is None:
            # A Hugging Face output holds the loss, if there were labels.
            loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", output)
            remedy = "give wrap a loss_fn, pass labels, or let the last layer return the loss"
        else:
            target = self.device.place(self._run.targets[microbatch])
            loss = self._run.loss_fn(output, target)
            remedy = "loss_fn(output, target) must return the mean over the microbatch"
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"the loss is a {type(loss).__name__}, want a scalar: {remedy}")
        if loss.dim() != 0 or not loss.is_floating_point():
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)} and dtype {loss.dtype}, want a scalar: "
                + remedy
            )
        return loss

    def _inputs(self, index: int, action: Action, batch: Any) -> Inputs:
        if action.stage == 0:
            return Inputs(batch)
        tensors, wants, extra = self._take(index, Action(action.stage - 1, *action[1:]))
        present = [tensor for tensor in tensors if tensor is not None]
        with torch.set_grad_enabled(self._run.training):
            return enter(present, wants, extra)

    def _backward(self, index: int, action: Action) -> None:
        stage, mb = self.stages[action.stage], action.microbatch
        if action.stage == self.last:
            grads = stage.loss_grads(mb) if self._run.training else []
        else:
            grads, _, dtype = self._take(index, self._source(index, action))
            loss = grads.pop()
            assert loss is not None
            self.losses[mb] = (loss.clone(), dtype)
        dX: list[torch.Tensor | None] = []
        if self._run.training:
            with self.lock:  # checkpointed layers draw their random numbers again
                dX = stage.backward(mb, grads, fused=action.kind == "B")
        if action.stage > 0:
            value, dtype = self.losses[mb]
            self._pass_on(index, action, [*dX, value], (self._run.key, dtype))

    def _weights(self, index: int, action: Action) -> None:
        """W; of a run (Program.together), where the device gains by it, all with the last one.

        The Timeline then shows the held ones as empty spans and the last one's over the whole run:
        how long the rank was busy is right, and when a microbatch of the run was done is not told.
        """
        due: tuple[int, ...] = (action.microbatch,)
        if groups(self.device):
            due = self._program.together.get(index, due)
        if due:
            with self.lock:  # a weight of two stages
                self.stages[action.stage].weights(*due)

    def _tied(self, index: int, action: Action) -> None:
        """R: hand a stage's part of the tied gradients over. S: sum both ends' parts."""
        own, other = self.stages[action.stage].apart, self.last - action.stage
        if action.kind == "R":
            packet = pack(list(own.values()), (self._run.key, None))
            self._lent = packet.keep  # until the run ends: the compute lane looks after the others
            self.executor.post(
                self._program.sends[index], packet.header, packet.pieces, packet.payload
            )
            return
        if action.stage > 0 and not self.copies:
            return  # the first stage's rank is of this process and sums them
        if other in self.stages:
            theirs = list(self.stages[other].apart.values())
        else:
            theirs = self._take(index, Action(other, "R", 0))[0]
        first, last = (own.values(), theirs) if action.stage == 0 else (theirs, own.values())
        with self.lock:
            for stage in self.stages.values():
                stage.narrow(own)
            add_sums(own, first, last)

    def _source(self, index: int, action: Action) -> Action:
        """What made the gradient that `action` needs: an I or a B of the next stage."""
        need = self._program.needs.get(index)
        if need is not None:
            return self._program.instructions[need].action
        fused = Action(action.stage + 1, "B", action.microbatch)
        return fused if fused in self._handed else fused._replace(kind="I")

    def _take(
        self, index: int, source: Action
    ) -> tuple[list[torch.Tensor | None], list[bool], Any]:
        """What `source` passed on to instruction `index`: tensors, gradients wanted, extra."""
        need = self._program.needs.get(index)
        if need is None:
            tensors, (key, extra) = self._handed.pop(source)
            wants = [t is not None and t.requires_grad for t in tensors]
            return [None if t is None else t.detach() for t in tensors], wants, extra
        instruction = self._program.instructions[need]
        header, slot = self.executor.message(instruction.channel, instruction.slot)
        tensors, wants, (key, extra) = unpack(header, slot, self.device)
        if key != self._run.key:
            peer = self._program.sources[instruction.channel]
            raise ConfigError(mismatch(key, peer, self._run.key, self.rank))
        return tensors, wants, extra

    def _pass_on(
        self, index: int, action: Action, tensors: list[Any], extra: tuple[Any, Any]
    ) -> None:
        send = self._program.sends.get(index)
        if send is None:
            self._handed[action] = (tensors, extra)
            return
        packet = pack(tensors, extra)
        boundary = action.stage - (action.kind != "F")
        self.sent_bytes[boundary] = max(packet.payload, self.sent_bytes.get(boundary, 0))
        self.executor.post(send, packet.header, packet.pieces, packet.payload)
        self._outgoing.append((send, packet.keep))


def groups(device: Device) -> bool:
    """Whether several W's at once take less time: on CUDA a launch reads and writes dW once.

    On the CPU it would be a loop, and each W may as well run in its turn.
    """
    return device.kind == "cuda"


def mismatch(theirs: tuple[str, int, str], peer: int, ours: tuple[str, int, str], rank: int) -> str:
    """What to tell the user where two ranks' keys differ."""
    if theirs[:2] != ours[:2]:
        return (
            f"rank {peer} runs {theirs[0]} {theirs[1]} where rank {rank} runs {ours[0]} {ours[1]}: "
            "every rank must make the same calls in the same order"
        )
    return (
        f"the batch of rank {peer} differs from that of rank {rank} at {ours[0]} {ours[1]}: "
        "every rank must pass the same batch"
    )
