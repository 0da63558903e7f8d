"""What `import trainer_bridge` may load: a trainer process wants none of the rest."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import trainer_bridge

SOURCE = Path(trainer_bridge.__file__).parent
HEAVY = ["torch", "rich", "transformers", "jinja2", "tokenizers", "anyio", "aiohttp", "ray", "kubernetes",
"agent_flow", "sandbox_k8s"]  # fmt: skip


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
    assert not importers.keys() & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert importers["time"] == {"clock.py"}
