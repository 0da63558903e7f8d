"""Patch capture: what an agent changed, as the bytes of `git diff --binary` against the recorded base.

The diff is made with a git directory of our own, copied into the sandbox for this purpose: whatever the agent
did to the repository's own one (commits, staged files, hooks, attributes, a diff driver, `rm -rf .git`)
neither hides a change nor runs a program. It is read as a file, never through text that was shown to the
model (SWE-bench_Pro-os#74: a text diff of a binary file broke the whole patch; plain `git diff` is empty
after a commit).
"""

from __future__ import annotations

from pathlib import Path

from agent_flow.errors import GraderError
from agent_flow.protocols import CommandOutput, Environment

GIT_TIMEOUT_S = 120.0

_CAPTURE = r"""
set -eu
own="$1"; base="$2"; out="$3"
# What the agent's own index holds counts as work too, even where an ignore file names it.
listed="$own/listed"
git ls-files -z --cached > "$listed" 2>/dev/null || : > "$listed"
export GIT_DIR="$own/git" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$own/index"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
git read-tree "$base"
git -c core.hooksPath=/dev/null -c core.fsmonitor=false add --all .
git update-index --add --remove -z --stdin < "$listed"
git diff --cached --binary --full-index --no-ext-diff --no-textconv --no-color --no-renames \
  --output="$out" "$base"
"""


async def capture_patch(environment: Environment, repository: Path, base_commit: str) -> bytes:
    """The agent's changes since `base_commit`, committed and staged ones and binary files included.

    Empty bytes: nothing was changed.

    Raises:
        GraderError: git could not make the diff.
        EnvError: the sandbox was lost.
    """
    made = await environment.execute(["mktemp", "-d"], timeout_s=GIT_TIMEOUT_S)
    own = made.stdout.decode().strip()
    _check(made, "mktemp")
    await environment.upload(repository / ".git", f"{own}/git")
    out = f"{own}/patch.diff"
    done = await environment.execute(
        ["bash", "-c", _CAPTURE, "capture", own, base_commit, out],
        timeout_s=GIT_TIMEOUT_S,
        cwd=environment.workdir,
    )
    _check(done, "git diff")
    patch = await environment.read(out)
    await environment.execute(["rm", "-rf", own], timeout_s=GIT_TIMEOUT_S)
    return patch


def _check(done: CommandOutput, what: str) -> None:
    if done.exit_code != 0:
        raise GraderError(
            "capture",
            f"{what} ended with {'a time-out' if done.timed_out else f'exit code {done.exit_code}'}",
            fault="agent",
            evidence=done.stderr.decode("utf-8", "replace")[-2000:],
        )
