"""The part of the standard library that the launcher can come to import."""

import encodings
import modulefinder
import pkgutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Reached only through interactive, network, GUI or testing corners of the modules that the launcher uses;
# each of those imports is inside a function or behind `except ImportError`.
_NEVER = (
    "asyncio", "bdb", "cmd", "code", "codeop", "concurrent", "ctypes._aix", "ctypes.macholib", "ctypes.util",
    "ctypes.wintypes", "curses", "dbm", "decimal", "_decimal", "_pydecimal", "difflib", "distutils",
    "doctest", "ensurepip", "fractions", "ftplib", "getpass", "http.cookiejar", "idlelib",
    "importlib.metadata", "importlib.resources", "lib2to3", "multiprocessing", "netrc", "nturl2path",
    "optparse", "pdb", "pickle", "_pickle", "_compat_pickle", "plistlib", "pprint", "pty", "py_compile",
    "pydoc", "readline", "runpy",
    "secrets", "sqlite3", "ssl", "_ssl", "statistics", "_strptime", "sysconfig", "test", "tkinter",
    "tracemalloc", "tty", "turtle", "unittest", "urllib.error", "urllib.request", "urllib.response",
    "webbrowser", "xml", "xmlrpc",
)  # fmt: skip
# `read_file` decodes whatever the caller names.
_CODEC_MODULES = (
    "_codecs_cn", "_codecs_hk", "_codecs_iso2022", "_codecs_jp", "_codecs_kr", "_codecs_tw",
    "_multibytecodec",
)  # fmt: skip
_WINDOWS_CODECS = ("encodings.mbcs", "encodings.oem")


@dataclass(frozen=True)
class Modules:
    """What to carry.

    Attributes:
        sources: Python files, by their path below the standard library's folder.
        extensions: Compiled modules, by file name.
    """

    sources: dict[str, Path]
    extensions: dict[str, Path]


def used_by(launcher: Path, programs: Sequence[str]) -> Modules:
    """Everything that ``launcher``'s ``programs`` import, also inside functions, and every text codec.

    Args:
        launcher: The launcher's folder.
        programs: Names of its modules.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    dynload = stdlib / "lib-dynload"
    finder = modulefinder.ModuleFinder(
        path=[str(launcher.parent), str(stdlib), str(dynload)], excludes=list(_NEVER)
    )
    for name in programs:
        finder.import_hook(name)
    for codec in pkgutil.iter_modules(encodings.__path__, "encodings."):
        if codec.name not in _WINDOWS_CODECS:
            finder.import_hook(codec.name)
    named = (vars(module)["__file__"] for module in finder.modules.values())
    files = [Path(name) for name in named if name]
    extensions = {path.name: path for path in files if path.parent == dynload}
    for name in _CODEC_MODULES:
        extensions |= {path.name: path for path in dynload.glob(f"{name}.*.so")}
    sources = {
        path.relative_to(stdlib).as_posix(): path
        for path in files
        if path.suffix == ".py" and stdlib in path.parents
    }
    return Modules(dict(sorted(sources.items())), dict(sorted(extensions.items())))
