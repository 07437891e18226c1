"""Speed of the update, of sampling and of a whole step: both sides in one run, rows in results/speed_*.csv.

    python results/speed.py update   --model FOLDER    packed against padded rows: tokens a CPU second, and peak memory
    python results/speed.py sampling --model FOLDER    tree.make_sampler against generate(num_return_sequences=G)
    python results/speed.py step     --model FOLDER    a step of ours against one of TRL's GRPOTrainer on the same work
    python results/speed.py groups   --model FOLDER    how a step grows from 8 to 64 completions a group

Without --model: the toy world's random model of two layers. Refinement prompts have about 600 tokens, completions 20 to
300. Every side runs in a process of its own, float32 on the CPU. CPU seconds are the unit: other jobs disturb them least.
"""
import argparse
import csv
import itertools
import random
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import torch  # noqa: E402
from transformers import GenerationConfig, TrainerCallback  # noqa: E402

import executor  # noqa: E402
import toy  # noqa: E402
from grpo import grpo_loss, rows_logprobs  # noqa: E402
from murphy import Config, choose, update  # noqa: E402
from problems import Problem  # noqa: E402
from tree import Node, build_trees, encode, first_messages, groups, load_model, make_sampler, refinement_messages  # noqa: E402

SHORTEST, PROMPT = 20, 600  # tokens


def compare_updates(arguments: argparse.Namespace) -> None:
    """Forward and backward of one group; of the padded ways, the fastest micro-batch counts, and the memory of the whole batch."""
    sizes = [size for size in (8, 4, 2, 1) if size <= arguments.group]
    packed, *padded = [apart(one_update, arguments, *way) for way in [("packed", arguments.group), *(("padded", n) for n in sizes)]]
    write("speed_update.csv", [packed, *padded])
    best = max(padded, key=lambda row: row["tokens_per_cpu_second"])
    print(f"packed: {packed['tokens_per_cpu_second'] / best['tokens_per_cpu_second']:.2f} times the tokens a CPU second of padded rows, "
          f"{best['rows']} at a time (asked: 2), in {packed['peak_mb'] / padded[0]['peak_mb']:.2f} of the memory of the padded batch "
          f"(asked: 0.33); gradient norms within {max(abs(row['grad_norm'] / packed['grad_norm'] - 1) for row in padded):.0e}")


def one_update(arguments: argparse.Namespace, way: str, size: int) -> dict:
    model, _, words = load(arguments)
    rng, lengths = random.Random(arguments.seed), sorted(draw_lengths(arguments, arguments.group))
    prompt = rng.choices(words, k=PROMPT)
    rows = [(prompt, rng.choices(words, k=length)) for length in lengths]  # by length: little padding
    advantages = torch.linspace(-1, 1, len(rows))
    rows_logprobs(model, [([words[0]], [words[1]])], 0)[0].sum().item()  # all weights have been read: the baseline
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of memory is forgotten
    baseline = memory("VmRSS")

    def action():
        for at in torch.arange(len(rows)).split(size):
            logp, mask = rows_logprobs(model, [rows[i] for i in at], 0, packed=way == "packed")
            grpo_loss(logp, None, advantages[at], mask, denominator=len(rows))[0].backward()

    _, seconds = timed(action, arguments.rounds)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    return dict(model=name(arguments), way=way, rows=size, tokens=sum(lengths), **seconds, grad_norm=norm,
                tokens_per_cpu_second=round(sum(lengths) / seconds["cpu_seconds"], 1), peak_mb=memory("VmHWM") - baseline)


def compare_sampling(arguments: argparse.Namespace) -> None:
    """The same prompts and completion lengths on both sides, all rows in one batch."""
    ours, plain = [apart(one_sampling, arguments, way) for way in ("make_sampler", "generate")]
    assert ours["tokens"] == plain["tokens"], "both sides were to sample the same number of tokens"
    write("speed_sampling.csv", [ours, plain])
    print(f"make_sampler: {ours['tokens_per_cpu_second'] / plain['tokens_per_cpu_second']:.2f} times the tokens a CPU second of "
          "plain generate (asked: 1.8)")


