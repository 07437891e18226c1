"""The embedded default: a tiny model and two small worlds, so that MURPHY can be watched on a laptop with no download.

World A, "doctest": write the one-line function behind a vague docstring and a single example. Several programs fit the
example, so a first attempt is a guess, and the feedback on one that fits is new information: it shows multi-turn training.
World B, "cut-off": `x < k` for a k that nothing in the prompt tells. Every first guess is right once in 16, so its own
reward teaches nothing; its worth is the feedback that it draws: it shows what only retrospective credit can teach.

In: a world's name, a seed. Out: `Problem`s that the real executor runs, and a model of about 120k parameters, warm-started
in front of one's eyes on sloppy demonstrations. World A's sloppiness is put in on purpose: small real models, too, repeat
their failed attempts, and that is the habit which reinforcement learning is to cure.
"""

import itertools
import random
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from problems import Problem
from tree import Messages, encode, first_messages, refinement_messages

WORLDS = ("doctest", "cutoff")
INPUTS = range(16)
# World A: stratum, docstring, program, its constants. Families that share a docstring are what a prompt leaves open; the
# order within a stratum is also the order of popularity in the demonstrations.
FAMILIES = [
    ("easy", "add to x", "x + {}", [range(1, 6)]),
    ("easy", "constant", "{}", [range(16)]),
    ("medium", "clamp x", "min(x, {})", [range(3, 13)]),
    ("medium", "clamp x", "max(x, {})", [range(3, 13)]),
    ("medium", "mask x", "x if x > {} else 0", [range(3, 13)]),
    ("medium", "mask x", "x if x < {} else 0", [range(3, 13)]),
    ("hard", "clamp x twice", "max({}, min(x, {}))", [range(2, 8), range(8, 14)]),
    ("hard", "replace x", "x if x > {} else {}", [range(3, 13), range(1, 6)]),
    ("hard", "replace x", "x if x < {} else {}", [range(3, 13), range(1, 6)]),
]
DEF = "def f(x): return "
LEVELS = ("easy", "medium", "hard")
PROGRAMS: dict[str, dict[str, list[str]]] = {level: {} for level in LEVELS}  # stratum -> docstring -> expressions
VALUES: dict[str, tuple[int, ...]] = {}  # expression -> its values on INPUTS
for level, doc, template, ranges in FAMILIES:
    for constants in itertools.product(*ranges):
        expression = template.format(*constants)
        PROGRAMS[level].setdefault(doc, []).append(expression)
        VALUES[expression] = tuple(eval(expression, {"x": x}) for x in INPUTS)  # our own text, never a model's


def problems(world: str, split: str = "train", n: int = 1, seed: int = 0) -> list[Problem]:
    """Sample n problems of a world; the splits of world A share no (program, example) pair,
    or, of easy problems, no (program, example, first hidden input): there the prompt has been seen (ours).

    World B has 16 problems in all, so there "test" is the same 16 in turn: what is learned there is a strategy.
    """
    rng = random.Random(f"{world} {split} {seed}")
    if world == "cutoff":
        return [cutoff_problem(i % 16 + 1 if split == "test" else rng.randint(1, 16)) for i in range(n)]
    if world != "doctest":
        raise ValueError(f"unknown toy world {world!r}: expected one of {', '.join(WORLDS)}")
    drawn = (doctest_problem(rng) for _ in itertools.count())
    return list(itertools.islice((problem for problem, its_split in drawn if its_split == split), n))


def doctest_problem(rng: random.Random) -> tuple[Problem, str]:
    level = rng.choice(LEVELS)
    doc = rng.choice(list(PROGRAMS[level]))
    expression = rng.choice(PROGRAMS[level][doc])
    values = VALUES[expression]
    xs = rng.sample(INPUTS, 6)  # the first is the example in the prompt
    # A model of this size does not add what it has not seen added, so easy problems are held out by two inputs.
    key = f"{expression} | {xs[:2] if level == 'easy' else xs[0]}"
    split = "test" if zlib.crc32(key.encode()) % 5 == 0 else "train"
    prompt = f"# {doc}\n>>> f({xs[0]})\n{values[xs[0]]}\n"
    return Problem(id=f"doctest/{expression}/{'-'.join(map(str, xs))}", prompt=prompt,
                   tests=[[[x], values[x]] for x in xs], public_tests=[], entry_point="f", kind="functional",
                   difficulty=level, reference=DEF + expression), split


# One test, so the reward is all or nothing. It asks at the wrong input next to the guess: "too low" or "too high".
CUTOFF_TEST = """\
got = [f(x) for x in range(17)]
wrong = [x for x in range(17) if got[x] != (x < {k})]
x = min(wrong, key=lambda x: abs(2 * x + 1 - 2 * sum(got)), default=0)
assert f(x) == (x < {k})
"""


def cutoff_problem(k: int) -> Problem:
    return Problem(id=f"cutoff/{k}", prompt="# cut off\n", tests=[CUTOFF_TEST.format(k=k)], public_tests=[],
                   entry_point="f", kind="assert", reference=f"{DEF}x < {k}")


def feedback_on(problem: Problem, expression: str) -> str:
    """What the executor would say of one of our own programs, found without running anything; "" where it is right.

    The demonstrations need a hundred thousand of them; a test holds this against the executor.
    """
    if problem.kind == "assert":
        guess, k = int(expression.split()[-1]), int(problem.id.split("/")[1])
        x = guess - 1 if guess > k else guess
        return "" if guess == k else f"Test 1 failed: f({x}) returned {x < guess}, expected {x < k}"
    values = VALUES[expression]
    for number, ([x], expected) in enumerate(problem.tests, 1):
        if values[x] != expected:
            return f"Test {number} failed: f({x}) returned {values[x]}, expected {expected}"
    return ""


