"""Settings of runs of a test's own, on the fake and on a real cluster, and what is left of them."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
from sandbox_k8s import ClientConfig, LocalConfig, SandboxClient
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import Request
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.kubernetes.records import selector
from sandbox_k8s.testing import FakeCluster

KUBECONFIG = os.environ.get("SANDBOX_K8S_KUBECONFIG", "")


class ClusterImages(NamedTuple):
    """Names of images that the nodes of the cluster have or can pull."""

    sandbox: str
    tools: str


def fake_config(folder: Path, fake: FakeCluster) -> KubernetesConfig:
    """A run of one's own on the fake cluster."""
    config = run_config(folder, ClusterImages("example.com/any:1", "example.com/tools:1"))
    return msgspec.structs.replace(config, kubeconfig=fake.kubeconfig)


def cluster_config(folder: Path, images: ClusterImages) -> KubernetesConfig:
    """A run of one's own on the cluster that the environment names."""
    namespace = os.environ.get("SANDBOX_K8S_NAMESPACE", "default")
    return msgspec.structs.replace(
        run_config(folder, images), kubeconfig=Path(KUBECONFIG), namespace=namespace
    )


def run_config(folder: Path, images: ClusterImages) -> KubernetesConfig:
    return KubernetesConfig(
        injection=Injection(kind="image_volume", image=images.tools),
        run=f"test-{os.urandom(6).hex()}",
        run_key_file=folder / "run.key",
        image=images.sandbox,
        image_pull_policy="IfNotPresent",
        cpu=0.3,
        memory_bytes=256 << 20,
        disk_bytes=200 << 20,
        grace_s=0.3,
        start_timeout_s=60.0,
    )


def pods_of(config: KubernetesConfig) -> list[str]:
    """The pods of a run that nobody is deleting, asked for without a client of ours."""
    access = ApiAccess(config)
    query = {"labelSelector": selector(config.run)}
    path = f"api/v1/namespaces/{config.namespace}/pods"
    answer = Request("GET", path, query).send(access.new_pool(), access, 20.0)
    assert answer.status == 200, answer.data
    found = [pod["metadata"] for pod in json.loads(answer.data)["items"]]
    return [one["name"] for one in found if "deletionTimestamp" not in one]


def client_of(config: ClientConfig) -> SandboxClient:
    """A client, not open yet."""
    if isinstance(config, KubernetesConfig):
        return SandboxClient.kubernetes(config)
    assert isinstance(config, LocalConfig)
    return SandboxClient.local(config)
