"""Peak memory and seconds of sampling and of the update, for models of real sizes.

    python results/memory.py                       every size that this machine's card holds
    python results/memory.py --ranks 8 --sizes olmo-2-7b
    python results/memory.py --sizes tiny          on a CPU: shows that it works

The weights are random, so nothing is downloaded, and completions have their full length: the worst
case. Each size is measured in processes of its own, by torchrun if there are several ranks.
In: nothing. Out: memory.csv. Memory is the most of any rank, on the card if there is one.
"""

# ruff: noqa: E402
import argparse
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record
import torch
from transformers import AutoModelForCausalLM, Olmo2Config, Qwen3Config

from murphy import update
from support import ranks
from support.metrics import timed
from support.sampling import Sampler, pick_device
from support.settings import Config
from support.state import recompute_layers
from tree import Node


def qwen3(width: int, layers: int, inner: int, heads: int, tied: bool = True) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
    )


OLMO = Olmo2Config(
    vocab_size=100_352,
    hidden_size=4096,
    num_hidden_layers=32,
    intermediate_size=11_008,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=4096,
)
TINY = Qwen3Config(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=192,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
)
SIZES = {
    "tiny": TINY,
    "qwen3-0.6b": qwen3(1024, 28, 3072, 16),
    "qwen3-1.7b": qwen3(2048, 28, 6144, 16),
    "qwen3-4b": qwen3(2560, 36, 9728, 32),
    "olmo-2-7b": OLMO,
}


@dataclass
class Words:
    """A tokenizer without words: a prompt is `length` random ids, and no text is ever made."""

    vocabulary: int
    length: int
    pad_token_id: int = 0
    eos_token_id: int = 1  # random weights sample it once in a vocabulary
    added_tokens_decoder = {}  # noqa: RUF012  there are no special tokens

    def apply_chat_template(self, messages: list, tokenize: bool = True, **_: Any) -> Any:
        if not tokenize:
            return ""
        draw = torch.Generator().manual_seed(len(messages[0]["content"]))
        ids = torch.randint(2, self.vocabulary, (self.length,), generator=draw)
        return ids.tolist()

    def convert_tokens_to_ids(self, tokens: list) -> list[int]:
        return []

    def decode(self, ids: list, **_: Any) -> str:
        return ""


def peak(device: torch.device) -> float:
    """The most memory of any rank so far, in GB."""
    if device.type == "cuda":
        mine = torch.cuda.max_memory_allocated()
    else:
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of the process
    return round(max(ranks.gather(mine)) / 1e9, 2)


def measure(size: str, args: argparse.Namespace) -> dict:
    """One step's sampling and update on this rank's share, as murphy.py does them."""
    device = pick_device("auto")
    ranks.join(device)
    torch.manual_seed(0)
    with device:
        attention = {"attn_implementation": args.attention}
        model = AutoModelForCausalLM.from_config(SIZES[size], dtype=torch.float32, **attention)
    model.eval()
    parameters = sum(weight.numel() for weight in model.parameters())
    twin = ranks.sampling_copy(model)
    recompute_layers(model)
    ranks.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    words = Words(SIZES[size].vocab_size, args.prompt)
    sample = Sampler(twin, words, max_new_tokens=args.longest, sample_tokens=args.sample_tokens)

    seconds: dict[str, float] = {}
    prompts = [[{"role": "user", "content": "x" * n}] for n in range(1, args.prompts + 1)]
    with timed(seconds, "sampling"):
        answers = sample(prompts, args.group)
    after_sampling = peak(device)
    nodes = []
    for group in answers:
        for i, c in enumerate(group):
            node = Node(1, prompt_ids=c.prompt_ids, completion_ids=c.completion_ids)
            node.advantage = (-1.0) ** i
            nodes.append(node)
    config = Config(minibatches=1, max_new_tokens=args.longest, micro_tokens=args.micro_tokens)
    with timed(seconds, "updating"):
        update(model, optimizer, nodes, config)
        ranks.refresh(twin, model)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {
        "device": name,
        "ranks": ranks.count(),
        "size": size,
        "parameters": f"{parameters / 1e9:.2f}B",
        "tokens": sum(len(node.completion_ids) for node in nodes),
        "peak_gb_sampling": after_sampling,
        "peak_gb": peak(device),
        "sampling_s": round(seconds["sampling"], 2),
        "update_s": round(seconds["updating"], 2),
    }


def apart(size: str, args: argparse.Namespace) -> dict | str:
    """Measure a size in new processes; a text if it failed, as where the memory is too small."""
    command = [sys.executable]
    if args.ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}"]
    command += [__file__, *sys.argv[1:], "--one", size]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    return "out of memory" if "OutOfMemory" in done.stderr else done.stderr[-1500:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes, a card each")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="default: what fits here")
    parser.add_argument("--prompts", type=int, default=4, help="of each rank")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a completion")
    parser.add_argument("--micro-tokens", type=int, default=4096)
    parser.add_argument("--sample-tokens", type=int, default=65_536)
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "flex_attention"])
    parser.add_argument("--output", type=Path, default=record.HERE, help="folder of memory.csv")
    parser.add_argument("--one", choices=list(SIZES), help=argparse.SUPPRESS)  # in a new process
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return
    default = [size for size in SIZES if size != "tiny"] if torch.cuda.is_available() else ["tiny"]
    for size in args.sizes or default:
        row = apart(size, args)
        print(f"{size}: {row}", flush=True)
        if isinstance(row, dict):
            rows = [{"commit": record.commit(), **row}]
            record.replace(args.output / "memory.csv", rows, ["device", "ranks", "size"])


if __name__ == "__main__":
    main()
