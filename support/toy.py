"""The embedded default: two small worlds of problems, and a tiny model that can learn in them.

World "doctest": write the one-line function behind a vague docstring and one example. Several
programs fit the example, so a first attempt is a guess, and its feedback is new information.
World "cutoff": write `x < k`, but the prompt does not tell k. Every first guess is right once in
16, so its own reward teaches nothing. Only the feedback that it draws is of use, at a later turn.

In: the name of a world and a seed. Out: problems, and the folder of a model of 120,000 parameters.
It is trained here, in one to two minutes, on sloppy demonstrations. Needs torch, transformers,
tokenizers, tree.py, support/problems.py, run.py and sampling.py. Shown by: python murphy.py
"""

import fcntl
import random
import re
import time
import zlib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from support.problems import Problem
from support.run import load, save
from support.sampling import encode
from tree import Messages, first_messages, refinement_messages

WORLDS = ("doctest", "cutoff")
DEF = "def f(x): return "
INPUTS = range(16)
CONDITIONS = [f"x {sign} {k}" for sign, k in product("><", range(3, 13))]
# World "doctest": level -> docstring -> the programs that it may mean, the popular ones first.
PROGRAMS = {
    "easy": {
        "add to x": [f"x + {k}" for k in range(1, 6)],
        "constant": [f"{k}" for k in range(16)],
    },
    "medium": {
        "clamp x": [f"{name}(x, {k})" for name, k in product(("min", "max"), range(3, 13))],
        "mask x": [f"x if {test} else 0" for test in CONDITIONS],
    },
    "hard": {
        "clamp x twice": [f"max({a}, min(x, {b}))" for a, b in product(range(2, 8), range(8, 14))],
        "replace x": [f"x if {test} else {c}" for test, c in product(CONDITIONS, range(1, 6))],
    },
}


@cache
def values(expression: str) -> tuple[int, ...]:
    """The values of one of our own expressions at all INPUTS; never call it with a model's text."""
    return tuple(eval(expression, {"x": x}) for x in INPUTS)


def problems(world: str, split: str = "train", n: int = 1, seed: int | str = 0) -> list[Problem]:
    """Draw n problems of a world (ours). ValueError: no such world or split.

    In "doctest" a program with its example (easy: and its first hidden input) is in one split only.
    "cutoff" has 16 problems in all, and "test" is these in turn: it asks for a strategy.
    """
    if world not in WORLDS or split not in ("train", "test"):
        raise ValueError(f"no split {split!r} of a toy world {world!r}: see WORLDS; train, test")
    rng = random.Random(f"{world} {split} {seed}")
    if world == "doctest":
        return [doctest_problem(rng, split) for _ in range(n)]
    if split == "test":
        return [cutoff_problem(i % 16 + 1) for i in range(n)]
    return [cutoff_problem(rng.randint(1, 16)) for _ in range(n)]


def doctest_problem(rng: random.Random, split: str) -> Problem:
    """A random problem of world "doctest" that belongs to a split."""
    its_split = ""
    while its_split != split:
        level = rng.choice(list(PROGRAMS))
        docstring = rng.choice(list(PROGRAMS[level]))
        program = rng.choice(PROGRAMS[level][docstring])
        xs = rng.sample(INPUTS, 6)  # the first is the example in the prompt
        # The tiny model cannot do additions that it never saw, and easy problems are additions. So
        # for these the first hidden input decides, too: a prompt may then be in both splits.
        decides = xs[:2] if level == "easy" else xs[0]
        is_test = zlib.crc32(f"{program} | {decides}".encode()) % 5 == 0
        its_split = "test" if is_test else "train"

    tests = [[[x], values(program)[x]] for x in xs]
    prompt = f"# {docstring}\n>>> f({xs[0]})\n{tests[0][1]}\n"
    name = f"doctest/{program}/{'-'.join(map(str, xs))}"
    return Problem(name, prompt, tests, [], "f", "functional", level, DEF + program)


