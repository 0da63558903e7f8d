"""A fake Kubernetes cluster for tests: a real API over HTTP and WebSocket, and pods that live.

As a pytest plugin (see `plugin`) it gives the fixture ``fake_cluster``; without pytest use `FakeCluster`.
`FaultProxy` stands in front of it, or of a real cluster.
"""

from .answers import RefusalError
from .cluster import FakeCluster, FakeClusterConfig, why_no_process_pods
from .fault_proxy import FaultProxy, Faults, Upstream

__all__ = [
    "FakeCluster",
    "FakeClusterConfig",
    "FaultProxy",
    "Faults",
    "RefusalError",
    "Upstream",
    "why_no_process_pods",
]
