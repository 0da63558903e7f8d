"""The test surface of a patch: files through which an agent can change its own judging.

verifiers#2152: a planted `conftest.py` scored 1.0. Three kinds: files of the tests that judge (what the agent
wrote there is taken back by default), configuration of test runners and code that interpreters load
by themselves (flagged by default: a task may really want a change there), and other tests (counted). Compiled
Python is never graded: it runs in place of the source that it stands for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Literal

import msgspec
from token_tracking.sample import Scalar

from agent_flow.environments.folder import make_folder
from agent_flow.errors import EnvError
from agent_flow.protocols import Environment

Policy = Literal["flag", "reset"]

RESET_TIMEOUT_S = 60.0

_WHOLE = re.compile(
    r"""(?:^|/)(?:
      conftest(?:\.py|/__init__\.\w+) | pytest\.(?:ini|toml) | \.pytest\.(?:ini|toml) | tox\.ini
    | \.coveragerc | noxfile\.py
    | (?:conftest|sitecustomize|usercustomize)(?:\.[\w-]+)*\.(?:so|pyd) | [^/]+\.pth
    | (?:site|user)customize(?:\.py|/__init__\.\w+) | [^/]+\.(?:dist|egg)-info/entry_points\.txt
    | (?:jest|vitest|vite|karma|cypress|playwright|ava|wdio|babel)(?:\.[\w-]+)*
      \.(?:config|conf)(?:\.[\w-]+)*\.[cm]?[jt]sx?
    | (?:jest|vitest)\.(?:config|setup|workspace)(?:\.[\w-]+)*\.(?:[cm]?[jt]sx?|json) | jest\.config\.json
    | \.mocharc(?:\.[\w-]+)? | mocha\.opts | \.nycrc(?:\.[\w-]+)? | \.babelrc(?:\.[\w-]+)?
    | \.rspec | spec_helper\.rb | rails_helper\.rb | phpunit(?:\.[\w-]+)?\.xml(?:\.dist)? | nextest\.toml
    | \.cargo/config(?:\.toml)?
    )$""",
    re.VERBOSE,
)
"""Files that are such configuration as a whole."""

_RUNNERS = re.compile(
    r"""(?:
      _?pytest | py | pluggy | iniconfig | exceptiongroup | xdist | execnet | nose2? | coverage | tox | nox
    | hypothesis | pytest_(?:cov|mock|asyncio|timeout|django|xdist|randomly)
    | (?P<name>[^/.]+)
    )(?:\.py|/__init__\.\w+|(?:\.[\w-]+)*\.(?:so|pyd))""",
    re.VERBOSE,
)
"""Modules of Python's test runners and, by `name`, of the standard library, in the folder that comes first on
the path. Only new files count: a repository may be the runner's own."""

_STANDARD = sys.stdlib_module_names | {"asynchat", "asyncore", "distutils", "imp", "smtpd"}  # until 3.11
_COMPILED = re.compile(r"(?:^|/)__pycache__/|\.py[co]$")

