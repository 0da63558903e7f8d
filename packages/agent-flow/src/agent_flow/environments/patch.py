"""Patch capture: what an agent changed, as the bytes of `git diff --binary` against the recorded base.

The diff is made with a git directory of our own, copied into the sandbox for this purpose: whatever the agent
did to the repository's own one (commits, staged files, hooks, attributes, a diff driver, `rm -rf .git`)
neither hides a change nor runs a program. It is read as a file, never through text that was shown to the
model (SWE-bench_Pro-os#74: a text diff of a binary file broke the whole patch; plain `git diff` is empty
after a commit).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from agent_flow.environments.base_commit import MIB, NOT_READ, Base, split_paths
from agent_flow.environments.folder import make_folder
from agent_flow.environments.marks import read_marks
from agent_flow.environments.staging import FUNCTIONS
from agent_flow.errors import EnvError, GraderError
from agent_flow.protocols import Environment

GIT_TIMEOUT_S = 300.0
LISTED = 200
"""Paths that a list of what was left out names, of each reason; the rest is counted."""
_NO_FOLDER = 66
_GITLINK = b"160000"

_STAGE = r"""
set -eu
own="$2"; tree="$3"; limit="$4"; commit="$5"
export LC_ALL=C GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
cd "$1" || exit 66
. "$own/functions.sh"
large "$limit" > "$own/exclude"
# What the agent's own index holds counts as work too, even where an ignore file names it.
git -c core.excludesFile="$own/exclude" ls-files -z --cached --ignored --exclude-standard \
  > "$own/listed" 2>/dev/null || : > "$own/listed"