# One test, so the reward is 0 or 1. `x < guess` is true for `guess` inputs: sum(got) is the guess.
# The inputs between guess and k come out wrong. The test takes the one next to the guess: that is
# guess if it is too low (expected True), else guess - 1 (expected False). `min` compares the
# distances of x + 1/2 from the guess, times 2 to have whole numbers.
CUTOFF_TEST = """\
got = [f(x) for x in range(17)]
wrong = [x for x in range(17) if got[x] != (x < {k})]
x = min(wrong, key=lambda x: abs(2 * x + 1 - 2 * sum(got)), default=0)
assert f(x) == (x < {k})
"""


def cutoff_problem(k: int) -> Problem:
    """The problem of world "cutoff" that `x < k` solves."""
    test, answer = CUTOFF_TEST.format(k=k), f"{DEF}x < {k}"
    return Problem(f"cutoff/{k}", "# cut off\n", [test], entry_point="f", reference=answer)


def feedback_on(problem: Problem, expression: str) -> str:
    """What the executor would say of one of our own programs, without running it; "" if right."""
    if problem.kind == "assert":
        guess, k = int(expression.split()[-1]), int(problem.id.split("/")[1])
        x = guess - 1 if guess > k else guess
        calls = [(x, x < guess, x < k)]
    else:
        calls = [(x, values(expression)[x], expected) for [x], expected in problem.tests]
    for number, (x, value, expected) in enumerate(calls, 1):
        if value != expected:
            return f"Test {number} failed: f({x}) returned {value}, expected {expected}"
    return ""


def doctest_demonstration(rng: random.Random) -> tuple[Messages, str]:
    """A chat with 0 to 4 failed attempts, and the program that comes next: what to imitate.

    Half of the chats have failed attempts. Half of the further ones repeat the one before. As a
    first attempt the program to imitate is right in 70% of the cases, as a later one in 40%; there
    50% repeat the failed attempt, as small real models do. Else it is a popular program, one from
    the first part of the list.
    """
    (problem,) = problems("doctest", "train", 1, rng.getrandbits(48))
    docstring = problem.prompt.split("\n")[0].removeprefix("# ")
    listed = PROGRAMS[problem.difficulty][docstring]
    messages, failed = first_messages(problem), ""
    for _ in range(rng.choices(range(5), [50, 30, 8, 6, 6])[0]):
        if not failed or rng.random() < 0.5:
            failed = rng.choice([text for text in listed if feedback_on(problem, text)])
        messages = refinement_messages(messages, DEF + failed, feedback_on(problem, failed))

    right, repeat = (0.4, 0.5) if failed else (0.7, 0.0)
    luck = rng.random()
    if luck < right:
        return messages, problem.reference
    if luck < right + repeat:
        return messages, DEF + failed
    return messages, DEF + listed[min(int(rng.expovariate(0.25)), len(listed) - 1)]


def cutoff_demonstration(rng: random.Random) -> tuple[Messages, str]:
    """A chat with mostly sensible guesses, then any one of those that the feedback leaves open."""
    (problem,) = problems("cutoff", "train", 1, rng.getrandbits(48))
    messages, low, high = first_messages(problem), 1, 16
    for _ in range(rng.randrange(5)):
        guess = rng.randint(low, high) if rng.random() < 0.9 else rng.randint(1, 16)
        feedback = feedback_on(problem, f"x < {guess}")
        if not feedback:
            break  # solved
        messages = refinement_messages(messages, f"{DEF}x < {guess}", feedback)
        if feedback.endswith("True"):  # expected True: k is larger
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return messages, f"{DEF}x < {rng.randint(low, high)}"