_SECTIONS: dict[str, re.Pattern[str]] = {
    "setup.cfg": re.compile(r"\[(?:tool:pytest|pytest|nosetests|coverage:.*|testenv.*|aliases)\]"),
    "pyproject.toml": re.compile(r"\[+tool\.(?:pytest|coverage|tox|nox|hatch\.envs|pdm\.scripts|poe)\b.*\]"),
    "Cargo.toml": re.compile(r"\[+(?:test|bench|lib|profile\.test|dev-dependencies)\b.*\]"),
}
_KEYS: dict[str, re.Pattern[str]] = {
    "setup.cfg": re.compile(
        r"\s*(?:addopts|testpaths|python_(?:files|classes|functions)|norecursedirs|collect_ignore\w*|usefixtures"
        r"|xfail_strict|required_plugins|pythonpath|confcutdir|test\s*=\s*pytest)\b"
    ),
    "pyproject.toml": re.compile(
        r"(?:[\w-]+\.)*(?:addopts|testpaths|python_(?:files|classes|functions)|norecursedirs|usefixtures"
        r"|xfail_strict|required_plugins|pythonpath|confcutdir)\b"
        r"|(?:tool\.)?pytest(?:\.ini_options\b|=\{.*ini_options)|tool\.(?:coverage|tox|nox|hatch\.envs|poe)\b"
        r"|tool=\{"
    ),
    "Cargo.toml": re.compile(r"\s*(?:harness|autotests|test|doctest|required-features)\s*="),
    "package.json": re.compile(
        r'\s*"(?:jest|mocha|vitest|ava|nyc|c8|test(?::[\w-]+)?|pretest|posttest|testMatch|testRegex'
        r"|testPathIgnorePatterns|setupFiles\w*|transform|moduleNameMapper|globalSetup|reporters|testEnvironment"
        r')"\s*:'
    ),
}
_OPENS = re.compile(r"\s*\[.*\]\s*(?:[#;].*)?$")

_TEST_FOLDERS = ("test", "tests", "__tests__")
_TESTS = re.compile(
    r"(?:^|/)(?:tests?|testing|__tests__|spec|specs)/|(?:^|/)test_[^/]*\.py$|_test\.(?:py|go|rb|exs)$"
    r"|[._](?:test|spec)\.[cm]?[jt]sx?$|_spec\.rb$|(?:Test|Tests|TestCase|IT)\.(?:java|kt|php|cs|scala)$"
)


class FileDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One file's part of a patch."""

    paths: tuple[str, ...]
    """Its name; two where it is renamed or copied. Bytes that are not UTF-8 stand as lone surrogates."""
    data: bytes


class Surface(msgspec.Struct, frozen=True, kw_only=True):
    """What of its judging a patch touches: paths, sorted."""

    tests: tuple[str, ...] = ()
    """Files of the tests that judge, and Python that is imported before or instead of them."""
    configuration: tuple[str, ...] = ()
    """Configuration of test runners, and code that interpreters load by themselves."""
    other_tests: tuple[str, ...] = ()
    """Other files that look like tests by their name."""
    compiled: tuple[str, ...] = ()
    """Compiled Python, which no policy lets through."""

    def __bool__(self) -> bool:
        return bool(self.tests or self.configuration or self.other_tests or self.compiled)

    def to_json(self) -> bytes:
        """For a file of the rollout; bytes of a name that are not UTF-8 stand as escapes."""
        shown = {
            name: [_shown(path) for path in paths] for name, paths in msgspec.structs.asdict(self).items()
        }
        return msgspec.json.format(msgspec.json.encode(shown))

    def counters(self) -> dict[str, Scalar]:
        """For a rollout's `produced_by`."""
        return {
            "surface_tests": len(self.tests),
            "surface_configuration": len(self.configuration),
            "surface_other_tests": len(self.other_tests),
            "surface_compiled": len(self.compiled),
        }

    def reset(self, tests: Policy, configuration: Policy) -> tuple[str, ...]:
        """The paths that a policy takes back; compiled Python under any."""
        kept_back = self.compiled
        kept_back += self.tests if tests == "reset" else ()
        return kept_back + (self.configuration if configuration == "reset" else ())


def split_patch(patch: bytes) -> tuple[FileDiff, ...]:
    """A patch of git as parts, one per file; together they are its bytes. What precedes the first is its."""
    starts = [found.start() for found in re.finditer(rb"^diff --git ", patch, re.MULTILINE)]
    if not starts:
        return (FileDiff(paths=(), data=patch),) if patch else ()
    ends = [*starts[1:], len(patch)]
    begins = [0, *starts[1:]]
    return tuple(
        FileDiff(paths=_paths(patch[start:end]), data=patch[begin:end])
        for begin, start, end in zip(begins, starts, ends, strict=True)
    )


