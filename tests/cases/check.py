"""Hold the verdicts of the cases in this folder against pytest.

    python tests/cases/check.py [FILE ...]

A case has a `test`, a `solution`, and programs that are `right` and `wrong`. A test that imports
nothing from it begins with `from solution import *`. Programs run unconfined here: check only cases
that you have read.
"""

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

import pytest

PASSED = 77  # not 0, with which a program may leave


def passes(test: str, program: str) -> bool:
    """Whether the program passes the test under pytest, in a forked child and a new folder."""
    child = os.fork()
    if not child:
        code = 1
        resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
        try:
            code = PASSED if judged(test, program) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == PASSED


def judged(test: str, program: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        Path("solution.py").write_text(program, encoding="utf-8")
        if "solution" not in test:
            test = "from solution import *\n" + test
        if "def test" not in test:
            test += "\ndef test_nothing(): pass"
        Path("test_it.py").write_text(test, encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return pytest.main(["-q", "-p", "no:cacheprovider", "test_it.py"]) == 0


def main(paths: list[str]) -> int:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take a second each time
    faults = 0
    for path in paths or sorted(Path(__file__).parent.glob("*.jsonl")):
        cases = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
        for case in (case for case in cases if "solution" in case):  # some files have others
            for program in [case["solution"], *case["right"]]:
                if not passes(case["test"], program):
                    faults += 1
                    print(f"{case['name']}: pytest fails this right program\n{program}")
            for program in case["wrong"]:
                if passes(case["test"], program):
                    faults += 1
                    print(f"{case['name']}: pytest passes this wrong program\n{program}")
    print(f"{faults} verdicts are not those of pytest")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
