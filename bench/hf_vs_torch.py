"""A Hugging Face Llama as it is, under zbpipe, against hand-cut stages of it under torch.

The same layers on each rank, the same loss, two CPU ranks of one thread each; blocks of steps take
turns (pairs.py). zbpipe wraps the model; for torch.distributed.pipelining its stages are written
out by hand, as its users must.

    python bench/hf_vs_torch.py --json hf_vs_torch.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
from figures import write_json
from pairs import Row, Side, fastest, machine, quiet, ratio, run, show, show_bars, take_turns
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import LlamaConfig, LlamaForCausalLM

import zbpipe
from zbpipe.model.partition import partition

BARS = {"ratio_vs_torch_1f1b": 0.92}
ZBPIPE = ("1f1b", "zb1p", "zb2p")
TORCH = {"torch 1f1b": "Schedule1F1B", "torch zb1p": "ScheduleInterleavedZeroBubble"}
BASE = "torch 1f1b"


@dataclass(frozen=True)
class Work:
    """The model, and the global batch that each step runs: `samples` a microbatch."""

    layers: int = 8
    hidden: int = 256
    sequence: int = 128
    vocab: int = 1024
    microbatches: int = 8
    samples: int = 2

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=-(-self.hidden * 8 // 3 // 8) * 8,  # as Llama's own
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            num_key_value_heads=max(1, self.hidden // 64),
            max_position_embeddings=self.sequence,
        )
        return LlamaForCausalLM(config)

    def ids(self) -> Tensor:
        """(m × samples, sequence) tokens, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.microbatches * self.samples, self.sequence)
        return torch.randint(self.vocab, shape, generator=generator)


class HandCut(nn.Module):
    """Layers `start` to `end` - 1 of a Llama, with what belongs before and after them."""

    def __init__(self, model: LlamaForCausalLM, start: int, end: int) -> None:
        super().__init__()
        inner = model.model
        self.embed = inner.embed_tokens if start == 0 else None
        self.rotary = inner.rotary_emb
        self.layers = inner.layers[start:end]
        last = end == len(inner.layers)
        self.norm, self.head = (inner.norm, model.lm_head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        around = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=around, position_ids=positions)
        return hidden if self.norm is None else self.head(self.norm(hidden))


def loss_fn(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean over the tokens after the first, as the model's own loss."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def zbpipe_side(schedule: str, work: Work, sizes: list[int]) -> Side:
    model, ids = work.model(), work.ids()
    pipe = zbpipe.wrap(
        model,
        microbatches=work.microbatches,
        schedule=schedule,
        partition=sizes,
        example={"input_ids": ids, "labels": ids},
    )

    def step() -> None:
        pipe.zero_grad()
        pipe.step(input_ids=ids, labels=ids)

    return Side(step, lambda: _grads(pipe.named_parameters()), pipe.close)


def torch_side(name: str, work: Work, sizes: list[int], rank: int) -> Side:
    model, ids = work.model(), work.ids()
    start = sum(sizes[:rank])
    part = HandCut(model, start, start + sizes[rank])
    stage = PipelineStage(part, rank, len(sizes), torch.device("cpu"))
    kind = TORCH[name]
    with quiet():
        schedule = getattr(schedules, kind)(
            [stage] if "Interleaved" in kind else stage,
            n_microbatches=work.microbatches,
            loss_fn=lambda logits, target: loss_fn(logits, target) / work.microbatches,
            scale_grads=False,
        )
    args = (ids,) if rank == 0 else ()
    last = rank == len(sizes) - 1

    def step() -> None:
        model.zero_grad()
        extra = {"target": ids, "losses": []} if last else {}
        schedule.step(*args, **extra, return_outputs=False)

    return Side(step, lambda: _grads(model.named_parameters()))


def _grads(named) -> dict[str, Tensor]:
    return {name: p.grad for name, p in named if p.grad is not None}


def unsplit(work: Work) -> dict[str, Tensor]:
    """Gradients of the batch through the model's own loss, in one process."""
    model, ids = work.model(), work.ids()
    for part in ids.chunk(work.microbatches):
        (model(part, labels=part).loss / work.microbatches).backward()
    return _grads(model.named_parameters())


def rank_main(rank: int, work: Work, steps: int, rounds: int, out: str) -> None:
    """One rank of the comparison; rank 0 writes what all measured to `out`."""
    sizes = list(partition([1.0] * work.layers, dist.get_world_size()))
    sides = {f"zbpipe {name}": zbpipe_side(name, work, sizes) for name in ZBPIPE}
    sides |= {name: torch_side(name, work, sizes, rank) for name in TORCH}
    rows = take_turns(sides, unsplit(work), steps, rounds)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="of a block, without a barrier")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each side")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--quick", action="store_true", help="a tiny run; its numbers mean nothing")
    args = parser.parse_args()
    work, steps, rounds = Work(), args.steps, args.rounds
    if args.quick:
        work, steps, rounds = Work(2, 32, 16, 61, 3, 1), 1, 1
    about = machine()
    rows: dict[str, Row] = run(rank_main, args.ranks, work, steps, rounds)
    show(rows, BASE)
    best = fastest(rows, [name for name in rows if name.startswith("zbpipe")])
    result = {"ratio_vs_torch_1f1b": ratio(rows[best], rows[BASE]), "best": best, "rows": rows}
    show_bars(result, BARS)
    result["machine"] = {**about, "load_after": os.getloadavg()[0]}
    write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
