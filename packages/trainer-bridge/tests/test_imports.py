"""What `import trainer_bridge` may load: a trainer process wants none of the rest."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trainer_bridge

SOURCE = Path(trainer_bridge.__file__).parent
HEAVY = ["torch", "rich", "transformers", "jinja2", "tokenizers", "anyio", "aiohttp", "ray", "kubernetes",
"agent_flow", "sandbox_k8s"]  # fmt: skip
RUN_WHAT_THEY_READ = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
"""Modules whose loading runs what a file says; ruff's banned-api has them too."""


def test_import_is_light() -> None:
    code = f"import sys, trainer_bridge; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_file_imports_zmq_and_none_imports_pickle() -> None:
    """sgl-project/sglang PR #21435, InternLM/lmdeploy#4804: pickle on an open port runs anyone's code."""
    importers: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                importers.setdefault(name.split(".")[0], set()).add(path.name)
    assert importers["zmq"] == {"zmq_transport.py", "zmq_sockets.py", "zmq_auth.py"}
    assert not importers.keys() & RUN_WHAT_THEY_READ
    assert importers["time"] == {"clock.py"}


def unsafe(source: str) -> list[str]:
    """Ways around an import statement: names of modules in calls, numpy's switch, pyzmq's shortcuts."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            found += [word for word in words if word.split(".")[0] in RUN_WHAT_THEY_READ]
            switched = [k for k in node.keywords if k.arg == "allow_pickle"]
            found += ["allow_pickle" for k in switched if getattr(k.value, "value", True) is not False]
        if isinstance(node, ast.Attribute) and node.attr in {"send_pyobj", "recv_pyobj"}:
            found.append(node.attr)
    return found


@pytest.mark.parametrize(
    "line",
    [
        'importlib.import_module("pickle").loads(frame)',
        'load("joblib", "joblib")',
        '__import__("_pickle")',
        "numpy.load(file, allow_pickle=True)",
        "numpy.load(file, allow_pickle=trusted)",
        "socket.recv_pyobj()",
    ],
)
def test_what_the_next_test_looks_for(line: str) -> None:
    assert unsafe(line)
    assert not unsafe("numpy.load(file, allow_pickle=False)")


def test_no_file_gets_at_pickle_by_another_way() -> None:
    """An import statement is not the only door: `import_module`, `allow_pickle=True`, `recv_pyobj`."""
    assert {
        path.name: unsafe(path.read_text()) for path in SOURCE.rglob("*.py") if unsafe(path.read_text())
    } == {}


def test_lint_bans_the_same_modules() -> None:
    root = Path(__file__).parents[3] / "pyproject.toml"
    if not root.exists():
        pytest.skip("the package is tested without its repository")
    banned = tomllib.loads(root.read_text())["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert banned.keys() >= RUN_WHAT_THEY_READ - {"_pickle"}