def changed_paths(patch: bytes) -> tuple[str, ...]:
    """Every path that a patch names, sorted; both of a renamed file."""
    return tuple(sorted({path for part in split_patch(patch) for path in part.paths}))


def surface_of(patch: bytes, test_patch: bytes = b"", judging: Iterable[str] = ()) -> Surface:
    """What of its judging a patch touches.

    Args:
        patch: The agent's.
        test_patch: The task's. Empty: the task has none, or nobody knows it.
        judging: Further files of the tests that judge; see `named_tests`.
    """
    brought = {*changed_paths(test_patch), *judging}
    shadows = _shadows(brought)
    tests: set[str] = set()
    configuration: set[str] = set()
    other: set[str] = set()
    compiled: set[str] = set()
    for part in split_patch(patch):
        for path in part.paths:
            if _COMPILED.search(path):
                compiled.add(path)
            elif path in brought or (shadows is not None and shadows.fullmatch(path)):
                tests.add(path)
            elif _configures(path, part.data):
                configuration.add(path)
            elif _TESTS.search(path):
                other.add(path)
    return Surface(
        tests=tuple(sorted(tests)),
        configuration=tuple(sorted(configuration)),
        other_tests=tuple(sorted(other)),
        compiled=tuple(sorted(compiled)),
    )


def _shadows(brought: set[str]) -> re.Pattern[str] | None:
    """Python that is imported instead of the test files or before them. None: there is none.

    A package or an extension module of a test module's name, which Python prefers; `__init__.py` of the test
    folders that the module lies in, and a module of a test folder's name. Of folders above the first test
    folder nothing: a repair may be there.
    """
    found: set[str] = set()
    for path in brought:
        file = PurePosixPath(path)
        if file.suffix != ".py":
            continue
        found.add(rf"{re.escape(path[:-3])}(?:/__init__\.\w+|(?:\.[\w-]+)*\.(?:so|pyd))")
        parts = file.parts[:-1]
        first = next((at for at, name in enumerate(parts) if name in _TEST_FOLDERS), len(parts))
        for end in range(first + 1, len(parts) + 1):
            folder = re.escape("/".join(parts[:end]))
            found.add(rf"{folder}(?:/__init__\.\w+|\.py|(?:\.[\w-]+)*\.(?:so|pyd))")
    return re.compile("|".join(sorted(found))) if found else None


def _configures(path: str, data: bytes) -> bool:
    if (module := _RUNNERS.fullmatch(path)) and (not module["name"] or module["name"] in _STANDARD):
        return re.match(rb"diff --git [^\n]*\nnew file mode ", data) is not None
    return _WHOLE.search(path) is not None or _changes_configuration(path, data)


def without_paths(patch: bytes, paths: Sequence[str]) -> bytes:
    """The patch without the files that are named, byte for byte otherwise."""
    gone = set(paths)
    return b"".join(part.data for part in split_patch(patch) if not gone.intersection(part.paths))


_RESET = r"""
set -eu
git rev-parse --verify --quiet "$1^{commit}" >/dev/null || { echo "no commit $1" >&2; exit 1; }
while IFS= read -r -d '' path; do
  if git cat-file -e "$1:$path" 2>/dev/null
  then GIT_LITERAL_PATHSPECS=1 git checkout --quiet "$1" -- "$path"
  else rm -rf -- "./$path"
  fi
done < "$2"
"""


