"""Patch capture: what an agent changed, as the bytes of `git diff --binary` against the recorded base.

The diff is made with a git directory of our own, copied into the sandbox for this purpose: whatever the agent
did to the repository's own one (commits, staged files, hooks, attributes, a diff driver, `rm -rf .git`)
neither hides a change nor runs a program. It is read as a file, never through text that was shown to the
model (SWE-bench_Pro-os#74: a text diff of a binary file broke the whole patch; plain `git diff` is empty
after a commit).
"""

from __future__ import annotations

from agent_flow.environments.folder import make_folder
from agent_flow.errors import EnvError, GraderError
from agent_flow.protocols import Environment, EnvironmentSpec

GIT_TIMEOUT_S = 120.0
_NO_FOLDER = 66

_CAPTURE = r"""
set -eu
own="$2"; base="$3"; out="$4"
cd "$1" || exit 66
# What the agent's own index holds counts as work too, even where an ignore file names it.
listed="$own/listed"
git ls-files -z --cached > "$listed" 2>/dev/null || : > "$listed"
export GIT_DIR="$own/git" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$own/index"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
git read-tree "$base"
find . -mindepth 2 -name .git -prune -exec rm -rf {} +
# A file that cannot be read is told on stderr and left out; it must not cost the rest of the work.
git -c core.hooksPath=/dev/null -c core.fsmonitor=false add --all --ignore-errors . || :
git update-index --add --remove -z --stdin < "$listed" || :
git diff --cached --binary --full-index --no-ext-diff --no-textconv --no-color --no-renames \
  --output="$out" "$base"
"""


async def capture_patch(environment: Environment, spec: EnvironmentSpec) -> bytes:
    """The agent's changes since the base commit, committed and staged ones and binary files included.

    Empty bytes: nothing was changed. The last thing to do with a sandbox: git directories of nested
    repositories are removed, so that their files count as files.

    Raises:
        GraderError: git could not make the diff.
        EnvError: the sandbox was lost.
    """
    if spec.repository is None:
        raise EnvError("capture", "a repository that is in the image cannot be captured yet", fault="task")
    own = await make_folder(environment)
    await environment.upload(spec.repository / ".git", f"{own}/git")
    out = f"{own}/patch.diff"
    done = await environment.execute(
        ["bash", "-c", _CAPTURE, "capture", environment.workdir, own, spec.base_commit, out],
        timeout_s=GIT_TIMEOUT_S,
        cwd="/",
    )
    evidence = done.stderr.decode("utf-8", "replace")[-2000:]
    if done.timed_out:
        raise EnvError("capture", f"git diff took longer than {GIT_TIMEOUT_S:g} s", evidence=evidence)
    if done.exit_code == _NO_FOLDER:
        raise GraderError("capture", "the agent removed its repository", fault="agent", evidence=evidence)
    if done.exit_code != 0:
        raise EnvError("capture", f"git diff ended with exit code {done.exit_code}", evidence=evidence)
    patch = await environment.read(out)
    await environment.execute(["rm", "-rf", own], timeout_s=GIT_TIMEOUT_S)
    return patch
