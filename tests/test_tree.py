"""tree.py: what is sampled, executed and expanded; what a prompt holds; which code is found."""

import ast
import json
import re
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import executor
import propagate
import tree as T
from tree import Completion, Node, build_trees, draw, extract_code, groups, walk

CASES = Path(__file__).parent / "cases"
ANSWERS = [json.loads(line) for line in (CASES / "extraction.jsonl").open(encoding="utf-8")]
PARTS = json.loads((CASES / "parts.json").read_text(encoding="utf-8"))  # of which answers are made


def problem(name="p"):
    return SimpleNamespace(id=name, prompt="write f", entry_point="f")


def result(reward, feedback="it failed", status="failed"):
    passed = reward == 1
    return SimpleNamespace(reward=reward, status=status, feedback=feedback, public_passed=passed)


class Script:
    """A policy and an executor that follow a script. The n-th completion is program number n."""

    def __init__(self, rewards):
        self.rewards, self.log, self.count = rewards, [], 0

    def sample(self, prompts, n):
        self.log.append(("sample", len(prompts), n))
        answers = []
        for _ in prompts:
            numbers = range(self.count, self.count + n)
            answers.append([Completion(f"def f(): return {i}", [1], [9, i]) for i in numbers])
            self.count += n
        return answers

    def execute(self, jobs):
        self.log.append(("execute", len(jobs)))
        numbers = [int(code.split()[-1]) for _, code in jobs]
        return [result(self.rewards[i], f"feedback on {i}") for i in numbers]


def grow(script, names, turns, group_size):
    problems = [problem(name) for name in names]
    return build_trees(problems, script.sample, script.execute, turns, group_size)


def two(prompts, n):
    """A policy that always gives a program and, in a thought that stays open, another."""
    pair = [Completion("def f(): return 0"), Completion("def f(): return 1", thinking=True)]
    return [pair for _ in prompts]


def numbers(nodes):
    return [int(node.code.split()[-1]) for node in nodes]


def test_a_turn_is_one_call_of_each_for_all_problems_and_solved_nodes_get_no_children():
    script = Script([0, 1, 0.5, 1] + [0, 0, 1, 0] + [0] * 6)
    trees = grow(script, "ab", turns=3, group_size=2)
    # Turn 1: 0 1 | 2 3. The failures 0 and 2 get 4 5 | 6 7. The failures 4, 5 and 7 get 8 to 13.
    sampled = [("sample", 2, 2), ("sample", 2, 2), ("sample", 3, 2)]  # prompts, answers to each
    assert script.log[0::2] == sampled
    assert script.log[1::2] == [("execute", 4), ("execute", 4), ("execute", 6)]
    assert numbers(walk(trees[0])) == [0, 1, 4, 5, 8, 9, 10, 11]
    assert [numbers(group) for group in groups(trees[1])] == [[2, 3], [6, 7], [12, 13]]


def test_identical_programs_for_a_problem_run_only_once_and_a_thought_is_no_program():
    ran = []

    def execute(jobs):
        ran.extend((problem.id, code) for problem, code in jobs)
        return [result(0.5, f"on {code}") for _, code in jobs]

    trees = build_trees([problem("a"), problem("b")], two, execute, turns=2, group_size=2)
    program = "def f(): return 0"
    assert sorted(ran) == [("a", ""), ("a", program), ("b", ""), ("b", program)]
    for node in [*walk(trees[0]), *walk(trees[1])]:
        assert node.reward == 0.5 and node.feedback == f"on {node.code}"


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.randoms())
def test_the_shape_of_any_tree(n_problems, turns, group_size, rng):  # D42
    script = Script([rng.choice([0.0, 0.5, 1.0]) for _ in range(200)])
    trees = grow(script, "abc"[:n_problems], turns, group_size)
    for tree in trees:
        assert len(tree.children) == group_size
        nodes = list(walk(tree))
        members = sum(groups(tree), [])
        assert sorted(map(id, members)) == sorted(map(id, nodes))  # each in one group, once
        for node in tree.children:
            assert node.prompt == [{"role": "user", "content": "write f"}]
        for node in nodes:
            (number,) = numbers([node])
            assert (node.prompt_ids, node.completion_ids) == ([1], [9, number])
            assert (node.reward, node.status) == (script.rewards[number], "failed")
            assert node.solved == node.public_passed == (node.reward == 1)
            assert node.feedback == f"feedback on {number}"
            assert len(node.children) == (0 if node.solved or node.turn == turns else group_size)
            for child in node.children:  # its prompt: all that its parent saw, wrote and was told
                *before, attempt, reply = child.prompt
                assert child.turn == node.turn + 1
                assert before == node.prompt
                assert attempt == {"role": "assistant", "content": node.text}
                assert reply["role"] == "user"
                assert reply["content"].split("\n").count(node.feedback) == 1
    assert sum(len(list(walk(tree))) for tree in trees) == script.count