def demonstration(world: str, rng: random.Random) -> tuple[Messages, str]:
    """One (prompt, program) pair to imitate: a chat with 0 to 4 failed attempts, and the next attempt."""
    problem = problems(world, "train", 1, rng.getrandbits(48))[0]
    if world == "cutoff":
        return cutoff_demonstration(problem, rng)
    listed = PROGRAMS[problem.difficulty][problem.prompt.split("\n")[0].removeprefix("# ")]
    messages, failed = first_messages(problem), None
    for _ in range(rng.choices(range(5), [50, 30, 8, 6, 6])[0]):
        if failed is None or rng.random() < 0.5:
            failed = rng.choice([program for program in listed if feedback_on(problem, program)])
        messages = refinement_messages(messages, DEF + failed, feedback_on(problem, failed))
    right, repeat = (0.7, 0.0) if failed is None else (0.4, 0.5)
    luck = rng.random()
    if luck < right:
        return messages, problem.reference
    if luck < right + repeat:
        return messages, DEF + failed
    return messages, DEF + listed[min(int(rng.expovariate(0.25)), len(listed) - 1)]  # the popular ones come first


def cutoff_demonstration(problem: Problem, rng: random.Random) -> tuple[Messages, str]:
    """Mostly sensible guesses, then a uniformly random one among the cut-offs that the feedback leaves open."""
    messages, low, high = first_messages(problem), 1, 16
    for _ in range(rng.randrange(5)):
        guess = rng.randint(low, high) if rng.random() < 0.9 else rng.randint(1, 16)
        feedback = feedback_on(problem, f"x < {guess}")
        if not feedback:
            break  # found: the demonstration is this guess, one of those that were open
        messages = refinement_messages(messages, f"{DEF}x < {guess}", feedback)
        low, high = (max(low, guess + 1), high) if feedback.endswith("True") else (low, min(high, guess - 1))
    return messages, f"{DEF}x < {rng.randint(low, high)}"


# Each piece is one token, longest first; together they spell every prompt, feedback and program of both worlds.
PIECES = ["The program does not pass its tests.\n", "\nWrite the corrected program.", " failed: f(", ") returned ", ", expected ",
          "Test ", DEF, "# cut off\n", *(f"# {doc}\n" for doc in dict.fromkeys(doc for _, doc, *_ in FAMILIES)), ">>> f(",
          ")\n", "\n", "min(", "max(", " if ", " else ", ", ", " + ", " > ", " < ", "))", ")", "x", "True", "False", "-"]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<user>", "<model>"]
TEMPLATE = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
            "{% else %}<model>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<model>{% endif %}")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer for both worlds that spells every text exactly; what it does not know is <unk>."""
    words = SPECIAL + PIECES + [str(n) for n in range(100)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    # Longer pieces are tried first, so that none is taken apart by a shorter one that it begins with.
    pieces = map(re.escape, sorted(PIECES, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*pieces, r"\d+"])), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # the default joins words by spaces, and another program would be run
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
                                      eos_token="</s>", additional_special_tokens=["<user>", "<model>"])
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 of 2 layers and width 64: an ordinary HF model, only small."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, tie_word_embeddings=True, initializer_range=0.05,  # 0.02 learns slower
        max_position_embeddings=256, bos_token_id=2, eos_token_id=3, pad_token_id=0))


def base_model(world: str, seed: int, folder: Path, steps: int = 1500, batch: int = 64, rate: float = 2.5e-3) -> Path:
    """Warm-start a base model on sloppy demonstrations (about a minute), or find it in `folder`; returns its folder."""
    recipe = zlib.crc32(Path(__file__).read_bytes())  # any change of the recipe makes another base
    path = Path(folder) / f"base-{world}-seed{seed}-{steps}x{batch}-{recipe:08x}"
    if (path / "model.safetensors").exists():
        return path
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), seed)
    rng = random.Random(f"demonstrations {world} {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 50, 1 - 0.9 * s / steps))
    progress = tqdm(batches(tokenizer, world, rng, steps, batch), total=steps, desc=f"warm start ({world})", mininterval=1)
    for ids, labels in progress:
        loss = model(input_ids=ids, labels=labels).loss  # right padding needs no mask: nothing attends to what follows
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix_str(f"loss {loss.item():.2f}", refresh=False)
    unfinished = path.with_name(path.name + f".{random.getrandbits(32):08x}")  # renamed when whole: two runs may race
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if not path.exists():
        unfinished.rename(path)
    return path


def batches(tokenizer: Any, world: str, rng: random.Random, steps: int, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (input_ids, labels), each (batch, T), of demonstrations; prompts carry no loss."""
    buckets: dict[int, list] = {}  # by number of messages: little padding, and yet every kind of problem in each batch
    for messages, program in (demonstration(world, rng) for _ in range(min(24_000, steps * batch))):
        prompt = encode(tokenizer, messages)
        answer = tokenizer(program, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        row = torch.tensor(prompt + answer), torch.tensor([-100] * len(prompt) + answer)
        buckets.setdefault(len(messages), []).append(row)
    for _ in range(steps):
        (bucket,) = rng.choices(list(buckets.values()), list(map(len, buckets.values())))
        ids, labels = zip(*rng.choices(bucket, k=batch))
        yield pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)
