"""The pytest plugin: a fake Kubernetes cluster for a test.

Loaded by pytest itself where the package is installed. A test names the fixture, and perhaps what the cluster
is to be like::

    import pytest
    from sandbox_k8s.testing import FakeCluster, FakeClusterConfig

    @pytest.mark.fake_cluster(pods="status", speed=20)
    def test_a_missing_image_is_reported(fake_cluster: FakeCluster) -> None:
        fake_cluster.doom("image-not-found")
        with my_operator(kubeconfig=fake_cluster.kubeconfig) as operator:
            assert operator.start_one_pod() == "no such image"
        assert fake_cluster.pods("default") == []

The words of the mark are those of `FakeClusterConfig`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .cluster import FakeCluster


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the mark."""
    config.addinivalue_line("markers", "fake_cluster(**settings): what the fixture fake_cluster is like")


@pytest.fixture
def fake_cluster(request: pytest.FixtureRequest) -> "Iterator[FakeCluster]":
    """A `FakeCluster` of the test's own; skips the test where its pods cannot have a process."""
    from .cluster import FakeCluster, FakeClusterConfig, why_no_process_pods

    mark = request.node.get_closest_marker("fake_cluster")
    settings: dict[str, Any] = {} if mark is None else dict(mark.kwargs)
    config = FakeClusterConfig(**settings)
    if config.pods == "process" and (why := why_no_process_pods()):
        pytest.skip(why)
    with FakeCluster(config) as cluster:
        yield cluster
