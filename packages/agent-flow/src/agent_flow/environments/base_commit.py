"""The commit that an agent starts from: its future removed from the repository, and a copy that is ours.

Before the agent acts, everything that is no ancestor of the base commit leaves `.git` (mini-swe-agent#787: an
agent found the fix with `git log --all`; after a reset it can still be read by its hash), and a git directory
that holds nothing but the state at the start is taken out of the sandbox: the agent may do anything to
`.git`, and its patch is still what it changed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from token_tracking.sample import Scalar

from agent_flow.environments.folder import make_folder
from agent_flow.environments.marks import read_marks
from agent_flow.environments.partial_clone import PARTIAL, PARTIAL_CLONE, REFUSE_PARTIAL
from agent_flow.environments.staging import FUNCTIONS
from agent_flow.errors import EnvError
from agent_flow.protocols import CommandOutput, Environment, EnvironmentSpec

PRUNE_TIMEOUT_S = 900.0
"""A repository with half a million objects is packed anew in a minute; a slow node takes longer."""
MIB = 1 << 20

_NO_FOLDER = 66
_NO_REPOSITORY = 67
_NO_COMMIT = 68
NOT_READ = 69
"""Exit code of the scripts here and in `patch`: git could not read the files, however often it was tried."""
_NO_GIT = 71
_IN_PART = 72
_NO_XARGS = 73

ATTRIBUTES = "* -text !eol -ident !filter !working-tree-encoding !diff !merge"
"""For `info/attributes`, above every `.gitattributes`: a file's bytes are the bytes on disk, it is text or
binary by its content alone, and no attribute starts a program or makes git refuse a file."""

FIND_REPOSITORY = r"""
set -eu
export LC_ALL=C GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1
cd "$1" || exit 66
# Named, not discovered: git refuses to discover a repository that another user owns.
if [ -d .git ]; then GIT_DIR="$PWD/.git"
elif [ -f .git ]; then GIT_DIR=$(sed -n 's/^gitdir: //p' .git)
else exit 67
fi
export GIT_DIR GIT_WORK_TREE="$PWD"
common=$(git rev-parse --git-common-dir 2>/dev/null) || exit 67
base=$(git rev-parse --verify --quiet "${2:-HEAD}^{commit}") || exit 68
"""

_PRUNE = (
    FIND_REPOSITORY
    + REFUSE_PARTIAL
    + r"""
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
# Tags of the past stay: setuptools_scm and versioneer read a version from them.
git for-each-ref --merged="$base" --format='%(refname)' refs/tags > "$own/tags"
branch=$(git symbolic-ref -q HEAD || :)
git update-ref --no-deref HEAD "$base"
git for-each-ref --format='%(refname)' | grep -vxFf "$own/tags" \
  | while IFS= read -r ref; do printf 'option no-deref\ndelete %s\n' "$ref"; done | git update-ref --stdin
