"""The words of kubelets, runtimes, registries and schedulers, and the failure class that each means.

Every table is tried from the top; the first pattern that is found wins, so the more specific stands first.
What a user chose (image names, paths, URLs) is taken out before: an image called ``unauthorized/app`` is no
authorization failure. The texts are those of containerd and of the kubelet as recorded, and of CRI-O, docker
and older kubelets as their public sources and reports have them.
"""

import re
from collections.abc import Iterable

from .failure import FailureName

_Table = tuple[tuple[str, FailureName], ...]

_PULL: _Table = (
    (r"couldn't parse image|invalid reference format|invalid image name", "image_name_invalid"),
    (r"pull policy of never", "image_not_present"),
    (r"no match for platform|no matching manifest for|exec format error", "image_architecture"),
    (r"no space left on device", "node_disk_full"),
    (r"429 too many requests|toomanyrequests|rate limit", "image_rate_limit"),
    (
        r"\b5\d\d (internal server error|bad gateway|service unavailable|gateway time-?out)",
        "image_registry_error",
    ),
    (r"unexpected status.*: 5\d\d\b", "image_registry_error"),
    (r"no such host", "image_registry_host_unknown"),
    (r"short read|unexpected eof|failed size validation|unexpected commit digest", "image_pull_cut"),
    (
        r"connection refused|connection reset|i/o timeout|no route to host|network is unreachable"
        r"|tls handshake timeout|context deadline exceeded|client\.timeout|server misbehaving"
        r"|temporary failure in name resolution|proxyconnect|: eof\b",
        "image_registry_unreachable",
    ),
    (r"x509:|tls: |server gave http response to https client", "image_registry_tls"),
    (
        r"403 forbidden|access denied|access to the resource is denied|no basic auth credentials"
        r"|unauthorized|authentication required|insufficient_scope|authorization failed|failed to authorize",
        "image_auth",
    ),
    (
        r"code = notfound|: not found|manifest unknown|manifest_unknown|name_unknown"
        r"|404 not found|does not exist",
        "image_not_found",
    ),
)

_START: _Table = (
    (r"exec format error", "image_architecture"),
    (r"unable to set memory limit|oom-?killed|memory limit too low", "oom_at_start"),
    (
        r"executable file not found|\b(exec|stat)\b.*(no such file or directory|not found)",
        "command_not_found",
    ),
    (r"\bexec\b.*(permission denied|is a directory)", "command_not_executable"),
    (r"no space left on device", "node_disk_full"),
)

_CREATE: _Table = (
    (r"no command specified", "command_missing"),
    *_START,
)

_CONFIG: _Table = (
    (
        r"(secret|configmap) .*not found|couldn't find key|references non-existent (secret|config)",
        "config_missing",
    ),
    (r"run ?as ?non-?root|runasuser|run as root", "container_config"),
)

_VOLUME: _Table = (
    (r"not registered|timed out|timeout|deadline exceeded|failed to sync", "volume_failed"),
    (
        r"(secret|configmap|persistentvolumeclaim) .*not found|references non-existent"
        r"|hostpath type check failed|no such file or directory|is not a directory",
        "volume_missing",
    ),
)

_SCHEDULE: _Table = (
    (r"persistentvolumeclaim .*not found|unbound immediate persistentvolumeclaim", "volume_missing"),
    # Some nodes may lack room and others not fit: room is what can come by itself.
    (r"insufficient |too many pods|free ports", "unschedulable_resources"),
    (
        r"\bwere (unschedulable|not ready)|node\.kubernetes\.io/(unreachable|not-ready|unschedulable)",
        "unschedulable_nodes_down",
    ),
    (
        r"node affinity|node selector|didn't match|untolerated taint|didn't satisfy|topology spread",
        "unschedulable_placement",
    ),
)

_EVICTION: _Table = (
    (r"node was low on resource|node has condition|pressure", "evicted_node_pressure"),
    (
        r"exceeds the (total )?limit|local storage usage|exceeds its local|usage of emptydir",
        "evicted_storage_limit",
    ),
)

_PULLED = re.compile(r'\bpull(?:ing)?(?: and unpack)? image "([^"]+)"', re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"')
_URL = re.compile(r"\b[a-z]+://\S+")
_PATH = re.compile(r"(?<!\S)/[^\s:]*")


def of_pull(text: str, image: str = "") -> FailureName | None:
    """Why an image cannot be pulled; None when the text is not known. `image` is taken out of the text."""
    return _look(_PULL, text, image)


def image_named_in(text: str) -> str:
    """The image that a text about a pull names; empty when it names none."""
    found = _PULLED.search(text)
    return "" if found is None else found[1]


def is_same_image(one: str, other: str) -> bool:
    """Whether two names are of one image: containerd writes ``docker.io/library/`` and ``:latest`` out."""
    return _whole_name(one) == _whole_name(other)


def _whole_name(image: str) -> str:
    first, slash, _ = image.partition("/")
    if not slash:
        image = f"docker.io/library/{image}"
    elif first != "localhost" and not set(first) & set(".:"):
        image = f"docker.io/{image}"
    last = image.rpartition("/")[2]
    return image if ":" in last or "@" in last else f"{image}:latest"


def of_start(text: str) -> FailureName | None:
    """Why a container's process cannot be started; None when the text is not known."""
    return _look(_START, text)


def of_create(text: str) -> FailureName | None:
    """Why a container cannot be created; None when the text is not known."""
    return _look(_CREATE, text)


def of_config(text: str) -> FailureName | None:
    """Why a container's settings cannot be resolved; None when the text is not known."""
    return _look(_CONFIG, text)


def of_volume(text: str) -> FailureName | None:
    """Why a volume cannot be mounted; None when the text is not known."""
    return _look(_VOLUME, text)


def of_schedule(text: str) -> FailureName | None:
    """Why there is no node; None when the text is not known."""
    # What follows "preemption:" says whether removing others would help, not what is missing.
    return _look(_SCHEDULE, text.partition("preemption:")[0])


def of_eviction(text: str) -> FailureName | None:
    """Whose limit an eviction was about; None when the text is not known."""
    return _look(_EVICTION, text)


def _look(table: _Table, text: str, *names: str) -> FailureName | None:
    plain = _without(text, names)
    return next((failure for pattern, failure in table if re.search(pattern, plain)), None)


def _without(text: str, names: Iterable[str]) -> str:
    """Small letters on one line, without what a user chose."""
    for name in filter(None, names):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "", text)
    for pattern, instead in ((_QUOTED, '""'), (_URL, ""), (_PATH, "/")):
        text = pattern.sub(instead, text)
    return " ".join(text.split()).lower()
