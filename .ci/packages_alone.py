"""Builds each package as a wheel, installs it alone into an empty environment, and runs its own tests there.

usage: packages_alone.py FOLDER
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "ray", "kubernetes", "swerex", "minisweagent", "swebench", "litellm", "datasets")
SIBLINGS = ("sandbox_k8s", "trainer_bridge")
TEST_TOOLS = ("pytest>=8.4", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.130", "anyio>=4.9")


@dataclass(frozen=True)
class Package:
    name: str
    extras_for_tests: str
    not_loaded: tuple[str, ...]
    """Modules that a bare `import` must not load."""

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


PACKAGES = (
    Package("token-tracking", "cli", (*HEAVY, "tokenizers", "jinja2", "transformers", "zmq")),
    Package("sandbox-k8s", "swerex,cli", (*HEAVY, "zmq", "tokenizers", "numpy")),
    Package("trainer-bridge", "cli", (*HEAVY, "tokenizers", "jinja2", "transformers", "aiohttp", "rich")),
    Package("agent-flow", "quickstart,engines,sweagent,e2b", (*HEAVY, "zmq", "aiohttp", "e2b", *SIBLINGS)),
)


def run(*command: str, cwd: Path) -> None:
    print("$", " ".join(command), flush=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    subprocess.run(command, cwd=cwd, env=environment, check=True)


def install(python: Path, wheels: Path, *what: str, cwd: Path) -> None:
    # The siblings are pinned to the wheels just built, so that nothing of the same name comes from an index.
    uv = ("uv", "pip", "install", "--quiet", "--python", str(python))
    run(*uv, "--constraints", str(wheels / "siblings.txt"), *what, cwd=cwd)


def environment(folder: Path) -> Path:
    run("uv", "venv", "--quiet", str(folder), cwd=folder.parent)
    return folder / "bin" / "python"


def check(package: Package, folder: Path, wheels: Path) -> None:
    python = environment(folder / f"{package.module}-bare")
    install(python, wheels, package.name, cwd=folder)
    code = (
        f"import sys, {package.module} as m; "
        f"loaded = sorted(set({package.not_loaded!r}) & set(sys.modules)); "
        "assert 'site-packages' in m.__file__, m.__file__; assert not loaded, loaded; "
        "print('imports alone:', m.__name__)"
    )
    run(str(python), "-I", "-c", code, cwd=folder)
    python = environment(folder / f"{package.module}-tests")
    install(python, wheels, f"{package.name}[{package.extras_for_tests}]", *TEST_TOOLS, cwd=folder)
    run("uv", "pip", "install", "--quiet", "--python", str(python), "--no-deps", "trl==1.16.0", cwd=folder)
    tests = ROOT / "packages" / package.name / "tests"
    config = ROOT / "pyproject.toml"
    run(str(python), "-m", "pytest", "-q", "-c", str(config), "--rootdir", str(ROOT), str(tests), cwd=folder)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    run("uv", "build", "--quiet", "--all-packages", "--no-sources", "--wheel", "-o", str(wheels), cwd=ROOT)
    pins = [
        f"{package.name} @ {next(wheels.glob(f'{package.module}-*.whl')).as_uri()}" for package in PACKAGES
    ]
    (wheels / "siblings.txt").write_text("\n".join(pins) + "\n")
    failed: list[str] = []
    for package in PACKAGES:
        try:
            check(package, folder, wheels)
        except subprocess.CalledProcessError as failure:
            print(f"{package.name}: exit code {failure.returncode}", flush=True)
            failed.append(package.name)
    if failed:
        sys.exit(f"failed alone: {', '.join(failed)}")


main()
