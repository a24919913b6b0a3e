"""The two runtimes that runtime_vs_torch compares, driven alike: one global batch a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pairs import Side, quiet
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import zbpipe
from zbpipe.demo.gpt import GPT, GPTConfig, loss_fn
from zbpipe.model.partition import partition
from zbpipe.runtime.batch import microbatches as cut

# Name → torch's class, stages a rank, and whether they are placed as a V.
TORCH = {
    "torch gpipe": ("ScheduleGPipe", 1, False),
    "torch 1f1b": ("Schedule1F1B", 1, False),
    "torch interleaved v2": ("ScheduleInterleaved1F1B", 2, False),
    "torch zb1p": ("ScheduleInterleavedZeroBubble", 1, False),
    "torch zbv": ("ScheduleZBVZeroBubble", 2, True),
    "torch dualpipev": ("ScheduleDualPipeV", 2, True),
}
# Name → schedule, stages a rank. zb1p and zb2p are searched for costs that wrap measures.
ZBPIPE = {
    "zbpipe gpipe": ("gpipe", 1),
    "zbpipe 1f1b": ("1f1b", 1),
    "zbpipe interleaved v2": ("interleaved", 2),
    "zbpipe zb1p": ("zb1p", 1),
    "zbpipe zb2p": ("zb2p", 1),
    "zbpipe zb_v": ("zb_v", 2),
    "zbpipe dualpipe_v": ("dualpipe_v", 2),
}
TORCH_1F1B = "torch 1f1b"


@dataclass(frozen=True)
class Work:
    """What every side computes: a model, and the global batch that each step runs."""

    config: GPTConfig
    microbatches: int
    samples: int  # of one microbatch
    ranks: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def model(self) -> GPT:
        """The same weights on every rank."""
        return GPT(self.config).to(self.device, self.dtype)

    def settle(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def batch(self) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each (m × samples, sequence): random bytes, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.microbatches * self.samples, self.config.sequence)
        inputs, targets = torch.randint(self.config.vocab, shape, generator=generator)
        return inputs.to(self.device), targets.to(self.device)

    def stages(self, count: int) -> list[int]:
        """Layers of each of `count` stages: equal numbers of blocks; embedding and head are free.

        For 2 and 4 stages of 8 blocks that is 5 5 and 3 2 2 3 layers, on both sides.
        """
        return list(partition([0.0] + [1.0] * self.config.layers + [0.0], count))


def unsplit(work: Work) -> dict[str, Tensor]:
    """Gradients of the batch through the whole model in one process."""
    model = work.model()
    inputs, targets = work.batch()
    size, count = len(inputs), work.microbatches
    for x, y in zip(cut(inputs, count, size), cut(targets, count, size), strict=True):
        (loss_fn(model(x), y) / count).backward()
    return _grads(model)


def zbpipe_side(name: str, work: Work, model: GPT) -> tuple[Side, zbpipe.Pipeline]:
    """`model` under a schedule of zbpipe, cut by hand as torch's stages are."""
    schedule, chunks = ZBPIPE[name]
    inputs, targets = work.batch()
    pipe = zbpipe.wrap(
        model,
        microbatches=work.microbatches,
        schedule=schedule,
        partition=work.stages(work.ranks * chunks),
        example=inputs,
        loss_fn=loss_fn,
    )

    def step() -> None:
        pipe.zero_grad()
        pipe.step(inputs, target=targets)

    def grads() -> dict[str, Tensor]:
        return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}

    return Side(step, grads, pipe.close, work.settle), pipe


def torch_side(name: str, work: Work, model: GPT, rank: int) -> Side:
    """Slices of `model` under a schedule of torch.distributed.pipelining.

    Each microbatch's loss is divided by m in the loss, as zbpipe does, and not all gradients after
    the step: the cheaper of torch's two ways. No outputs are gathered; zbpipe gathers none either.
    """
    kind, chunks, v_shaped = TORCH[name]
    count = work.ranks * chunks
    ends = [0]
    for layers in work.stages(count):
        ends.append(ends[-1] + layers)
    own = [rank, count - 1 - rank] if v_shaped else list(range(rank, count, work.ranks))
    parts = {index: model[ends[index] : ends[index + 1]] for index in own}
    device = torch.device(work.device)
    stages = [PipelineStage(parts[index], index, count, device) for index in own]
    with quiet():
        schedule = getattr(schedules, kind)(
            stages[0] if "Interleaved" not in kind and chunks == 1 else stages,
            n_microbatches=work.microbatches,
            loss_fn=lambda output, target: loss_fn(output, target) / work.microbatches,
            scale_grads=False,
        )
    inputs, targets = work.batch()
    args = (inputs,) if 0 in own else ()
    last = {"target": targets} if count - 1 in own else {}

    def step() -> None:
        for part in parts.values():
            part.zero_grad()
        losses: list[Tensor] = []
        keep = {"losses": losses} if last else {}
        schedule.step(*args, **last, **keep, return_outputs=False)

    def grads() -> dict[str, Tensor]:
        return {name: g for part in parts.values() for name, g in _grads(part).items()}

    return Side(step, grads, settle=work.settle)


def _grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
