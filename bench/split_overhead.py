"""What does splitting the backward cost? One block: plain backward against I + W.

Pairs in turn (A B A B …), one thread, so that drift of the machine falls on both. Both sides run
the same microbatch and accumulate into `.grad` that is already there, as every microbatch but the
first does. The overhead is the median over pairs of (I + W) ÷ plain, minus 1.

A third side defers the norms' weight gradients too; `norms` says what that does to I, to I + W and
to the stash, which is why `Splitter` leaves norms in I unless asked.

    python bench/split_overhead.py --pairs 30 --json overhead.json
    python bench/split_overhead.py --block experts-eager  # of transformers' Mixtral, 2 of 8 a token
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from zbpipe.demo.gpt import Block, GPTConfig
from zbpipe.model.split import Deferred, Splitter

Times = dict[str, float]  # seconds
BLOCKS = ("gpt", "experts-eager", "experts-grouped_mm")
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def make_block(args: argparse.Namespace) -> nn.Module:
    """A block of the demo's GPT, or the experts of a Mixtral layer run one way or the other."""
    if args.block == "gpt":
        return Block(GPTConfig(hidden=args.hidden, heads=8, sequence=args.sequence))
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=args.hidden, intermediate_size=2 * args.hidden)
    config._experts_implementation = args.block.removeprefix("experts-")
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def plain(block: nn.Module, x: Tensor, dY: Tensor, now: Callable[[], float]) -> Times:
    """F and B by autograd alone."""
    start = now()
    y = block(x.requires_grad_())
    middle = now()
    y.backward(dY)
    return {"F": middle - start, "B": now() - middle}


def split(
    block: nn.Module, splitter: Splitter, x: Tensor, dY: Tensor, now: Callable[[], float]
) -> Times:
    """F, I and W as the runtime runs them."""
    entry = Deferred()
    start = now()
    with splitter.active(entry):
        y = block(x.requires_grad_())
    forward = now()
    with splitter.active(entry):
        y.backward(dY)
    backward = now()
    entry.run()
    end = now()
    return {"F": forward - start, "I": backward - forward, "W": end - backward}


def stash(block: nn.Module, splitter: Splitter, x: Tensor, dY: Tensor) -> int:
    """Bytes that one microbatch holds from I until W."""
    entry = Deferred()
    with splitter.active(entry):
        block(x.requires_grad_()).backward(dY)
    return sum(storage.nbytes() for storage in entry.storages())


def measure(args: argparse.Namespace) -> tuple[list[tuple[Times, Times, Times]], list[int]]:
    """`args.pairs` triples of (plain, split, split with norms), after three that warm up.

    And the stash in bytes of the two split sides.
    """
    torch.manual_seed(0)
    block = make_block(args)
    sides = [(twin := copy.deepcopy(block), Splitter(twin, norms=on)) for on in (False, True)]
    shape = (args.batch, args.sequence, args.hidden)
    x, dY = torch.randn(shape), torch.randn(shape)
    now = CLOCKS[args.clock]
    pairs = []
    for _ in range(args.pairs + 3):
        a = plain(block, x.clone(), dY, now)
        b, c = (split(*side, x.clone(), dY, now) for side in sides)
        pairs.append((a, b, c))
    return pairs[3:], [stash(*side, x.clone(), dY) for side in sides]


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "q1": low, "q3": high}


def norms(pairs: list[tuple[Times, Times, Times]], stashes: list[int]) -> dict[str, object]:
    """What deferring the norms' weight gradients changes, against leaving them in I."""
    return {
        "i_change": spread([c["I"] / b["I"] - 1 for _, b, c in pairs]),
        "iw_change": spread([(c["I"] + c["W"]) / (b["I"] + b["W"]) - 1 for _, b, c in pairs]),
        "stash_mib": {"in_i": stashes[0] / 2**20, "deferred": stashes[1] / 2**20},
    }


def summarise(pairs: list[tuple[Times, Times, Times]]) -> dict[str, object]:
    """Milliseconds and ratios, medians and spread over the pairs."""
    fused = [1e3 * a["B"] for a, _, _ in pairs]
    iw = [1e3 * (b["I"] + b["W"]) for _, b, _ in pairs]
    overhead = [b / a - 1 for a, b in zip(fused, iw, strict=True)]
    forward = [b["F"] / a["F"] - 1 for a, b, _ in pairs]
    return {
        "fused_ms": statistics.median(fused),
        "iw_ms": statistics.median(iw),
        "overhead": statistics.median(overhead),
        "spread": {
            "fused_ms": spread(fused),
            "i_ms": spread([1e3 * b["I"] for _, b, _ in pairs]),
            "w_ms": spread([1e3 * b["W"] for _, b, _ in pairs]),
            "overhead": spread(overhead),
            "forward_overhead": spread(forward),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="pairs to measure (at least 10)")
    parser.add_argument("--block", choices=BLOCKS, default="gpt")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this thread")
    parser.add_argument("--bar", type=float, default=0.03, help="overhead above this exits with 1")
    parser.add_argument("--json", type=Path, help="also write the result here")
    args = parser.parse_args()
    if args.pairs < 10:
        parser.error(f"--pairs {args.pairs}: at least 10, or the medians say little")
    torch.set_num_threads(1)
    pairs, stashes = measure(args)
    result = {
        **summarise(pairs),
        "norms": norms(pairs, stashes),
        "pairs": args.pairs,
        "block": args.block,
        "clock": args.clock,
        "shape": {"hidden": args.hidden, "sequence": args.sequence, "batch": args.batch},
        "torch": torch.__version__,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n")
    return 0 if result["overhead"] <= args.bar else 1


if __name__ == "__main__":
    sys.exit(main())
