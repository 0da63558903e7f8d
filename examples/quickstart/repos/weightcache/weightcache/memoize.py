"""A decorator that keeps the results of a function in a cache."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

from weightcache.cache import WeightCache

P = ParamSpec("P")
R = TypeVar("R")

_ABSENT: Any = object()


def cached(cache: WeightCache[Hashable, Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Answer calls from ``cache``; the key is made of the function and its arguments.

    Several functions may share one cache. A call that raises is not remembered.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            key = (function, args, tuple(sorted(kwargs.items())))
            found = cache.get(key, _ABSENT)
            if found is not _ABSENT:
                return found
            result = function(*args, **kwargs)
            cache.put(key, result)
            return result

        return wrapper

    return decorate
