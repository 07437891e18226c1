"""A rollout tree with another engine: tree.py needs two functions, `sample` and `execute`.

`sample` is written for vLLM (from its documentation; it was not run here). Where vLLM is not
installed, a stand-in gives scripted answers, so that the file always runs.

    python examples/with_another_engine.py
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parent.parent))  # where tree.py is

import executor
from propagate import group_advantages, propagate
from support.problems import Problem
from tree import Completion, Messages, build_trees, draw, groups

try:
    from vllm import LLM, SamplingParams
except ImportError:

    def SamplingParams(**settings):
        return SimpleNamespace(**settings)

    SCRIPT = {  # a failed attempt: what is tried after it
        "": ["x + 4", "x + 1"],
        "x + 4": ["x + 4", "x + 5"],
        "x + 1": ["x * 2", "x * 3"],
    }

    class LLM:
        """A stand-in that looks its answers up in SCRIPT."""

        def __init__(self, name: str) -> None:
            print(f"vLLM is not installed: scripted answers in place of {name}\n")

        def chat(self, prompts: list[Messages], *_, **__) -> list:
            return [self.answer(prompt) for prompt in prompts]

        def answer(self, prompt: Messages) -> SimpleNamespace:
            attempts = [m["content"] for m in prompt if m["role"] == "assistant"]
            last = attempts[-1].removeprefix("def f(x): return ") if attempts else ""
            outputs = []
            for formula in SCRIPT[last]:
                text = f"def f(x): return {formula}"
                outputs.append(SimpleNamespace(text=text, token_ids=[0], finish_reason="stop"))
            return SimpleNamespace(prompt_token_ids=[0], outputs=outputs)


MODEL = "Qwen/Qwen3-0.6B"
TURNS, GROUP_SIZE = 2, 2


def make_sample(engine: LLM):
    """A `sample` for build_trees: for each prompt a list of n completions."""

    def sample(prompts: list[Messages], n: int) -> list[list[Completion]]:
        # top_k and top_p are switched off: training scores the whole distribution.
        settings = SamplingParams(n=n, temperature=1.0, top_k=-1, top_p=1.0, max_tokens=1024)
        thinking = {"enable_thinking": False}
        answers = engine.chat(prompts, settings, chat_template_kwargs=thinking)
        return [[completion(answer, output) for output in answer.outputs] for answer in answers]

    return sample


def completion(answer, output) -> Completion:
    """The ids are those that were sampled. Text is never tokenised again."""
    prompt_ids, ids = list(answer.prompt_token_ids), list(output.token_ids)
    return Completion(output.text, prompt_ids, ids, truncated=output.finish_reason == "length")


def main() -> None:
    problem = Problem(
        id="f(x) is three times x",
        prompt="Write f(x), which is three times x.",
        tests=["assert f(2) == 6", "assert f(0) == 0"],
        entry_point="f",
    )
    sample = make_sample(LLM(MODEL))
    (tree,) = build_trees([problem], sample, executor.run_many, TURNS, GROUP_SIZE)

    propagate(tree, "mars")
    for group in groups(tree):
        advantages = group_advantages([node.credit for node in group])
        for node, advantage in zip(group, advantages, strict=True):
            node.advantage = advantage
    print(draw(tree))


if __name__ == "__main__":
    main()
