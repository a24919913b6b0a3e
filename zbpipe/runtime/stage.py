"""One stage at work: F, I, W and B of its microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..model.graph import used_directly
from ..model.hooks import fire_hooks, mute_hooks
from ..model.rules import Deferred
from ..model.rules.deferred import run_together
from ..model.split import Splitter, narrow, widen
from .boundary import Inputs
from .device import Device
from .memory import Held, Meter


@dataclass
class Microbatch:
    """What a stage holds of one microbatch, from F until W."""

    entry: Deferred
    inputs: Inputs
    # Where its backward begins. Not the outputs themselves: nobody may need their numbers.
    outputs: list[GradientEdge] = field(default_factory=list)
    loss: torch.Tensor | None = None
    weight: float = 0.0
    stash: list[Held] = field(default_factory=list)


class Stage:
    """Runs the layers of one stage, and their backward, one microbatch at a time.

    `layers` are called one after the other, as nn.Sequential would, or by `run(value, batch)` where
    that is given. `tied` parameters are another stage's, too: what this stage adds to their
    gradient in a step gathers in `apart`, and whoever sums both ends fires their hooks.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[tuple[str, nn.Module]],
        seed: int,
        run: Callable[[Any, Any], Any] | None = None,
        tied: Sequence[nn.Parameter] = (),
    ) -> None:
        self.index = index
        self._run = run
        self.apart: dict[nn.Parameter, torch.Tensor | None] = dict.fromkeys(tied)
        self.layers = [module for _, module in layers]
        # Only for its walk over modules; the layers stay the user's.
        self.root = nn.ModuleDict()
        for name, module in layers:
            self.root._modules[name] = module
        self.parameters = list(self.root.parameters())
        self.splitter = Splitter(self.root)
        self.device = Device()  # whoever runs the stage says which
        self.meter: Meter | None = None
        self._seed = seed
        self._held: dict[int, Microbatch] = {}
        self._touched: set[nn.Parameter] = set()
        # Parameters that autograd accumulates into itself, as the last step's first F showed.
        self.eager: set[nn.Parameter] = set()
        self._wide: set[nn.Parameter] = set()
        self._looked = False

    def begin(self, meter: Meter | None) -> None:
        """Start a step, with nothing held; `meter` counts memory if given."""
        self.parameters = list(self.root.parameters())  # the user may have put others in
        self.meter = meter
        self._held.clear()
        self._touched.clear()
        self._looked = False
        self.apart = dict.fromkeys(self.apart)
        self.narrow()

    def widen(self) -> None:
        """Sum the gradients of low-precision weights in fp32 until `narrow`."""
        self._wide = set(widen(self.parameters))

    def narrow(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Round the gradients of these parameters, or all, to the weights' dtype."""
        done = self._wide if parameters is None else self._wide.intersection(parameters)
        narrow(done)
        self._wide = self._wide - done

    def __call__(self, value: Any, batch: Any) -> Any:
        """The stage's output for what it got; `batch` is the microbatch as the user gave it."""
        if self._run is not None:
            return self._run(value, batch)
        for layer in self.layers:
            value = layer(value)
        return value

    def forward(
        self,
        microbatch: int,
        inputs: Inputs,
        batch: Any,
        step: int,
        finish: Callable[[Any], Any] | None,
    ) -> Any:
        """F: the stage's output, or what `finish` (the loss) makes of it; keeps the graph."""
        held = Microbatch(Deferred(touched=self._touched, eager=self.eager), inputs)
        self._held[microbatch] = held
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.splitter.active(held.entry))
            stack.enter_context(self._watch())
            generators = self.device.generators()
            stack.enter_context(seeded(generators, self._seed, step, self.index, microbatch))
            output = self(inputs.value, batch)
            return output if finish is None else finish(output)

    def keep(self, microbatch: int, outputs: list[torch.Tensor], weight: float = 1.0) -> None:
        """Say what `backward` starts from: the outputs that want a gradient, or the loss."""
        outputs = [t for t in outputs if t.requires_grad]
        held = self._held[microbatch]
        held.outputs = [get_gradient_edge(t) for t in outputs]
        held.weight = weight
        if not self._looked:
            # The first microbatch of a step tells for all: a walk over the graph is not free.
            self._looked = True
            self.eager.clear()
            self.eager.update(used_directly(outputs))

    def keep_loss(self, microbatch: int, loss: torch.Tensor, weight: float) -> None:
        """`keep` of the last stage: its loss (0-d), and what it counts in the batch's."""
        self.keep(microbatch, [loss], weight)
        if loss.requires_grad:
            self._held[microbatch].loss = loss.detach()

    def not_its_own(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of those outputs that are parameters or buffers, which may change before I."""
        own = {
            tensor.untyped_storage()._cdata for tensor in (*self.parameters, *self.root.buffers())
        }
        return [t.clone() if t.untyped_storage()._cdata in own else t for t in outputs]

    def loss_grads(self, microbatch: int) -> list[torch.Tensor | None]:
        """The last stage's gradients: the weight of the microbatch's loss, nothing if it is 0."""
        held = self._held[microbatch]
        if held.weight == 0.0 or held.loss is None:
            return [None] * len(held.outputs)
        return [torch.full_like(held.loss, held.weight)]

    def backward(
        self, microbatch: int, grads: Sequence[torch.Tensor | None], fused: bool
    ) -> list[torch.Tensor | None]:
        """I, or B when `fused`: the gradients of the inputs, None where there is none."""
        held = self._held[microbatch]
        held.entry.fused = fused
        roots = [(t, g) for t, g in zip(held.outputs, grads, strict=True) if g is not None]
        held.outputs = []
        inputs = held.inputs
        held.inputs = Inputs(None)
        if roots:
            with ExitStack() as stack:
                stack.enter_context(self._gathered())
                stack.enter_context(self.splitter.active(held.entry))
                stack.enter_context(mute_hooks(self.parameters, self._touched))
                stack.enter_context(self._watch())
                before = [p for p in self.parameters if p.requires_grad and p.grad is None]
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
                _own_grads(before, [g for _, g in roots])
        del roots
        inputs.value = None
        if self.meter is not None and not fused:
            held.stash = self.meter.stash(held.entry)
        if fused:
            del self._held[microbatch]
        return inputs.grads or [None] * inputs.count

    def weights(self, *microbatches: int) -> None:
        """W: what `backward` deferred, of one microbatch or of several in order."""
        held = [self._held.pop(microbatch) for microbatch in microbatches]
        with self._gathered(), self._watch():
            run_together([one.entry for one in held])
        for one in held:
            one.stash.clear()

    def finish(self) -> None:
        """After the step's last W: gradients in their own dtype, then the hooks, once each."""
        done = [p for p in self.parameters if p not in self.apart]
        self.narrow(done)
        with torch.no_grad():  # as autograd calls them
            fire_hooks(p for p in done if p in self._touched)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Let `.grad` of tied parameters be what this stage has added to it in this step.

        A `.main_grad` gets the sum of both ends, too, so it is out of sight meanwhile.
        """
        others = [parameter.grad for parameter in self.apart]
        main = {p: vars(p).pop("main_grad") for p in self.apart if "main_grad" in vars(p)}
        for parameter, own in self.apart.items():
            parameter.grad = own
        try:
            yield
        finally:
            for parameter, other in zip(self.apart, others, strict=True):
                self.apart[parameter], parameter.grad = parameter.grad, other
            for parameter, tensor in main.items():
                parameter.main_grad = tensor  # type: ignore[attr-defined]

    def _watch(self) -> AbstractContextManager[None]:
        return nullcontext() if self.meter is None else self.meter.watch()


def _own_grads(fresh: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]) -> None:
    """Autograd may hand a view of a received gradient out as `.grad`; the slot is overwritten."""
    received = {grad.untyped_storage().data_ptr() for grad in grads}
    for parameter in fresh:
        grad = parameter.grad
        if grad is None or grad.layout != torch.strided:
            continue
        if grad.untyped_storage().data_ptr() in received:
            parameter.grad = grad.clone()


@contextmanager
def seeded(
    generators: Sequence[torch.Generator], seed: int, step: int, stage: int, microbatch: int
) -> Iterator[None]:
    """Random numbers that depend on these four only; the generators are put back afterwards."""
    key = hashlib.blake2b(f"{seed},{step},{stage},{microbatch}".encode(), digest_size=8).digest()
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(int.from_bytes(key, "little"))
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
