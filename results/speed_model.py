"""One side of `speed.py update`, `sampling`, `step` or `groups`.

In: a request as JSON on standard input. Out: rows as JSON, the last line that is printed.
The code that is measured lies in the folder that the request names: this checkout, or a commit from
before the rebuild, whose modules had other places.
"""

# ruff: noqa: E402
import itertools
import json
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REQUEST = json.loads(sys.stdin.read())
CODE = Path(REQUEST["code"])
sys.path.insert(0, str(CODE))

import torch
from transformers import GenerationConfig

import executor
from grpo import grpo_loss, pad_rows, token_logprobs
from murphy import Config, choose, update
from tree import Node, build_trees, first_messages, groups, refinement_messages

if (CODE / "support").is_dir():
    from support import toy
    from support.packing import rows_logprobs
    from support.sampling import Sampler, encode, load_model

    def make_sampler(model: Any, tokenizer: Any) -> Callable:
        longest = REQUEST["longest"]
        return Sampler(model, tokenizer, max_new_tokens=longest, sample_tokens=65_536)

    def packed_logprobs(model: Any, rows: list) -> tuple:
        return rows_logprobs(model, rows)

else:  # before the rebuild
    import toy

    import tree
    from grpo import rows_logprobs
    from tree import encode, load_model

    def make_sampler(model: Any, tokenizer: Any) -> Callable:
        return tree.make_sampler(model, tokenizer, max_new_tokens=REQUEST["longest"])

    def packed_logprobs(model: Any, rows: list) -> tuple:
        return rows_logprobs(model, rows, 0)


SHORTEST, PROMPT = 20, 600  # tokens


# ---------------------------------------------------------------------- material


def load() -> tuple[Any, Any, list[int]]:
    """Model, tokenizer and 256 words: ids that, however often repeated, are text and back again."""
    torch.set_num_threads(REQUEST["threads"])
    torch.manual_seed(REQUEST["seed"])
    warnings.simplefilter("ignore", FutureWarning)
    if REQUEST["model"] == "tiny":
        tokenizer = toy.make_tokenizer()
        tokenizer.add_tokens([f"<{n}>" for n in range(256)])
        model = toy.make_model(len(tokenizer), REQUEST["seed"]).eval()
        model.config.max_position_embeddings = 4096
    else:
        model, tokenizer = load_model(REQUEST["model"], torch.device("cpu"))

    if REQUEST["way"] == "ours":
        model.set_attn_implementation("sdpa_in_blocks")  # as support/state.py does

    def comes_back(word: int) -> bool:
        text = tokenizer.decode([word] * 3)
        return tokenizer(text, add_special_tokens=False)["input_ids"] == [word] * 3

    special = tokenizer.all_special_ids
    ordinary = (i for i in range(len(tokenizer) - 1, 0, -1) if i not in special)
    return model, tokenizer, list(itertools.islice(filter(comes_back, ordinary), 256))


def draw_lengths(count: int) -> list[int]:
    """Completion lengths from 20 to `longest`, in random order.

    One is drawn of each of `count` equal parts of that range, so that a few of them have as many
    tokens as they would have on average.
    """
    rng = random.Random(REQUEST["seed"])
    width = (REQUEST["longest"] + 1 - SHORTEST) / count
    parts = rng.sample(range(count), count)
    return [int(SHORTEST + (part + rng.random()) * width) for part in parts]


