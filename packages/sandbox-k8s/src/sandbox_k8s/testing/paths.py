"""What the path of a request names."""

from typing import NamedTuple

from .answers import no_such_resource
from .objects import Target
from .store import RESOURCES


class Path(NamedTuple):
    """A path below ``/api/v1``.

    Attributes:
        port: Of ``pods/NAME:PORT/proxy``; empty elsewhere.
    """

    target: Target
    port: str = ""


def read(path: str) -> Path:
    """Read a path that begins after ``/api/v1/``.

    Raises:
        RefusalError: 404; it names nothing that this server has.
    """
    words = path.split("/")
    namespace = ""
    if words[0] == "namespaces" and len(words) >= 3 and words[2] not in ("status", "finalize"):
        namespace, words = words[1], words[2:]
    plural, name, sub, *rest = [*words, "", "", ""]
    if plural not in RESOURCES or (namespace and not RESOURCES[plural].namespaced):
        raise no_such_resource()
    port = ""
    if sub == "proxy":
        name, _, port = name.partition(":")
    elif "".join(rest):
        raise no_such_resource()
    return Path(Target(plural, namespace, name, sub), port)
