"""Pods as the API server lists them."""

from typing import Any, NamedTuple


class Listing(NamedTuple):
    """Pods, and the version from which a watch goes on."""

    items: list[dict[str, Any]]
    resource_version: str


class Page(NamedTuple):
    """Some pods of a list.

    Attributes:
        begins: What came before is void: it is the first page, of a list begun anew perhaps.
    """

    items: list[dict[str, Any]]
    resource_version: str
    begins: bool
