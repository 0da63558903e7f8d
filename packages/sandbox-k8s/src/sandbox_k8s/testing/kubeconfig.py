"""A kubeconfig file for a server of this machine."""

import json
from typing import Any


def kubeconfig(url: str, token: str | None) -> str:
    """The text of the file (JSON is YAML).

    Args:
        url: Of the API server, without TLS.
        token: What clients show; None for nothing.
    """
    user = {} if token is None else {"token": token}
    words: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "fake", "user": user}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
    }
    return json.dumps(words, indent=1) + "\n"