if [ -n "$branch" ]; then git update-ref "$branch" "$base" && git symbolic-ref HEAD "$branch"; fi
for folder in "$GIT_DIR" "$common"; do
  rm -f "$folder"/*_HEAD "$folder"/AUTO_MERGE "$folder"/BISECT_* "$folder"/info/grafts "$folder"/info/refs
  rm -rf "$folder"/logs "$folder"/rebase-merge "$folder"/rebase-apply "$folder"/sequencer
  rm -rf "$folder"/*MSG "$folder"/rr-cache "$folder"/lost-found
  rm -rf "$folder"/objects/pack/tmp_* "$folder"/objects/pack/.tmp-* "$folder"/objects/??/tmp_obj_*
done
find "$common" \( -name modules -o -path "$common/refs" \) -prune -o -name '*.bundle' -type f -exec rm -f {} +
[ "$GIT_DIR" != "$common" ] || rm -rf "$common/worktrees"
git remote | while IFS= read -r remote; do git remote remove "$remote" >/dev/null 2>&1 || :; done
# The index names objects too. Left alone where it is the base's, since it knows what is unchanged on disk.
if ! git diff-index --cached --quiet "$base"; then
  git read-tree "$base"
  git update-index -q --refresh >/dev/null || :
fi
{ echo "$base"; cat "$own/tags"; } | git rev-list --objects --stdin > "$own/wanted"
wanted=$(wc -l < "$own/wanted")
held=$(git cat-file --batch-all-objects --batch-check='%(objectname)' | wc -l)
objects="$common/objects"
if [ "$wanted" -ne "$held" ] || [ -e "$objects/info/alternates" ]; then
  pack=$(git pack-objects -q --delta-base-offset "$objects/pack/pack" < "$own/wanted")
  for file in "$objects"/pack/*; do
    case "$file" in */pack-"$pack".*) ;; *) rm -rf "$file" ;; esac
  done
  rm -rf "$objects"/[0-9a-f][0-9a-f] "$objects"/info/*
fi
echo "$base $((held - wanted))"
"""
)

_OF_COMMIT = (
    FIND_REPOSITORY
    + r"""
own="$3"
case $(git rev-parse --show-object-format 2>/dev/null || :) in
  sha256) format=--object-format=sha256 ;;
  *) format= ;;
esac
env -u GIT_DIR -u GIT_WORK_TREE git init -q --bare --template= $format "$own/git"
mkdir -p "$own/git/info"
echo "$6" > "$own/git/info/attributes"
objects=$(cd "$common/objects" && pwd)
export GIT_DIR="$own/git" GIT_ALTERNATE_OBJECT_DIRECTORIES="$objects"
"""
)

_OF_FOLDER = r"""
set -eu
export LC_ALL=C GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1
cd "$1" || exit 66
command -v git >/dev/null || exit 71
own="$3"
git init -q --bare --template= "$own/git"
mkdir -p "$own/git/info"
echo "$6" > "$own/git/info/attributes"
export GIT_DIR="$own/git" GIT_WORK_TREE="$PWD"
base=$(git hash-object -t tree -w /dev/null)
"""

_RECORD = r"""
limit="$4"
export GIT_INDEX_FILE="$own/index"
. "$5"
large "$limit" > "$own/exclude"
git read-tree "$base"
command -v xargs >/dev/null || exit 73
whole() {
  if [ "$ended" != 0 ] || grep -q '^Ignoring path' "$own/errors"; then
    tail -c 2000 "$own/errors" >&2
    exit 72
  fi
}
links
if [ -z "$2" ]; then
  settled stage_folder
  whole
  find . -name .git -prune -o -type f -size +"$limit"c -print0 > "$own/ignored" || :
else
  inner
  settled git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.excludesFile="$own/exclude" \
    add --all --ignore-errors .
  whole
  settled stage "$own/found"
  whole
  git -c core.excludesFile="$own/exclude" ls-files -z --others --ignored --exclude-standard > "$own/ignored"
  of_links >> "$own/ignored"
fi
odd > "$own/odd"
tree=$(git write-tree)
git diff-index --cached --name-only "$base" | wc -l > "$own/dirty"
objects="$own/git/objects"
git rev-list --objects "$tree" | git pack-objects -q --delta-base-offset "$objects/pack/pack" >/dev/null
rm -rf "$objects"/[0-9a-f][0-9a-f]
for name in index exclude errors halted found readable inner links; do rm -f "$own/$name"; done
echo "$tree" > "$own/tree"
"""


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a repository before the agent acted, on this machine."""

    git: Path
    """A bare git directory that holds `tree` and nothing else."""
    commit: str
    """Full hash of the base commit. Empty: the folder was no repository."""
    tree: str
    """Of the files at the start, those that the image had changed or added since `commit` included."""
    ignored: frozenset[bytes] = frozenset()
    """Files that were there at the start and are not in `tree`: ignored ones, those above the limit, and
    those of submodules."""
    marks: Mapping[bytes, bytes] = {}
    """How each of `ignored` was in this sandbox; see `read_marks`."""
    odd: frozenset[bytes] = frozenset()
    """Empty folders, pipes and sockets of a folder that is no repository."""
    max_file_bytes: int
    """Above this an untracked file is in no tree."""
    dirty: int = 0
    """Paths in which `tree` is not `commit`; every one without a commit."""
    pruned: int = 0
    """Objects that were removed from this sandbox's repository."""

    def describe(self) -> Mapping[str, Scalar]:
        """What goes into a sample's provenance."""
        return {"base_commit": self.commit or self.tree, "base_dirty": self.dirty, "base_pruned": self.pruned}


class BaseCommits:
    """Makes sandboxes ready for an agent. What is taken out of them is kept, once per image and commit."""

    def __init__(self, folder: Path, *, max_file_bytes: int = 4 * MIB) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._locks: dict[str, anyio.Lock] = {}
        self._bases: dict[str, Base] = {}

    async def prepare(self, environment: Environment, spec: EnvironmentSpec) -> Base:
        """Remove what came after the base commit, and record what is there. Before the agent acts.

        A `plain` folder that is no repository is recorded as it is, whatever ignore files say. Files of
        repositories inside count as files, but for submodules and ignored ones.

        Branches, remotes, reflogs, stashes and tags of the future go; tags of the past and the branch's name
        stay. Files are left as they are, and so are other repositories in the sandbox.

        Raises:
            EnvError: there is no such repository or commit (fault: the task), or git failed.
        """
        commit, pruned = "", 0
        if not spec.plain or await is_repository(environment):
            commit, pruned = await prune(environment, spec.base_commit)
        key = _key(spec, environment.describe(), commit)
        lock = self._locks.setdefault(key, anyio.Lock())
        async with lock:
            if key not in self._bases:
                self._bases[key] = await self._record(environment, commit, self._folder / key)
        base = self._bases[key]
        marks = await read_marks(environment, base.ignored)
        return msgspec.structs.replace(base, pruned=pruned, marks=marks)

    async def _record(self, environment: Environment, commit: str, target: Path) -> Base:
        own = await make_folder(environment)
        await environment.write(f"{own}/functions.sh", FUNCTIONS.encode())
        limit = str(self._max_file_bytes)
        arguments = [environment.workdir, commit, f"{own}/base", limit, f"{own}/functions.sh", ATTRIBUTES]
        script = (_OF_COMMIT if commit else _OF_FOLDER) + _RECORD
        made = await environment.execute(["mkdir", f"{own}/base"], timeout_s=60.0)
        check_git("record", made, environment.workdir, commit)
        done = await environment.execute(
            ["sh", "-c", script, "record", *arguments], timeout_s=PRUNE_TIMEOUT_S, cwd="/"
        )
        check_git("record", done, environment.workdir, commit)
        await anyio.to_thread.run_sync(_make_room, target)
        await environment.download(f"{own}/base", target)
        await environment.execute(["rm", "-rf", own], timeout_s=60.0, cwd="/")
        return await anyio.to_thread.run_sync(_read_base, target, commit, self._max_file_bytes)


async def is_repository(environment: Environment) -> bool:
    """Whether the environment's folder has a git repository of its own."""
    found = await environment.execute(["test", "-e", f"{environment.workdir}/.git"], timeout_s=60.0)
    return found.exit_code == 0


async def prune(environment: Environment, base_commit: str) -> tuple[str, int]:
    """Remove every object that is no ancestor of a commit from the repository of a sandbox.

    Cheap where there is nothing to remove: objects are counted, and only packed anew if there are too many.

    Args:
        environment: Nothing else may run in its repository.
        base_commit: Hash or name. Empty: HEAD.

    Returns:
        The commit's full hash, and how many objects were removed.

    Raises:
        EnvError: there is no such repository or commit, or git failed.
    """
    done = await environment.execute(
        ["sh", "-c", _PRUNE, "prune", environment.workdir, base_commit], timeout_s=PRUNE_TIMEOUT_S, cwd="/"
    )
    check_git("prune", done, environment.workdir, base_commit)
    told = re.fullmatch(rb"([0-9a-f]{40,64}) (-?\d+)\n", done.stdout)
    if told is None:
        raise EnvError("prune", "git did not say what was removed", evidence=_evidence(done))
    return told[1].decode(), max(0, int(told[2]))


def check_git(cause: str, done: CommandOutput, workdir: str, commit: str) -> None:
    """Refuse to go on after a script of this module failed.

    Raises:
        EnvError: with the task's fault where the row names what is not there, the image's where its
            repository is a partial clone.
    """
    if done.exit_code == 0:
        return
    if done.exit_code == _NO_GIT:
        why = "there is no git in the image, by which an agent's changes are taken"
        raise EnvError(cause, why, fault="image", evidence=_evidence(done))
    if done.exit_code == PARTIAL:
        raise EnvError(cause, f"{workdir} is {PARTIAL_CLONE}", fault="image", evidence=_evidence(done))
    if done.exit_code == _NO_XARGS:
        raise EnvError(cause, "there is no xargs in the image", fault="image", evidence=_evidence(done))
    if done.exit_code == _IN_PART:
        why = f"git cannot record every file of {workdir}; make them readable, or give them other names"
        raise EnvError("base_in_part", why, fault="image", evidence=_evidence(done))
    why = {
        _NO_FOLDER: f"there is no folder {workdir}",
        _NO_REPOSITORY: f"{workdir} is no git repository, or there is no git",
        _NO_COMMIT: f"the repository {workdir} has no commit {commit}",
    }.get(done.exit_code or 0)
    if why is not None:
        raise EnvError(cause, why, fault="task", evidence=_evidence(done))
    how = "took too long" if done.timed_out else f"ended with exit code {done.exit_code}"
    retryable = done.timed_out or done.exit_code == NOT_READ
    raise EnvError(cause, f"git {how} in {workdir}", retryable=retryable, evidence=_evidence(done))


def _evidence(done: CommandOutput) -> str:
    return done.stderr.decode("utf-8", "replace")[-2000:]


def _key(spec: EnvironmentSpec, described: Mapping[str, Scalar], commit: str) -> str:
    """A name for the folder: the digest where the back end knows it, since a tag may be moved."""
    if spec.repository is not None:
        parts = (str(spec.repository), commit)
    else:
        parts = (str(described.get("environment_image_digest") or spec.image), spec.workdir, commit)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _make_room(target: Path) -> None:
    """What an earlier try left halfway."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)


def split_paths(listed: bytes) -> frozenset[bytes]:
    """The paths of a list with NUL bytes between them."""
    return frozenset(path.removeprefix(b"./") for path in listed.split(b"\0") if path)


def _read_base(folder: Path, commit: str, max_file_bytes: int) -> Base:
    return Base(
        git=folder / "git",
        commit=commit,
        tree=(folder / "tree").read_text().strip(),
        ignored=split_paths((folder / "ignored").read_bytes()),
        odd=split_paths((folder / "odd").read_bytes()),
        max_file_bytes=max_file_bytes,
        dirty=int((folder / "dirty").read_text()),
    )
