"""Tests of the fake cluster with several releases of the Kubernetes client: client_versions.py FOLDER.

The oldest one that is supported, one in between, and the newest that was tried; each in its own environment.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("29.0.0", "35.0.0", "37.0.0")
PACKAGE = ROOT / "packages" / "sandbox-k8s"
TESTS = ("test_fake_cluster_client.py", "test_fake_cluster_sandbox.py", "test_pod_api.py")
TOOLS = ("pytest>=8.4", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.130")
OPTIONS = (
    "-q",
    "-n",
    "2",
    "-p",
    "no:cacheprovider",
    "-c",
    str(ROOT / "pyproject.toml"),
    "--rootdir",
    str(ROOT),
)
SAY = "import importlib.metadata as m; print('kubernetes', m.version('kubernetes'), flush=True)"


def passes(release: str, folder: Path) -> bool:
    """Whether everything passes with that release."""
    python = folder / release / "bin" / "python"

    def run(*command: str) -> int:
        # Not from the repository: its lock names one release for all.
        return subprocess.run(command, cwd=folder).returncode

    made = ("uv", "venv", "-q", "--python", sys.executable, str(folder / release))
    install = ("uv", "pip", "install", "-q", "--python", str(python))
    if (
        run(*made)
        or run(*install, str(PACKAGE), f"kubernetes=={release}", *TOOLS)
        or run(str(python), "-c", SAY)
    ):
        return False
    tests = [str(PACKAGE / "tests" / name) for name in TESTS]
    return run(str(python), "-m", "pytest", *OPTIONS, *tests) == 0


def main(folder: Path) -> int:
    """Try each release; returns how many failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = [release for release in RELEASES if not passes(release, folder)]
    print(f"releases of the client: {len(RELEASES)}, failed: {failed or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