export GIT_DIR="$own/git" GIT_WORK_TREE="$PWD" GIT_INDEX_FILE="$own/index"
find . -name .git -prune -o -type f -size +"$limit"c -print0 > "$own/large" || :
# Files of a repository inside the repository count as files, unless it was there at the start.
git ls-tree -r "$tree" | sed -n 's/^160000 [^\t]*\t//p' > "$own/links"
find . -mindepth 2 -name .git -prune -exec sh -c '
  links=$1; shift
  for inner; do
    folder=${inner#./}
    grep -qxF -e "${folder%/.git}" "$links" || rm -rf "$inner"
  done
' sh "$own/links" {} + || :
git read-tree "$tree"
own_git() {
  git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.excludesFile="$own/exclude" "$@"
}
add_listed() {
  own_git update-index --add --remove -z --stdin < "$own/listed" && return 0
  rm -f "$GIT_INDEX_FILE.lock"
  found=0  # one by one: it gives up at the first file that it cannot read
  xargs -0 -n 1 git update-index --add --remove -- < "$own/listed" || found=$?
  [ "$found" -ne 123 ] || return 1
  return "$found"
}
# A file that cannot be read is left out and listed; it must not cost the rest of the work.
if [ -n "$commit" ]; then
  settled own_git add --all --ignore-errors .
  settled add_listed
else
  settled stage_folder
fi
changed() { git diff-index --cached --raw --no-abbrev --no-renames "$@" "$tree"; }
changed -z > "$own/raw"
changed | cut -d ' ' -f 4 | grep -v '^0*$' | git cat-file --batch-check='%(objectname) %(objectsize)' \
  > "$own/sizes" || :
of_links > "$own/inner"
if [ -n "$commit" ]; then
  own_git ls-files -z --others --ignored --exclude-standard > "$own/ignored"
  : > "$own/odd"
  list_unread() { own_git ls-files -z --others --modified --exclude-standard > "$own/unread"; }
else
  cp "$own/large" "$own/ignored"
  odd > "$own/odd"
  list_unread() { own_git ls-files -z --others --modified > "$own/unread"; }
fi
settled list_unread
for name in raw sizes large ignored unread inner odd; do
  printf '%s %s\n' "$name" "$(wc -c < "$own/$name" | tr -d ' ')"
  cat "$own/$name"
done > "$own/report"
"""

_DIFF = r"""
set -eu
own="$2"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_DIR="$own/git" GIT_WORK_TREE="$1" GIT_INDEX_FILE="$own/index"
cd "$1"
git update-index -z --index-info < "$own/drop"
git diff --cached --binary --full-index --no-ext-diff --no-textconv --no-color --no-renames \
  --src-prefix=a/ --dst-prefix=b/ --output="$own/patch.diff" "$3"
wc -c < "$own/patch.diff"
"""

Reason = Literal["too_large", "ignored", "was_ignored", "submodule", "unreadable", "no_file"]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A file that an agent changed and that is not in its patch."""

    path: str
    """Bytes that are not UTF-8 stand as escapes."""
    reason: Reason
    """`too_large`; `ignored`, as by `.gitignore`, and not staged by the agent; `was_ignored`, it was there at
    the start and no part of the repository, and was changed or removed; `submodule`, or a file in one;
    `unreadable`; `no_file`, an empty folder, a pipe or a socket in a folder that is no repository."""
    size: int | None = None
    """Bytes. None: not known."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent did to its repository."""

    patch: bytes
    """Empty: nothing was changed."""
    left_out: tuple[LeftOut, ...] = ()
    """At most `LISTED` of each reason."""
    left_out_counts: dict[str, int] = {}
    """How many there were, by reason."""


async def capture_patch(environment: Environment, base: Base, *, max_patch_bytes: int = 32 * MIB) -> Captured:
    """The agent's changes since the start, committed and staged ones and binary files included.

    The last thing to do with a sandbox: git directories of nested repositories are removed, so that their
    files count as files.

    Raises:
        GraderError: the agent removed its repository, or its patch is larger than allowed.
        EnvError: the sandbox was lost, or git failed; retryable where it could not read the files.
    """
    marks = await read_marks(environment, base.marks)
    touched = frozenset(path for path, mark in base.marks.items() if marks.get(path) != mark)
    own = await make_folder(environment)
    await environment.upload(base.git, f"{own}/git")
    await environment.write(f"{own}/functions.sh", FUNCTIONS.encode())
    arguments = [environment.workdir, own, base.tree]
    stage = ["sh", "-c", _STAGE, "capture", *arguments, str(base.max_file_bytes), base.commit]
    await _run(environment, stage)
    drop, left_out = choose(await environment.read(f"{own}/report"), base, touched)
    await environment.write(f"{own}/drop", drop)
    size = int(await _run(environment, ["sh", "-c", _DIFF, "capture", *arguments]))
    if size > max_patch_bytes:
        raise GraderError(
            "patch_too_large",
            f"the agent's patch has {size} bytes, more than the {max_patch_bytes} that are allowed",
            fault="agent",
        )
    patch = await environment.read(f"{own}/patch.diff")
    await environment.execute(["rm", "-rf", own], timeout_s=GIT_TIMEOUT_S, cwd="/")
    return Captured(patch=patch, left_out=_shortened(left_out), left_out_counts=_counted(left_out))


async def _run(environment: Environment, command: list[str]) -> bytes:
    done = await environment.execute(command, timeout_s=GIT_TIMEOUT_S, cwd="/")
    evidence = done.stderr.decode("utf-8", "replace")[-2000:]
    if done.timed_out:
        raise EnvError("capture", f"git took longer than {GIT_TIMEOUT_S:g} s", evidence=evidence)
    if done.exit_code == _NO_FOLDER:
        raise GraderError("capture", "the agent removed its repository", fault="agent", evidence=evidence)
    if done.exit_code == NOT_READ:
        why = "git could not read the agent's files, or write what it read, in three tries"
        raise EnvError("capture", why, retryable=True, evidence=evidence)
    if done.exit_code != 0:
        raise EnvError("capture", f"git ended with exit code {done.exit_code}", evidence=evidence)
    return done.stdout


def choose(report: bytes, base: Base, touched: frozenset[bytes] = frozenset()) -> tuple[bytes, list[LeftOut]]:
    """What of the staged changes is no part of the patch.

    Args:
        report: What the script wrote: named parts with their lengths.
        base: The state at the start.
        touched: Those of `base.ignored` that are not as they were.

    Returns:
        Entries that undo them, in the form of `git update-index -z --index-info`, and what is left out.
    """
    parts = _parts(report)
    sizes = dict(line.split(b" ") for line in parts["sizes"].splitlines() if b" missing" not in line)
    left_out: list[LeftOut] = []
    drop: list[bytes] = []
    fields = parts["raw"].split(b"\0")
    inner = split_paths(parts["inner"])
    old = zip(fields[0:-1:2], fields[1::2], strict=True)
    submodules = tuple(path + b"/" for entry, path in old if entry.startswith(b":" + _GITLINK))
    for entry, path in zip(fields[0:-1:2], fields[1::2], strict=True):
        old_mode, mode, old_hash, new_hash, _ = entry.removeprefix(b":").split(b" ")
        size = int(sizes.get(new_hash, b"0"))
        reason = _why_not(path, (old_mode, mode), size, base)
        reason = "submodule" if path.startswith(submodules) else reason
        if reason is not None:
            drop.append(b"%s %s\t%s" % (old_mode.lstrip(b"0") or b"0", old_hash, path))
            left_out.append(_left_out(path, reason, size))
    large = split_paths(parts["large"])
    new = split_paths(parts["ignored"]) - base.ignored
    left_out += [_left_out(path, "too_large" if path in large else "ignored") for path in sorted(new)]
    listed = {entry.path for entry in left_out}
    # What is in the patch was read, though it may have changed again since.
    unread = split_paths(parts["unread"]) - set(fields[1::2]) - base.ignored
    rest: list[tuple[frozenset[bytes], Reason]] = [
        (unread, "unreadable"),
        (inner - base.ignored | inner & touched, "submodule"),
        (touched - inner, "was_ignored"),
        (split_paths(parts["odd"]) - base.odd, "no_file"),
    ]
    for paths, reason in rest:
        left_out += [_left_out(path, reason) for path in sorted(paths) if _text(path) not in listed]
    return b"".join(entry + b"\0" for entry in drop), left_out


def _why_not(path: bytes, modes: tuple[bytes, bytes], size: int, base: Base) -> Reason | None:
    if _GITLINK in modes:
        return "submodule"
    if path in base.ignored:
        return "was_ignored"
    return "too_large" if size > base.max_file_bytes else None


def _parts(report: bytes) -> dict[str, bytes]:
    parts: dict[str, bytes] = {}
    while report:
        head, _, rest = report.partition(b"\n")
        name, _, length = head.partition(b" ")
        parts[name.decode()], report = rest[: int(length)], rest[int(length) :]
    return parts


def _left_out(path: bytes, reason: Reason, size: int | None = None) -> LeftOut:
    return LeftOut(path=_text(path), reason=reason, size=size)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _shortened(left_out: list[LeftOut]) -> tuple[LeftOut, ...]:
    kept: dict[str, list[LeftOut]] = {}
    for entry in left_out:
        kept.setdefault(entry.reason, []).append(entry)
    return tuple(entry for entries in kept.values() for entry in entries[:LISTED])


def _counted(left_out: list[LeftOut]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in left_out:
        counts[entry.reason] = counts.get(entry.reason, 0) + 1
    return counts