def one_sampling(arguments: argparse.Namespace, way: str) -> dict:
    model, tokenizer, words = load(arguments)
    lengths = draw_lengths(arguments, arguments.prompts * arguments.group)
    prompts = [refinement(tokenizer, words, seed) for seed in range(arguments.prompts)]
    plan = Lengths(model, tokenizer, words, lengths)
    sample = make_sampler(model, tokenizer, max_new_tokens=arguments.longest)
    how = GenerationConfig(max_new_tokens=arguments.longest, do_sample=True, top_k=0, eos_token_id=plan.end, pad_token_id=plan.end)

    def ours():
        return sum(len(c.completion_ids) for group in sample(prompts, arguments.group) for c in group)

    @torch.no_grad()
    def plain():
        ids = [encode(tokenizer, messages) for messages in sorted(prompts, key=lambda m: len(encode(tokenizer, m)))]
        width = max(map(len, ids))
        out = model.generate(input_ids=torch.tensor([[plan.end] * (width - len(p)) + p for p in ids]),
                             attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids]),
                             generation_config=how, num_return_sequences=arguments.group)[:, width:]
        return sum(row.index(plan.end) + 1 for row in out.tolist())

    tokens, seconds = timed(ours if way == "make_sampler" else plain, arguments.rounds)
    assert tokens == sum(lengths), f"{way} sampled {tokens} tokens, {sum(lengths)} were planned"
    return dict(model=name(arguments), way=way, prompts=len(prompts), group=arguments.group, tokens=tokens, **seconds,
                tokens_per_cpu_second=round(tokens / seconds["cpu_seconds"], 1))


def compare_steps(arguments: argparse.Namespace) -> None:
    """One tree of two turns, G = 8; TRL gets the prompts from which its groups were sampled, as a flat list."""
    try:
        import trl  # noqa: F401
    except ImportError:
        sys.exit("speed.py: the other side is missing: pip install trl, into an environment that you keep for this")
    ours, prompts = apart(our_step, arguments)
    theirs = apart(trl_step, arguments, prompts)
    assert ours["tokens"] == theirs["tokens"] and ours["prompt_tokens"] == theirs["prompt_tokens"], (ours, theirs)
    write("speed_step.csv", [ours, theirs])
    print(f"a step takes {theirs['cpu_seconds'] / ours['cpu_seconds']:.2f} times fewer CPU seconds than TRL's, "
          f"{theirs['seconds'] / ours['seconds']:.2f} times fewer seconds (asked: 2)")


