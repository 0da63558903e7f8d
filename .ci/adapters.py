"""Runs the adapter tests against the trainers' real classes, in an environment apart: adapters.py FOLDER.

The trainers are pinned to what the adapters were written against. They come without their own requirements
where those would bring a GPU stack, and with what their imports need instead.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"  # by pip: its index has the CPU build
WITH_REQUIREMENTS = [
    "trl==1.16.0", "tinker==0.38.0", "datasets==5.2.0", "pyarrow==26.0.1", "transformers==5.24.0",
    "ray==2.60.0", "codetiming", "omegaconf", "pandas", "pyvers", "cloudpickle", "msgspec", "xxhash", "pyzmq",
    "pytest", "pytest-timeout",
]  # fmt: skip
ALONE = ["verl==0.9.1", "tensordict==0.10.0"]
OWN = ["packages/token-tracking", "packages/trainer-bridge"]
OPTIONS = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "ignore", "--timeout=100"]


def main(folder: Path) -> int:
    """Make the environment in `folder` and run the tests; returns pytest's exit code."""

    def run(*command: str) -> None:
        # Not from the repository: uv would take its word for it that trl has no requirements.
        subprocess.run(command, check=True, cwd=folder.parent)

    python = folder / "bin" / "python"
    run("uv", "venv", "-q", "--seed", "--python", sys.executable, str(folder))
    run(str(python), "-m", "pip", "-q", "install", "--no-compile", TORCH)
    install = ("uv", "pip", "install", "-q", "--python", str(python))
    held = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    )
    run(*install, f"torch=={held.stdout.strip()}", *WITH_REQUIREMENTS)
    run(*install, "--no-deps", *ALONE)
    run(*install, "--no-deps", *(str(REPOSITORY / path) for path in OWN))
    test = REPOSITORY / "packages/trainer-bridge/tests/adapters/real.py"
    config = folder / "pytest.ini"
    config.write_text("[pytest]\n")
    command = [python, "-m", "pytest", "-c", config, "--rootdir", test.parent, *OPTIONS, test]
    return subprocess.run(command, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