async def reset_paths(environment: Environment, paths: Sequence[str], base_commit: str) -> None:
    """Set files of a sandbox's repository back to a commit; those that it does not have are removed.

    Needs bash and git in the sandbox.

    Raises:
        EnvError: the sandbox was lost, or git failed.
    """
    if not paths:
        return
    folder = await make_folder(environment)
    listed = b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)
    await environment.write(f"{folder}/paths", listed)
    command = ["bash", "-c", _RESET, "reset", base_commit or "HEAD", f"{folder}/paths"]
    done = await environment.execute(command, timeout_s=RESET_TIMEOUT_S, cwd=environment.workdir)
    if done.exit_code != 0:
        evidence = done.stderr.decode("utf-8", "replace")[-2000:]
        raise EnvError(
            "reset_paths", "files could not be set back", retryable=done.timed_out, evidence=evidence
        )
    await environment.execute(["rm", "-rf", folder], timeout_s=RESET_TIMEOUT_S, cwd="/")


def _changes_configuration(path: str, data: bytes) -> bool:
    """Whether a change of a file with many purposes touches the part that is about tests.

    A patch shows hunks, not files: a changed line counts if it is a key that only test runners have, or if
    it follows the head of a section of theirs within its hunk.
    """
    name = PurePosixPath(path).name
    keys, sections = _KEYS.get(name), _SECTIONS.get(name)
    if keys is None:
        return False
    if re.search(rb"^(?:GIT binary patch|Binary files )", data, re.MULTILINE):
        return True  # nobody can see what changed
    inside = False
    for mark, line in _lines(data):
        if name == "pyproject.toml":
            line = _plain_toml(line)
        if mark == "@":
            inside = False
        elif sections is not None and _OPENS.match(line):
            inside = sections.match(line.strip()) is not None
            if inside and mark in "+-":
                return True
        elif mark in "+-" and (inside or keys.match(line)):
            return True
    return False


_CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def _plain_toml(line: str) -> str:
    """A line without blanks and quotes, which keys and heads may have: `[tool . "pytest".ini_options]`."""
    plain = _CODE.sub(lambda found: chr(min(int(found[1] or found[2], 16), 0x10FFFF)), line)
    return re.sub(r"[\s\"']", "", plain)


def _lines(data: bytes) -> Iterator[tuple[str, str]]:
    """Mark and text of each line of the hunks; a hunk's head has the mark `@`."""
    inside = False
    for raw in data.decode("utf-8", "replace").split("\n"):
        if raw.startswith("@@ "):
            inside = True
            yield "@", raw
        elif inside and raw[:1] in ("+", "-", " "):
            yield raw[0], raw[1:].rstrip("\r")


def _shown(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_HEADS = ("--- ", "+++ ", "rename from ", "rename to ", "copy from ", "copy to ")


def _paths(data: bytes) -> tuple[str, ...]:
    """The names in the head of one file's part."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    found: list[str] = []
    for line in lines[1:]:
        if line.startswith(("@@ ", "GIT binary patch", "Binary files ")):
            break
        head = next((head for head in _HEADS if line.startswith(head)), None)
        if head is None:
            continue
        name = _unquoted(line[len(head) :].rstrip("\t"))
        if head in ("--- ", "+++ "):
            if name == "/dev/null":
                continue
            name = name.partition("/")[2]
        found.append(name)
    if not found:  # an empty or a binary file, or a mode alone: the first line says it, twice the same
        found.append(_name_of_head(lines[0].removeprefix("diff --git ").rstrip("\r")))
    return tuple(dict.fromkeys(found))


def _name_of_head(text: str) -> str:
    """`a/NAME b/NAME`, either quoted as in C."""
    if text.startswith('"'):
        return _unquoted(text[: (len(text) - 1) // 2]).partition("/")[2]
    return text[: (len(text) - 1) // 2].partition("/")[2]


_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def _unquoted(name: str) -> str:
    if not (name.startswith('"') and name.endswith('"') and len(name) > 1):
        return name

    def plain(found: re.Match[bytes]) -> bytes:
        code = found[1]
        return bytes([int(code, 8) & 255]) if len(code) == 3 else _LETTERS.get(code, code)

    raw = name[1:-1].encode("utf-8", "surrogateescape")
    return _ESCAPE.sub(plain, raw).decode("utf-8", "surrogateescape")