def our_step(arguments: argparse.Namespace) -> tuple[dict, list]:
    """build_trees, choose and update as murphy.py calls them. The real executor judges programs that are scripted, behind
    the sampled text: some of the first attempts fail, no refinement passes all tests, and every group has spread."""
    model, tokenizer, words = load(arguments)
    lengths = draw_lengths(arguments, 8 * (1 + arguments.failures))
    Lengths(model, tokenizer, words, lengths)
    config = Config(turns=2, group_size=8, minibatches=1, max_new_tokens=arguments.longest, micro_tokens=arguments.micro_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    statement = tokenizer.decode(random.Random(arguments.seed).choices(words, k=PROMPT // 2))
    problem = Problem("square", statement, [[[n], n * n] for n in range(8)], [], "f", "functional")
    plain, sampling = make_sampler(model, tokenizer, max_new_tokens=arguments.longest), []

    def sample(prompts, n):
        answers, spent = timed(lambda: plain(prompts, n))
        sampling.append(spent["cpu_seconds"])
        for i, completion in ((i, completion) for group in answers for i, completion in enumerate(group)):
            right = i if i < arguments.failures or len(prompts[0]) > 1 else 8  # tests that it passes
            completion.text += f"\n```python\ndef f(x):\n    return x * x if x < {right} else -{i + 1}\n```"
        return answers

    def step():
        sampling.clear()
        trees = build_trees([problem], sample, executor.run_many, config.turns, config.group_size)
        return trees[0], update(model, optimizer, choose(trees, config), config), round(sum(sampling), 2)

    executor.run_many([(problem, "def f(x): return x")])  # the judges are there before the first step of a run, too
    (tree, stats, sampling_cpu), seconds = timed(step, arguments.rounds)
    made = sorted(groups(tree), key=lambda group: len(group[0].prompt_ids))
    assert len(made) == 1 + arguments.failures and stats["tokens"] == sum(lengths), "another tree than was planned"
    return dict(model=name(arguments), way="murphy", rows=len(lengths), prompt_tokens=sum(len(group[0].prompt_ids) for group in made),
                tokens=sum(lengths), **seconds, sampling_cpu=sampling_cpu), [group[0].prompt for group in made]


def trl_step(arguments: argparse.Namespace, prompts: list) -> dict:
    """One optimizer step of GRPOTrainer, from before sampling to after AdamW. Its rewards are random numbers: they cost nothing."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    model, tokenizer, words = load(arguments)
    lengths = draw_lengths(arguments, 8 * len(prompts))
    Lengths(model, tokenizer, words, lengths)
    clocks = []  # of every step: (wall, CPU) at its begin, after sampling, at its end
    now = lambda: (time.monotonic(), time.process_time())

    def reward(completion_ids, **_):
        clocks[-1].append(now())
        assert sorted(map(len, completion_ids)) == sorted(lengths), "other lengths than were planned"
        return [random.random() for _ in completion_ids]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            clocks.append([now()])

        def on_step_end(self, *_, **__):
            clocks[-1].append(now())

    batch = arguments.trl_batch  # gradient checkpointing, its default, is off: it would cost it a third more
    settings = GRPOConfig(
        output_dir="unused", max_steps=arguments.rounds, learning_rate=1e-6, per_device_train_batch_size=batch, num_generations=8,
        gradient_accumulation_steps=len(lengths) // batch, max_completion_length=arguments.longest, gradient_checkpointing=False,
        bf16=False, use_cpu=True, shuffle_dataset=False, save_strategy="no", report_to="none", disable_tqdm=True, loss_type="grpo")
    trainer = GRPOTrainer(model, [reward], args=settings, train_dataset=Dataset.from_dict({"prompt": prompts}),
                          processing_class=tokenizer, callbacks=[Clock()])
    trainer.train()
    begin, sampled, end = min(clocks, key=lambda clock: clock[2][1] - clock[0][1])
    return dict(model=name(arguments), way=f"trl, {batch} at a time", rows=len(lengths), tokens=sum(lengths),
                prompt_tokens=sum(len(encode(tokenizer, messages)) for messages in prompts),
                seconds=round(end[0] - begin[0], 2), cpu_seconds=round(end[1] - begin[1], 2),
                sampling_cpu=round(sampled[1] - begin[1], 2))


def compare_groups(arguments: argparse.Namespace) -> None:
    """Sampling and updating one group of each size."""
    rows = [apart(one_group, arguments, size) for size in arguments.sizes]
    write("speed_groups.csv", rows)
    first, last = rows[0], rows[-1]
    print(f"{last['group'] / first['group']:.0f} times the completions, {last['tokens'] / first['tokens']:.2f} times the tokens: "
          f"{last['cpu_seconds'] / first['cpu_seconds']:.2f} times the CPU seconds")


def one_group(arguments: argparse.Namespace, size: int) -> dict:
    model, tokenizer, words = load(arguments)
    lengths = draw_lengths(arguments, size)
    Lengths(model, tokenizer, words, lengths)
    config = Config(minibatches=1, max_new_tokens=arguments.longest, micro_tokens=arguments.micro_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    sample = make_sampler(model, tokenizer, max_new_tokens=arguments.longest)
    (group,), sampling = timed(lambda: sample([refinement(tokenizer, words, 0)], size), arguments.rounds)
    kept = [Node(1, prompt_ids=c.prompt_ids, completion_ids=c.completion_ids, advantage=(-1.0) ** i) for i, c in enumerate(group)]
    _, updating = timed(lambda: update(model, optimizer, kept, config), arguments.rounds)
    total = {key: round(sampling[key] + updating[key], 2) for key in sampling}
    return dict(model=name(arguments), group=size, tokens=sum(lengths), **total, sampling_cpu=sampling["cpu_seconds"],
                update_cpu=updating["cpu_seconds"], tokens_per_cpu_second=round(sum(lengths) / total["cpu_seconds"], 1))


class Lengths:
    """Makes the k-th sampled row lengths[k] tokens long: it repeats word k and then ends.

    A hook on the model leaves one logit of every row. Which one depends on the row's last token and position only, so a
    sampler may reorder, repeat or drop rows as it likes. It acts where no gradient is wanted and positions are given,
    which is: in sampling.
    """

    def __init__(self, model, tokenizer, words: list, lengths: list) -> None:
        self.opening, self.end = encode(tokenizer, [{"role": "user", "content": "x"}])[-1], tokenizer.eos_token_id
        self.plan, self.ends = itertools.cycle(zip(words, lengths)), {}  # word -> position of the last token before the end
        model.register_forward_hook(self.choose, with_kwargs=True)

    def choose(self, model, args, kwargs, output):
        if torch.is_grad_enabled() or "position_ids" not in kwargs:
            return
        tokens, positions = kwargs["input_ids"][:, -1].tolist(), kwargs["position_ids"][:, -1].tolist()
        for row, (token, position) in enumerate(zip(tokens, positions)):
            if token == self.opening:  # the last token of a prompt: a row begins
                token, length = next(self.plan)
                self.ends[token] = position + length - 1
            chosen = token if position < self.ends.get(token, 0) else self.end
            logit = output.logits[row, -1, chosen].item()
            output.logits[row, -1] = -torch.inf
            output.logits[row, -1, chosen] = logit


def draw_lengths(arguments: argparse.Namespace, count: int) -> list:
    """Random lengths from 20 to 300, one of each of `count` equal parts of that range, in random order: a few of them are
    already as many tokens as they will be on average."""
    rng, width = random.Random(arguments.seed), (arguments.longest + 1 - SHORTEST) / count
    return [int(SHORTEST + (part + rng.random()) * width) for part in rng.sample(range(count), count)]


def load(arguments: argparse.Namespace) -> tuple:
    """Model, tokenizer and 256 words: ids of which any number in a row is text that gives the same ids again."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    warnings.simplefilter("ignore", FutureWarning)
    if arguments.model == "tiny":
        tokenizer = toy.make_tokenizer()
        tokenizer.add_tokens([f"<{n}>" for n in range(256)])
        model = toy.make_model(len(tokenizer), arguments.seed).eval()
        model.config.max_position_embeddings = 4096
    else:
        model, tokenizer = load_model(arguments.model, torch.device("cpu"))
    again = lambda i: tokenizer(tokenizer.decode([i] * 3), add_special_tokens=False)["input_ids"] == [i] * 3
    ordinary = (i for i in range(len(tokenizer) - 1, 0, -1) if i not in tokenizer.all_special_ids and again(i))
    return model, tokenizer, list(itertools.islice(ordinary, 256))


def refinement(tokenizer, words: list, seed: int) -> list:
    """A chat of about PROMPT tokens: a problem, an attempt at it, and the feedback."""
    problem, attempt, feedback = (tokenizer.decode(random.Random(f"{seed} {part}").choices(words, k=PROMPT // 3)) for part in range(3))
    return refinement_messages(first_messages(SimpleNamespace(prompt=problem)), attempt, feedback)


def apart(function, *arguments):
    """The result of the function in a new process: its memory is its own, and nothing is warm."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def timed(action, rounds: int = 1) -> tuple:
    """Result and seconds of the fastest of some rounds."""
    made = []
    for _ in range(rounds):
        wall, cpu = time.monotonic(), time.process_time()
        result = action()
        made.append((result, dict(seconds=round(time.monotonic() - wall, 2), cpu_seconds=round(time.process_time() - cpu, 2))))
    return min(made, key=lambda pair: pair[1]["cpu_seconds"])


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in MB."""
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) // 1024


def name(arguments: argparse.Namespace) -> str:
    return Path(arguments.model).name


def write(file_name: str, rows: list) -> None:
    """Put rows into results/<file_name>, in place of those of the same model and number of prompts, and print them."""
    path, kind = HERE / file_name, lambda row: (row["model"], str(row.get("prompts", "")))
    old = list(csv.DictReader(path.open())) if path.exists() else []
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows([row for row in old if kind(row) not in set(map(kind, rows))] + rows)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for word, function in dict(update=compare_updates, sampling=compare_sampling, step=compare_steps, groups=compare_groups).items():
        command = commands.add_parser(word, help=function.__doc__)
        command.add_argument("--model", default="tiny", help="folder of a chat model, e.g. SmolLM2-135M-Instruct; tiny: a random one")
        command.add_argument("--threads", type=int, default=1)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--rounds", type=int, default=1, help="of which the fastest counts")
        command.add_argument("--group", type=int, default=8, help="completions of a prompt (update, sampling)")
        command.add_argument("--longest", type=int, default=300, help="tokens of a completion")
        command.add_argument("--prompts", type=int, default=1, help="prompts in a batch (sampling)")
        command.add_argument("--micro-tokens", type=int, default=2048, help="as of murphy.py (step, groups)")
        command.add_argument("--failures", type=int, default=2, help="first attempts that fail, of eight (step)")
        command.add_argument("--trl-batch", type=int, default=1, help="TRL's rows of a forward and backward (step)")
        command.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="completions a group (groups)")
        command.set_defaults(function=function)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