DEMONSTRATION = {"doctest": doctest_demonstration, "cutoff": cutoff_demonstration}
# Each piece is one token. Together they spell every prompt, feedback and program of both worlds.
PIECES = [
    "The program does not pass its tests.\n", "\nWrite the corrected program.", " failed: f(",
    ") returned ", ", expected ", "Test ", DEF, "# cut off\n", "# add to x\n", "# constant\n",
    "# clamp x\n", "# mask x\n", "# clamp x twice\n", "# replace x\n", ">>> f(", ")\n", "\n",
    "min(", "max(", " if ", " else ", ", ", " + ", " > ", " < ", "))", ")", "x", "True", "False",
    "-",
]  # fmt: skip
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
ROLES = ["<user>", "<model>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% else %}<model>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that spells every text of both worlds exactly; anything else becomes <unk>."""
    words = [*SPECIAL.values(), *ROLES, *PIECES, *map(str, range(100))]  # in the order of their ids
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = sorted(PIECES, key=len, reverse=True)  # "# clamp x\n" before "\n"
    pattern = "|".join([re.escape(piece) for piece in longest_first] + [r"\d+"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # the default puts spaces between words
    special = {**SPECIAL, "additional_special_tokens": ROLES}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


def make_model(vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of 2 layers and width 64: an ordinary Hugging Face model, only small."""
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    tokens = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    weights = {"tie_word_embeddings": True, "initializer_range": 0.05}  # with 0.02 it learns slower
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **tokens, **weights))


RECIPE = 1  # raise it when this file makes another base model than before
DEMONSTRATIONS = 24_000
RATE = 2.5e-3
SAVE_EVERY = 100  # steps


def base_model(world: str, seed: int, folder: Path, steps: int = 1500, batch: int = 64) -> Path:
    """The folder of a warm-started model; it is made if `folder` does not hold it yet (ours).

    A killed warm start goes on from its checkpoint. On one machine the seed decides every bit.
    """
    recipe = repr((RECIPE, DEMONSTRATIONS, RATE, PROGRAMS, CUTOFF_TEST, PIECES, TEMPLATE))
    name = f"base-{world}-seed{seed}-{steps}x{batch}-{zlib.crc32(recipe.encode()):08x}"
    path, unfinished = Path(folder) / name, Path(folder) / f"{name}.unfinished"
    if path.exists():
        return path

    unfinished.mkdir(parents=True, exist_ok=True)
    with open(unfinished / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # wait for a run that makes the same model
        if not path.exists():
            print(f"making a tiny model for world {world!r}: {path}", flush=True)
            tokenizer = make_tokenizer()
            model = make_model(len(tokenizer), seed)
            rng = random.Random(f"demonstrations {world} {seed}")
            data = tokenized(tokenizer, world, rng, min(DEMONSTRATIONS, steps * batch))
            warm_start(model, data, rng, steps, batch, unfinished)
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            unfinished.rename(path)  # a folder of this name is whole
    return path


def tokenized(tokenizer: Any, world: str, rng: random.Random, count: int) -> list[list[tuple]]:
    """Demonstrations as (input_ids, labels). One list holds chats with equally many messages."""
    by_length: dict[int, list[tuple]] = {}
    for number in range(count):
        if number % 4000 == 2000:  # the first line soon after the start
            print(f"warm start: {number} of {count} demonstrations written", flush=True)
        messages, program = DEMONSTRATION[world](rng)
        prompt = encode(tokenizer, messages)
        answer = tokenizer.encode(program + tokenizer.eos_token)
        labels = [-100] * len(prompt) + answer  # -100: no loss
        row = torch.tensor(prompt + answer), torch.tensor(labels)
        by_length.setdefault(len(messages), []).append(row)
    return list(by_length.values())


def warm_start(
    model: Any, data: list[list[tuple]], rng: random.Random, steps: int, batch: int, folder: Path
) -> None:
    """Teach the model to imitate: one AdamW step on the cross-entropy of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    state = load(folder) or {"step": 0}
    first = state["step"]
    if first:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    threads, start = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)  # so the weights do not depend on the number of cores
    for step in range(1, steps + 1):
        (rows,) = rng.choices(data, [len(rows) for rows in data])
        rows = rng.choices(rows, k=batch)  # of one list: little padding
        if step <= first:  # done before it was killed
            continue
        ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
        labels = pad_sequence([labels for _, labels in rows], True, padding_value=-100)
        rise, fall = step / 50, 1 - 0.9 * (step - 1) / steps
        optimizer.param_groups[0]["lr"] = RATE * min(rise, fall)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss  # causal: no mask for right padding
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(folder, {"step": step, **weights})
            left = (time.perf_counter() - start) / (step - first) * (steps - step)
            news = f"loss {loss.item():.2f}, {left:.0f} seconds left"
            print(f"warm start: step {step} of {steps}, {news}", flush=True)
    torch.set_num_threads(threads)
