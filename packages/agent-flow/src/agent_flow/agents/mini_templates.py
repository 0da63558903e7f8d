"""mini-swe-agent's functions with templates that are compiled once.

It compiles its observation template anew for each command, which was half of a turn's processor time in this
process (`alone` of `benchmarks/agent_flow.py`: 2.9 of 5.8 ms).
"""

# pyright: basic
# mini-swe-agent is untyped.

from __future__ import annotations

from functools import lru_cache
from types import FunctionType, ModuleType, SimpleNamespace

from jinja2 import Template

_kept = lru_cache(maxsize=64)(Template)


def compiled_once(module: ModuleType) -> SimpleNamespace:
    """What a module of mini-swe-agent has, with a `Template` that its functions compile once.

    They are the module's own functions, as installed; the module is left as it is.
    """
    names = {**vars(module), "Template": _kept}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            own = FunctionType(value.__code__, names, name, value.__defaults__, value.__closure__)
            own.__kwdefaults__ = value.__kwdefaults__
            names[name] = own
    return SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("__")})
