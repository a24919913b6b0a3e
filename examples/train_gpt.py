"""Train a byte-level GPT over pipeline ranks, on the Python standard library's own sources.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 20
    python examples/train_gpt.py --steps 20            # one rank, the same code

Everything that is particular to zbpipe is the call of `wrap` and `pipe.step` in place of forward
and backward.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist

import zbpipe
from zbpipe.demo import data
from zbpipe.demo.gpt import BATCH_SIZE, GPT, LEARNING_RATE, GPTConfig, loss_fn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT with zbpipe.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--layers", type=int, default=GPTConfig().layers)
    parser.add_argument("--hidden", type=int, default=GPTConfig().hidden)
    parser.add_argument("--save", metavar="DIR", help="write the model as safetensors at the end")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # one core a rank: ranks share this machine
    config = GPTConfig(layers=args.layers, hidden=args.hidden)
    text = data.load()
    pipe = zbpipe.wrap(
        GPT(config, seed=0),
        microbatches=args.microbatches,
        schedule=args.schedule,
        example=text.batch("train", 0, BATCH_SIZE, config.sequence)[0],
        loss_fn=loss_fn,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)
    first = not dist.is_initialized() or dist.get_rank() == 0
    held_out = text.batch("held_out", 0, BATCH_SIZE, config.sequence)

    def evaluate() -> float:
        return pipe.eval_step(held_out[0], target=held_out[1]).item()

    before = evaluate()
    for step in range(args.steps):
        start = time.perf_counter()
        inputs, targets = text.batch("train", step, BATCH_SIZE, config.sequence)
        loss = pipe.step(inputs, target=targets)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(
                f"step {step:3}  loss {loss:.4f}  {time.perf_counter() - start:.2f} s", flush=True
            )
    after = evaluate()
    if first:
        print(pipe.summary())
        print(f"held-out loss {before:.4f} → {after:.4f}")
    if args.save:
        pipe.save(args.save)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