def refinement(tokenizer: Any, words: list[int], seed: int) -> list[dict]:
    """A chat of about PROMPT tokens: a problem, an attempt at it, and the feedback."""
    texts = []
    for part in range(3):
        rng = random.Random(f"{seed} {part}")
        texts.append(tokenizer.decode(rng.choices(words, k=PROMPT // 3)))
    problem, attempt, feedback = texts
    return refinement_messages(first_messages(SimpleNamespace(prompt=problem)), attempt, feedback)


class Lengths:
    """Makes the k-th sampled row lengths[k] tokens long: it repeats word k and then ends.

    A hook on the model leaves one logit of every row. Which one depends only on the row's last
    token and its position, so a sampler may reorder, repeat or drop rows as it likes.
    """

    def __init__(self, model: Any, tokenizer: Any, words: list[int], lengths: list[int]) -> None:
        self.opening = encode(tokenizer, [{"role": "user", "content": "x"}])[-1]
        self.end = tokenizer.eos_token_id
        self.plan = itertools.cycle(zip(words, lengths, strict=False))
        self.last: dict[int, int] = {}  # word -> position of the last token before the end
        model.register_forward_hook(self.choose, with_kwargs=True)

    def choose(self, model: Any, args: tuple, kwargs: dict, output: Any) -> None:
        """Act on the forwards of `generate` alone: they need no gradient and name positions."""
        needed = ("input_ids", "position_ids")
        if torch.is_grad_enabled() or any(kwargs.get(name) is None for name in needed):
            return
        tokens, positions = (kwargs[name][:, -1].tolist() for name in needed)
        for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            if token == self.opening:  # the last token of a prompt: a row begins
                token, length = next(self.plan)
                self.last[token] = position + length - 1
            chosen = token if position < self.last.get(token, 0) else self.end
            logit = output.logits[row, -1, chosen].item()
            output.logits[row, -1] = -torch.inf
            output.logits[row, -1, chosen] = logit


def timed(action: Callable) -> tuple[Any, dict[str, float]]:
    """What an action returns, and its seconds."""
    wall, cpu = time.monotonic(), time.process_time()
    result = action()
    seconds = round(time.monotonic() - wall, 2)
    return result, {"seconds": seconds, "cpu_seconds": round(time.process_time() - cpu, 2)}


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) // 1024


def row(**columns: Any) -> dict:
    """A row of a CSV, with the tokens a CPU second where it has both."""
    made = {"model": Path(REQUEST["model"]).name, "way": REQUEST["way"], **columns}
    if made.get("cpu_seconds"):
        made["tokens_per_cpu_second"] = round(made["tokens"] / made["cpu_seconds"], 1)
    return made


# ---------------------------------------------------------------------- measures


def group_rows(words: list[int]) -> list[tuple]:
    """The rows of one group, the shortest first: neighbours need little padding."""
    rng = random.Random(REQUEST["seed"])
    lengths = sorted(draw_lengths(REQUEST["group"]))
    prompt = rng.choices(words, k=PROMPT)
    return [(prompt, rng.choices(words, k=length)) for length in lengths]


def learn(model: Any, rows: list[tuple]) -> None:
    """Forward and backward of all rows, `rows` of the request at a time."""
    advantages = torch.linspace(-1, 1, len(rows))
    for at in torch.arange(len(rows)).split(REQUEST["rows"]):
        part = [rows[i] for i in at]
        if REQUEST["way"] == "padded":
            *inputs, mask = pad_rows(part, 0)
            logp = token_logprobs(model, *inputs, mask)
        else:
            logp, mask = packed_logprobs(model, part)
        loss, _ = grpo_loss(logp, None, advantages[at], mask, denominator=len(rows))
        loss.backward()


def measure_update() -> list[dict]:
    """Forward and backward of one group, `rows` of them at a time."""
    model, _, words = load()
    rows = group_rows(words)
    packed_logprobs(model, [([words[0]], [words[1]])])  # all weights have been read
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of memory is forgotten
    before = memory("VmRSS")
    _, seconds = timed(lambda: learn(model, rows))
    peak = memory("VmHWM") - before
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    found = {"rows": REQUEST["rows"], "tokens": sum(len(completion) for _, completion in rows)}
    found |= {**seconds, "grad_norm": norm}
    return [row(**found, peak_mb=peak)]


def measure_sampling() -> list[dict]:
    """The same prompts and completion lengths on every side, all rows in one batch."""
    model, tokenizer, words = load()
    group = REQUEST["group"]
    lengths = draw_lengths(REQUEST["prompts"] * group)
    prompts = [refinement(tokenizer, words, seed) for seed in range(REQUEST["prompts"])]
    plan = Lengths(model, tokenizer, words, lengths)
    sample = make_sampler(model, tokenizer)

    def ours() -> int:
        answers = sample(prompts, group)
        return sum(len(c.completion_ids) for answer in answers for c in answer)

    @torch.no_grad()
    def plain() -> int:
        encoded = sorted((encode(tokenizer, prompt) for prompt in prompts), key=len)
        width = len(encoded[-1])
        ids = [[plan.end] * (width - len(p)) + p for p in encoded]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in encoded]
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": REQUEST["longest"]}
        ends = {"eos_token_id": plan.end, "pad_token_id": plan.end}
        sampled = model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            generation_config=GenerationConfig(**settings, **ends),
            num_return_sequences=group,
        )[:, width:]
        return sum(row.index(plan.end) + 1 for row in sampled.tolist())

    tokens, seconds = timed(plain if REQUEST["way"] == "generate" else ours)
    assert tokens == sum(lengths), f"{tokens} tokens were sampled, {sum(lengths)} were planned"
    return [row(prompts=len(prompts), group=group, tokens=tokens, **seconds)]


def measure_groups() -> list[dict]:
    """Sampling and updating one group."""
    model, tokenizer, words = load()
    lengths = draw_lengths(REQUEST["group"])
    Lengths(model, tokenizer, words, lengths)
    config = settings()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    sample = make_sampler(model, tokenizer)
    prompt = refinement(tokenizer, words, 0)
    (group,), sampling = timed(lambda: sample([prompt], len(lengths)))
    kept = []
    for i, c in enumerate(group):
        node = Node(1, prompt_ids=c.prompt_ids, completion_ids=c.completion_ids)
        node.advantage = (-1.0) ** i
        kept.append(node)
    _, updating = timed(lambda: update(model, optimizer, kept, config))
    total = {name: round(sampling[name] + updating[name], 2) for name in sampling}
    parts = {"sampling_cpu": sampling["cpu_seconds"], "update_cpu": updating["cpu_seconds"]}
    return [row(group=len(lengths), tokens=sum(lengths), **total, **parts)]


