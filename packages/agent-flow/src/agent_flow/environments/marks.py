"""How files are that no tree holds, so that a change to them is seen."""

from __future__ import annotations

from collections.abc import Iterable

from agent_flow.environments.folder import make_folder
from agent_flow.errors import EnvError
from agent_flow.protocols import Environment

_MARKS_TIMEOUT_S = 300.0
_LOOK = r"""
cd "$1" || exit 66
xargs -0 stat -c "$(printf '\001')%f|%s|%y|%n" -- < "$2/paths" > "$2/marks" 2>/dev/null || :
command -v stat >/dev/null && command -v xargs >/dev/null
"""


async def read_marks(environment: Environment, paths: Iterable[bytes]) -> dict[bytes, bytes]:
    """Mode, size and time of the last change of files, by path; those that are not there are left out.

    Their content is not read: ignored files can be gigabytes.

    Raises:
        EnvError: the sandbox has no `stat` or `xargs`, or was lost.
    """
    listed = b"\0".join(paths)
    if not listed:
        return {}
    own = await make_folder(environment)
    await environment.write(f"{own}/paths", listed)
    command = ["sh", "-c", _LOOK, "marks", environment.workdir, own]
    done = await environment.execute(command, timeout_s=_MARKS_TIMEOUT_S, cwd="/")
    if done.timed_out:
        raise EnvError("marks", "looking at ignored files took too long", retryable=True)
    if done.exit_code not in (0, 66):
        why = "there is no stat or no xargs in the image, by which changes to ignored files are seen"
        raise EnvError("marks", why, fault="image", evidence=done.stderr.decode("utf-8", "replace"))
    marks = await environment.read(f"{own}/marks") if done.exit_code == 0 else b""
    await environment.execute(["rm", "-rf", own], timeout_s=60.0, cwd="/")
    found = (entry.split(b"|", 3) for entry in marks.removesuffix(b"\n").removeprefix(b"\1").split(b"\n\1"))
    return {entry[3]: b"|".join(entry[:3]) for entry in found if len(entry) == 4}
