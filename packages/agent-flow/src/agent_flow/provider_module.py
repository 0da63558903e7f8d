"""The module of a provider: where it is sought, and what it means when it cannot be imported."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from agent_flow.errors import AgentFlowError, ProviderError

EXTRAS = {
    "aiohttp": "engines",
    "e2b": "e2b",
    "kubernetes": "k8s",
    "litellm": "minisweagent",
    "minisweagent": "minisweagent",
    "pyarrow": "parquet",
    "sandbox_k8s": "sandbox",
    "swebench": "swebench",
    "trainer_bridge": "bridge",
}
"""Which extra of this package brings a module's package."""


@contextmanager
def searched(folders: tuple[Path, ...]) -> Generator[None]:
    """Put folders in front of Python's path for the time of the context, and take exactly these away again.

    Whatever was imported stays imported; an import that happens later does not see the folders.
    """
    added = [str(folder) for folder in folders]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            if folder in sys.path:
                sys.path.remove(folder)


@contextmanager
def translated(what: str, where: str) -> Generator[None]:
    """Name the provider when foreign code fails; our own errors pass as they are.

    Raises:
        ProviderError: with the error's own type, text and line.
    """
    try:
        yield
    except AgentFlowError:
        raise
    except (Exception, SystemExit) as error:
        raise failure(what, error, where) from error


def load_class(what: str, target: str, where: str, folders: tuple[Path, ...]) -> type:
    """The class that `module:Class` names.

    Args:
        what: The provider, for errors.
        target: `module:Class`.
        where: Where it is named, for errors.
        folders: `python_path`, which must be on Python's path already.

    Raises:
        ProviderError: there is no such module or class, or the module fails.
    """
    name, _, attribute = target.partition(":")
    if not name or not attribute.isidentifier():
        raise ProviderError(f"{what} is not of the form 'module:Class'", where=where)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise _no_module(what, name, error.name, where, folders) from error
        raise failure(f"{what} cannot be imported", error, where) from error
    except AgentFlowError:
        raise
    except (Exception, SystemExit) as error:
        raise failure(f"{what} cannot be imported", error, where) from error
    _check_origin(what, name, where, folders)
    found = vars(module).get(attribute)
    if not isinstance(found, type):
        raise ProviderError(
            f"{what}: {target} is not a provider: a class with a `Config` type, built with (config, context)",
            where=where,
            fix=f"look into {module.__file__ or name}",
        )
    return found


def failure(what: str, error: BaseException, where: str) -> ProviderError:
    """Why a provider cannot be used. Only a package that is really absent is called not installed."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if not _installed(package):
            extra = EXTRAS.get(package)
            return ProviderError(
                f"{what}: it needs the package {package!r}, which is not installed",
                where=where,
                fix=f"pip install 'agent-flow[{extra}]'" if extra else f"install the package of {package!r}",
            )
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        at = f" ({error.filename}:{error.lineno})"
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return ProviderError(f"{what}: {text}{at}", where=where, fix="--debug shows where it comes from")


def _installed(package: str) -> bool:
    if package in sys.modules:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _no_module(what: str, name: str, absent: str, where: str, folders: tuple[Path, ...]) -> ProviderError:
    looked = f"; python_path is {', '.join(map(str, folders))}" if folders else ""
    package = name.partition(".")[0]
    if absent != package:
        return ProviderError(f"{what}: {package!r} has no module {absent!r}{looked}", where=where)
    return ProviderError(
        f"{what} needs the module {absent!r}, which is not installed and in no folder of python_path{looked}",
        where=where,
        fix='a file of your own is found with python_path = ["FOLDER"] at the top of the configuration',
    )


def _check_origin(what: str, name: str, where: str, folders: tuple[Path, ...]) -> None:
    """A module that was imported before, from elsewhere, must not stand in for the one of `python_path`."""
    top = name.partition(".")[0]
    wanted = importlib.machinery.PathFinder.find_spec(top, [str(folder) for folder in folders])
    loaded = sys.modules[top].__spec__
    if wanted is None or wanted.origin is None or loaded is None or wanted.origin == loaded.origin:
        return
    raise ProviderError(
        f"{what}: a module {top!r} was already imported from {loaded.origin}, "
        f"and python_path has another in {wanted.origin}",
        where=where,
        fix="give the module a name of its own",
    )