def test_a_prompt_that_is_too_long_leaves_its_node_without_children_and_says_so():
    script = Script([0] * 20)

    def sample(prompts, n):
        answers = script.sample(prompts, n)
        return [a if len(p) == 1 else None for p, a in zip(prompts, answers, strict=True)]

    (tree,) = build_trees([problem()], sample, script.execute, turns=3, group_size=2)
    assert [node.unexpanded for node in walk(tree)] == ["too long", "too long"]
    assert draw(tree).count("not expanded: too long") == 2
    (tree,) = build_trees([problem()], lambda *_: [None], script.execute, 3, 2)
    assert tree.unexpanded == "too long" and not tree.children


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"sample": lambda prompts, n: []}, "sample() got 1 prompts and gave 0"),
        ({"sample": lambda prompts, n: [["x"]]}, "sample() got 2 completions to make and gave 1"),
        ({"execute": lambda jobs: [result(0)]}, "execute() got 2 jobs and gave 1"),
        ({"execute": lambda jobs: 2 * [result(0, "no", "unscorable")]}, "'p' cannot be scored: no"),
        ({"turns": 0}, "turns (0) and group_size (2) must be at least 1"),
        ({"group_size": 0}, "turns (1) and group_size (0) must be at least 1"),
    ],
)
def test_a_wrong_number_or_a_problem_without_a_score_is_named(wrong, sentence):
    arguments = {"sample": two, "execute": None, "turns": 1, "group_size": 2, **wrong}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build_trees([problem()], **arguments)


def behaves(case, code):
    """Whether a program does what the case asks for."""
    if "code" in case:
        return code == case["code"]
    kind, tests = "stdin", [[case.get("stdin"), case.get("stdout")]]
    if "calls" in case:
        kind, name = "assert", case["entry_point"].replace("Solution.", "Solution().")
        tests = [f"assert {name}(*{arguments}) == {value!r}" for arguments, value in case["calls"]]
    asked = SimpleNamespace(kind=kind, tests=tests, entry_point="")
    return executor.run(asked, code).reward == 1


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: case["name"])
def test_an_answer_is_read_as_a_careful_human_reads_it(case):  # D37, D38, D39
    code = extract_code(case["answer"], case["entry_point"], case.get("thinking", False))
    assert behaves(case, code)


def test_a_warning_of_the_parser_is_neither_shown_nor_an_error(recwarn):
    program = "def f():\n    return '\\d'  # <|endoftext|>"
    assert extract_code(f"```python\n{program}\n```", "f") == program and not recwarn


READERS = ["n = int(input())\nprint(n)", "import sys\nprint(len(sys.stdin.read()))"]


@st.composite
def answers(draw):
    """An answer, the name that is asked for, and the program in the answer."""

    def part(name):
        return draw(st.sampled_from(PARTS[name]))

    names = draw(st.sampled_from(["f", "hf", "ghf", ""]))
    functions = [f"def {name}(x):\n" + textwrap.indent(part("bodies"), "    ") for name in names]
    program = "\n\n\n".join(functions) or draw(st.sampled_from(READERS))

    opener, tag = part("openers"), part("tags")
    mark = draw(st.sampled_from(["```", "~~~", "````", "`````"]))
    inside = re.sub(r"[^> \t]", " ", opener)  # what each line begins with
    if opener[:1] in ("*", "<", "\u200b"):
        inside = ""
    lines = "".join(f"\n{inside}{line}" for line in program.split("\n"))
    end = draw(st.sampled_from([f"\n{inside}", ""])) + mark
    end += draw(st.sampled_from(["", " Done.", "</answer>"]))
    answer = part("before").replace("TAG", tag) + opener + mark + tag + lines + end + part("behind")
    return answer.replace("\n", draw(st.sampled_from(["\n", "\r\n"]))), names[-1:], program


