"""`load`: the one place where an adapter imports a trainer."""

from __future__ import annotations

import importlib
from types import ModuleType

from trainer_bridge.errors import TrainerMissingError


def load(module: str, install: str) -> ModuleType:
    """Import a module that this package does not depend on.

    Args:
        module: its full name.
        install: what the user has to install, for the error's text.

    Raises:
        TrainerMissingError: it is not there, or something that it imports is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrainerMissingError(
            f"this adapter needs {module!r} in the trainer's environment: install {install} ({error})"
        ) from error
