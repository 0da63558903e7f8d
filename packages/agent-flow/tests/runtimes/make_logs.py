"""Makes the logs of `runners/`: `python make_logs.py [NAME ...]`, as root; swebench 5 and runners on PATH.

A log is the output of the eval script that swebench 5 makes of a row, run in `/testbed` as in SWE-bench's
images: the repository of `NAME.toml` at its base commit (`NAME.base.log`), with the reference patch
(`NAME.solved.log`), and with a patch that cannot even be loaded (`NAME.broken.log`).

    uv pip install swebench==5.0.2 pytest django
    npm install jest mocha vitest          # NODE_MODULES says where
    apt-get install golang-go ruby-rspec phpunit cargo
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

RUNNERS = Path(__file__).parent / "runners"
TESTBED = Path("/testbed")
STATES = ("base", "solved", "broken")


def row_of(name: str, runner: dict) -> dict:
    """The runner's repository as a row in swebench 5.x form."""
    tests = "\n".join(
        f"mkdir -p {Path(path).parent}\ncat > {path} <<'EOF_TEST'\n{text}EOF_TEST"
        for path, text in runner["tests"].items()
    )
    script = (
        "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n"
        f"{tests}\n: '>>>>> Start Test Output'\n{runner['test_command']}\n: '>>>>> End Test Output'\n"
        f"rm -rf {' '.join(runner['tests'])}\n"
    )
    return {
        "instance_id": f"calc__{name}-1",
        "repo": f"calc/{name}",
        "base_commit": "0" * 40,
        "problem_statement": "double(5) is 7",
        "version": "1.0",
        "image": f"swebench/calc.{name}:latest",
        "eval_script": script,
        **{key: runner[key] for key in ("log_parser", "eval_type", "FAIL_TO_PASS", "PASS_TO_PASS")},
    }


def log_of(name: str, state: str, folder: Path) -> bytes:
    """What the eval script writes on the repository in this state, laid out in a new folder."""
    from swebench.harness.utils import make_test_spec

    runner = tomllib.loads((RUNNERS / f"{name}.toml").read_text())
    script = make_test_spec(row_of(name, runner)).eval_script.replace(str(TESTBED), str(folder))
    folder.mkdir()
    source = {runner["source"]["path"]: runner["source"][state]}
    for path, text in {**runner["files"], **source}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    if os.environ.get("NODE_MODULES"):
        subprocess.run(["cp", "-a", os.environ["NODE_MODULES"], folder / "node_modules"], check=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
        env={**os.environ, "PATH": path, "CI": "1", "TERM": "dumb", "NO_COLOR": "1"},
    )
    return done.stdout


def make(name: str) -> None:
    if TESTBED.exists():
        sys.exit(f"{TESTBED} is there already")
    for state in STATES:
        try:
            log = log_of(name, state, TESTBED)
        finally:
            shutil.rmtree(TESTBED)
        for prefix in (sys.prefix, sys.base_prefix):  # without this machine's own paths
            log = log.replace(prefix.encode(), b"/usr")
        (RUNNERS / f"{name}.{state}.log").write_bytes(log)
        print(name, state, len(log))


if __name__ == "__main__":
    for each in sys.argv[1:] or sorted(path.stem for path in RUNNERS.glob("*.toml")):
        make(each)
