"""What an import costs: heavy libraries load only when their feature is used (design section 3)."""

import subprocess
import sys

import pytest

HEAVY = {
    "torch", "ray", "kubernetes", "swerex", "minisweagent", "swebench", "litellm", "datasets", "transformers",
    "sglang", "openai",
}  # fmt: skip

CASES = {
    "token_tracking": HEAVY | {"tokenizers", "jinja2", "zmq", "aiohttp", "rich"},
    "sandbox_k8s": HEAVY | {"numpy", "zmq", "tokenizers", "rich"},
    "trainer_bridge": HEAVY | {"tokenizers", "jinja2", "aiohttp", "rich"},
    "agent_flow": HEAVY | {"zmq", "aiohttp", "sandbox_k8s", "trainer_bridge", "tokenizers"},
    "agent_flow.cli": HEAVY | {"zmq", "aiohttp", "sandbox_k8s", "trainer_bridge", "tokenizers"},
}


@pytest.mark.parametrize("module", CASES)
def test_an_import_loads_nothing_heavy(module):
    code = f"import sys, {module}; print(*sorted({CASES[module]!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ["token_tracking", "sandbox_k8s", "trainer_bridge", "agent_flow"])
def test_all_is_what_is_exported(name):
    code = (
        f"import {name} as m; missing = [n for n in m.__all__ if not hasattr(m, n)]; "
        "assert not missing, missing; assert len(set(m.__all__)) == len(m.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