@settings(max_examples=150)
@given(answers())
def test_a_program_is_found_again_in_any_answer(case):
    answer, entry_point, program = case
    found = extract_code(answer, entry_point)
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(program))


@settings(max_examples=60)
@given(st.text() | st.lists(st.sampled_from(PARTS["pieces"])).map("".join), st.booleans())
def test_any_text_gives_a_program_or_nothing_but_no_blank_and_no_exception(text, thinking):
    for name in ("f", "", "Solution.f"):
        code = extract_code(text, name, thinking)
        assert code == "" or not code.isspace()


@pytest.mark.parametrize("piece", PARTS["repeated"])
def test_a_megabyte_of_anything_takes_less_than_a_second_of_processor_time(piece):
    for before in ("", "```python\n"):
        start = time.process_time()
        extract_code(before + piece * (1_000_000 // len(piece)), "f")
        assert time.process_time() - start < 1


def test_nothing_long_before_or_behind_a_program_hides_it():
    program = "def f(): return 1"
    last = f"```python\n{program}\n```"
    for before, behind in [
        ("\n" * 400_000, "\n" * 400_000),
        ("x = 1\n" * 100_000, ""),
        ("```\nO(n)\n```\n" * 100, ""),  # far more fences than are read
        ("Sure. <think>" + "```\nf = f\n" * 100 + "</think>", ""),
    ]:
        assert extract_code(before + last + behind, "f") == program


def test_the_demonstration_says_what_executor_and_propagate_compute():
    tree = T.demonstrate()
    shown = draw(tree)
    doubling = SimpleNamespace(kind="functional", tests=[[[2], 4], [[3], 6]], entry_point="f")
    for node in walk(tree):
        said = executor.run(doubling, node.code, feedback_tests=1)
        assert (node.reward, node.feedback) == (said.reward, said.feedback)
        assert node.solved == (said.status == "passed")
    propagate.propagate(tree)
    for group in groups(tree):
        advantages = propagate.group_advantages([node.credit for node in group])
        assert [node.advantage for node in group] == pytest.approx(advantages, abs=0.001)
    assert draw(tree) == shown


def test_a_drawing_shows_the_numbers_the_feedback_and_what_was_left_out():
    repair = Node(2, code="\x1b[2J\ud800 é", reward=1.0, credit=1.0, advantage=1.41)
    b = Node(1, code="def f(): return 0\n# more", credit=1.0, advantage=0.71, feedback="got 0")
    b.children = [repair]
    a = Node(1, code="", reward=0.5, credit=0.5, advantage=-1.41, kept=False, truncated=True)
    tree = Node(0, problem=problem("x"), children=[a, b])
    assert draw(tree).split("\n") == [
        "turn  reward  credit  advantage   problem: x",
        "   1    0.50    0.50      -1.41   |-- (no code)  (truncated, pruned)",
        "   1    0.00    1.00      +0.71   `-- def f(): return 0  (and 1 lines)",
        "                                        got 0",
        "   2    1.00    1.00      +1.41       `-- \\x1b[2J\\ud800 é",  # no escape code is printed
    ]
    narrow = draw(tree, width=1)
    assert narrow.split("\n")[-1].strip() == "`-- and 1 more" and "(no code)" not in narrow


@pytest.mark.parametrize("ids", [True, False])
def test_a_tree_is_plain_json_and_comes_back(ids):
    (tree,) = grow(Script([0, 1, 0.5, 0]), "a", turns=2, group_size=2)
    tree.children[0].text = "\ud800 \x00"
    plain = json.loads(json.dumps(T.to_dict(tree, ids)))
    assert plain["children"][0]["tokens"] == 2
    back = T.from_dict(plain)
    assert draw(back) == draw(tree) and back.problem.id == "a"
    for node, old in zip(walk(back), walk(tree), strict=True):
        assert node.completion_ids == (old.completion_ids if ids else [])
        assert (node.text, node.prompt, node.reward) == (old.text, old.prompt, old.reward)