def settings() -> Any:
    """The settings of a step: two turns of eight, one optimizer step."""
    return Config(
        turns=2,
        group_size=8,
        minibatches=1,
        max_new_tokens=REQUEST["longest"],
        micro_tokens=REQUEST["micro_tokens"],
    )


def measure_step() -> list[dict]:
    """build_trees, choose and update, as murphy.py calls them, on one problem.

    The real executor judges programs that are scripted, behind the sampled text: some of the first
    attempts fail, no refinement passes all tests, and every group has spread.
    """
    model, tokenizer, words = load()
    failures = REQUEST["failures"]
    lengths = draw_lengths(8 * (1 + failures))
    Lengths(model, tokenizer, words, lengths)
    config = settings()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    statement = tokenizer.decode(random.Random(REQUEST["seed"]).choices(words, k=PROMPT // 2))
    tests = [[[n], n * n] for n in range(8)]
    names = {"entry_point": "f", "kind": "functional", "public_tests": [], "id": "square"}
    problem = SimpleNamespace(prompt=statement, tests=tests, context="", reference=None, **names)
    plain = make_sampler(model, tokenizer)
    spent = []

    def sample(prompts: list, n: int) -> list:
        answers, seconds = timed(lambda: plain(prompts, n))
        spent.append(seconds["cpu_seconds"])
        for answer in answers:
            for i, completion in enumerate(answer):
                passes = i if i < failures or len(prompts[0]) > 1 else 8
                body = f"return x * x if x < {passes} else -{i + 1}"
                completion.text += f"\n```python\ndef f(x):\n    {body}\n```"
        return answers

    def step() -> tuple:
        trees = build_trees([problem], sample, executor.run_many, config.turns, 8)
        return trees[0], update(model, optimizer, choose(trees, config), config)

    executor.run_many([(problem, "def f(x): return x")])  # the judges have started
    (tree, stats), seconds = timed(step)
    made = sorted(groups(tree), key=lambda group: len(group[0].prompt_ids))
    planned = len(made) == 1 + failures and stats["tokens"] == sum(lengths)
    assert planned, "another tree than was planned"
    prompts = [group[0].prompt for group in made]
    counts = {"rows": len(lengths), "prompt_tokens": sum(len(g[0].prompt_ids) for g in made)}
    found = row(**counts, tokens=sum(lengths), **seconds, sampling_cpu=round(sum(spent), 2))
    return [found | {"prompts_in_full": prompts}]


TRL = {
    "output_dir": "unused",
    "max_steps": 1,
    "learning_rate": 1e-6,
    "num_generations": 8,
    "gradient_checkpointing": False,  # on, as by default, it would cost a third more
    "bf16": False,
    "use_cpu": True,
    "shuffle_dataset": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "loss_type": "grpo",
}


def measure_trl() -> list[dict]:
    """An optimizer step of GRPOTrainer, from before sampling to after AdamW, as a flat batch.

    Its rewards are random numbers, which cost nothing.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer, words = load()
    prompts = REQUEST["prompts_in_full"]
    lengths = draw_lengths(8 * len(prompts))
    Lengths(model, tokenizer, words, lengths)
    clock = []  # (wall, CPU) at the step's begin, after sampling, and at its end

    def tick() -> None:
        clock.append((time.monotonic(), time.process_time()))

    def reward(completion_ids: list, **_: Any) -> list[float]:
        tick()
        assert sorted(map(len, completion_ids)) == sorted(lengths), "other lengths than planned"
        return [random.random() for _ in completion_ids]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            tick()

    batch = REQUEST["trl_batch"]
    config = GRPOConfig(
        **TRL,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=len(lengths) // batch,
        max_completion_length=REQUEST["longest"],
    )
    data = Dataset.from_dict({"prompt": prompts})
    options = {"args": config, "train_dataset": data, "processing_class": tokenizer}
    GRPOTrainer(model, [reward], callbacks=[Clock()], **options).train()
    begin, sampled, end = clock
    seconds = {"seconds": round(end[0] - begin[0], 2), "cpu_seconds": round(end[1] - begin[1], 2)}
    tokens = sum(len(encode(tokenizer, messages)) for messages in prompts)
    counts = {"rows": len(lengths), "prompt_tokens": tokens, "tokens": sum(lengths)}
    return [row(**counts, **seconds, sampling_cpu=round(sampled[1] - begin[1], 2))]


MEASURES = {
    "update": measure_update,
    "sampling": measure_sampling,
    "step": measure_step,
    "groups": measure_groups,
}

if __name__ == "__main__":
    made = measure_trl() if REQUEST["way"] == "trl" else MEASURES[REQUEST["measure"]]()
    print(json.dumps(made))
