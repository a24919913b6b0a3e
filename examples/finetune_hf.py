"""Fine-tune a Hugging Face causal LM over pipeline ranks, on a text file.

    torchrun --nproc-per-node 2 examples/finetune_hf.py --text README.md --steps 20
    torchrun --nproc-per-node 2 examples/finetune_hf.py --model PATH --text FILE

Without --model: a small Llama with random weights, on bytes. With it: a local folder as written by
save_pretrained, with its tokenizer; each rank reads its own stages from it and nothing else. The
model is not changed for the pipeline: it is wrapped, and `pipe.step(**batch)` stands in place of
`model(**batch).loss.backward()`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import zbpipe


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face model with zbpipe.")
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 text file")
    parser.add_argument("--model", help="a local folder; default: a small random Llama")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--sequence", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", metavar="DIR", help="write the weights as safetensors at the end")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, and the text as one row of tokens. The same on every rank.

    A model that is read from a folder is on the meta device yet: it takes no memory.
    """
    text = args.text.read_text(encoding="utf-8")
    if args.model:
        config = AutoConfig.from_pretrained(args.model)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
        tokens = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
        return model, torch.tensor(tokens)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.sequence,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config), torch.tensor(list(text.encode()))


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # one core a rank: ranks share this machine
    model, tokens = load(args)
    if len(tokens) <= args.sequence:
        raise SystemExit(f"--text has {len(tokens)} tokens: want more than {args.sequence}")
    model.train()
    pipe = zbpipe.wrap(model, microbatches=args.microbatches, schedule=args.schedule)
    if args.model:
        pipe.load(args.model)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=args.lr)
    first = not dist.is_initialized() or dist.get_rank() == 0
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        starts = torch.randint(len(tokens) - args.sequence, (args.batch, 1), generator=generator)
        ids = tokens[starts + torch.arange(args.sequence)]
        loss = pipe.step(input_ids=ids, labels=ids)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"step {step:3}  loss {loss:.4f}", flush=True)
    if first:
        print(pipe.summary())
    if args.save:
        pipe.save(args.save)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
