"""Small looks that `agent-flow doctor` takes: into a sandbox, at a disk, at a template's facts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from token_tracking.sample import Scalar

from agent_flow.doctor import Say
from agent_flow.environments.base_commit import FIND_REPOSITORY, is_repository
from agent_flow.environments.partial_clone import PARTIAL, PARTIAL_CLONE, REFUSE_PARTIAL
from agent_flow.protocols import Environment, EnvironmentSpec

_COMMAND_S = 60.0
_GIB = 1 << 30
_LOW_BYTES, _FULL_BYTES = 5 * _GIB, _GIB // 4
"""Free space below which a run is warned of, or will not get far. Judgement: a rollout's folder is small, but
repositories and spooled samples are not."""
_LOOK = 'command -v python3 || echo none; echo "${BASH_ENV:-none}"; [ -r ~/.bashrc ] && echo "~/.bashrc" || :'
_NOT_FOUND = {
    66: "no such folder",
    67: "no git repository",
    68: "no commit {!r} in its repository",
    PARTIAL: PARTIAL_CLONE,
}
"""Exit codes of `FIND_REPOSITORY` and `REFUSE_PARTIAL`."""


def tell_template(text: str, facts: Mapping[str, object], say: Say) -> None:
    """Which road its turns take, and what an engine has to know of it."""
    stops = " or ".join(cast("dict[str, int]", facts["stop_ids"])) or "no token"
    ends = f"a turn ends with {stops}, calls are read by the {facts['parser']} parser"
    if facts["delta"] != "program":
        why = facts["refused_because"]
        say.warn(f"{text}: every turn is rendered in full, which costs time ({why}); {ends}")
        return
    rewritten = " and ".join(cast("list[str]", facts["rewrites_history_after"]))
    proof = f"equal to full renders in {facts['random_conversations_matched']} random conversations"
    breaks = (
        f"; history is rewritten after a message of {rewritten}, which gives branches" if rewritten else ""
    )
    say.ok(f"{text}: deltas by a compiled program, {proof}; {ends}{breaks}")


async def look_inside(environment: Environment, spec: EnvironmentSpec, say: Say) -> str:
    """What is there; empty if something is not that a run needs, which was said then."""
    for command in (["true"], ["bash", "-c", "true"], ["git", "--version"], ["mktemp", "-d"]):
        done = await environment.execute(command, timeout_s=_COMMAND_S)
        if done.exit_code != 0:
            said = done.stderr.decode("utf-8", "replace").strip() or "nothing"
            say.fail(
                f"`{' '.join(command)}` ended with {done.exit_code} and said: {said}", f"install {command[0]}"
            )
            return ""
    looked = await environment.execute(["bash", "-c", _LOOK], timeout_s=_COMMAND_S)
    python, bash_env, *files = looked.stdout.decode("utf-8", "replace").splitlines() or ["none", "none"]
    inside = f"python3 is {python}, BASH_ENV is {bash_env}{''.join(f', {name} is there' for name in files)}"
    if spec.plain and not await is_repository(environment):
        return f"{environment.workdir}, which is no git repository; {inside}"
    commit = await _repository(environment, spec, say)
    return f"{environment.workdir} at {commit[:12]}; {inside}" if commit else ""


async def _repository(environment: Environment, spec: EnvironmentSpec, say: Say) -> str:
    """The base commit, found as the flow finds it; empty if there is none, which was said then."""
    where = environment.workdir
    command = [
        "bash",
        "-c",
        f'{FIND_REPOSITORY}{REFUSE_PARTIAL}echo "$base"; git rev-parse HEAD',
        "find",
        where,
        spec.base_commit,
    ]
    done = await environment.execute(command, timeout_s=_COMMAND_S, cwd="/")
    if done.exit_code != 0:
        why = _NOT_FOUND.get(done.exit_code or 0, f"git ended with {done.exit_code}")
        stderr = done.stderr.decode("utf-8", "replace").strip()
        say.fail(f"{where}: {why.format(spec.base_commit)}{f': {stderr}' if stderr else ''}")
        return ""
    base, head = done.stdout.decode("utf-8", "replace").split()
    if head != base:
        say.warn(f"{where} is at {head}; a rollout begins with the task's base_commit, {base}")
    return base


def absolute(run_dir: str) -> Path:
    """As `RunFolder` reads it: relative to where the command is started."""
    return Path(run_dir).expanduser().resolve()


def writable(folder: Path, what: str, say: Say) -> None:
    """Write into a folder, or into the nearest one above it that is there."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    fix = "set run_dir to a folder that you may write to" if what == "run_dir" else "set TMPDIR"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"agent-flow doctor")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        say.fail(f"{what} {folder} cannot be written: {error.strerror}", fix)
        return
    free = shutil.disk_usage(there).free
    text = f"{what} {folder}: {free / _GIB:,.1f} GiB free"
    if free < _FULL_BYTES:
        say.fail(text, "make room")
    elif free < _LOW_BYTES:
        say.warn(text, "make room")
    else:
        say.ok(text)


def said(described: Mapping[str, Scalar], kind: str) -> str:
    """A part's own description, its name first and without the prefix that provenance gives every key."""
    name = described.get(kind)
    rest = [
        f"{key.removeprefix(f'{kind}_')} {value}"
        for key, value in described.items()
        if key != kind and value != ""
    ]
    return ", ".join([str(name), *rest] if name is not None else rest)


def tool_names(tools: Sequence[Mapping[str, object]]) -> str:
    """The names in tool schemas; a function's schema may be wrapped, as in OpenAI's API, or not."""
    inner = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]
    return ", ".join(str(cast("dict[str, object]", tool).get("name")) for tool in inner) or "none"
