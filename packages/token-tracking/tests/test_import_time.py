"""`import token_tracking` is cheap for a trainer that installed nothing but the package."""

import json
import subprocess
import sys

ALLOWED = {"token_tracking", "numpy", "msgspec"}
LIMIT_MS = 150
TRIES = 5


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def test_it_loads_numpy_msgspec_and_the_standard_library():
    program = """
import sys
import numpy, msgspec
before = set(sys.modules)
import token_tracking
token_tracking.Sample, token_tracking.TokenLedger, token_tracking.GenerationRecord
import json
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = set(json.loads(run("-c", program).stdout))
    assert "token_tracking" in loaded
    foreign = loaded - ALLOWED - set(sys.stdlib_module_names)
    assert {name for name in foreign if not name.startswith("_")} == set()


def own_ms() -> float:
    """Milliseconds in the package's own modules: their self time, without what they import."""
    report = run("-X", "importtime", "-c", "import numpy, msgspec\nimport token_tracking").stderr
    lines = [line.removeprefix("import time:").split("|") for line in report.splitlines() if "|" in line]
    own = [int(cells[0]) for cells in lines if cells[2].strip().split(".")[0] == "token_tracking"]
    assert len(own) > 5
    return sum(own) / 1000


def test_its_own_modules_take_less_than_150_ms():
    """The best of a few tries: self times of one process, so that a busy computer does not decide."""
    best = own_ms()
    for _ in range(TRIES - 1):
        if best < LIMIT_MS:
            break
        best = min(best, own_ms())
    print(f"own modules: {best:.1f} ms")
    assert best < LIMIT_MS
