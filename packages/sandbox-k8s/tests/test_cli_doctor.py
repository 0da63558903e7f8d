"""``doctor`` about a cluster: what works, what does not, and what to do about it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sandbox_k8s import ClientConfig, KubernetesConfig, LocalConfig, SandboxClient
from sandbox_k8s.cli import main
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import permissions
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import PodApi
from sandbox_k8s.kubernetes.config import Injection
from sandbox_k8s.kubernetes.doctor import admission, capacity
from sandbox_k8s.kubernetes.doctor.probe import _inside
from sandbox_k8s.testing import FakeCluster, FakeClusterConfig, RefusalError, why_no_process_pods

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
Doctor = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def fake_pods(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "status")


@pytest.fixture
def cluster(fake_pods: Any) -> Iterator[FakeCluster]:
    allocatable = {"cpu": "4", "memory": "16Gi", "ephemeral-storage": "100Gi", "pods": "110"}
    config = FakeClusterConfig(pods=fake_pods, speed=50, allocatable=allocatable)
    with FakeCluster(config) as cluster:
        yield cluster


@pytest.fixture
def doctor(cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """The exit code and the findings by what they are about."""

    def run(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
        given = ["--kubeconfig", str(cluster.kubeconfig), "--run-key-file", str(tmp_path / "key"), "--json"]
        code = main(["doctor", *given, *words])
        return code, {one["what"]: one for one in json.loads(capsys.readouterr().out)}

    return run


def test_a_cluster_in_which_all_is_well(doctor: Doctor, cluster: FakeCluster) -> None:
    code, found = doctor("--no-start")
    assert code == 0
    assert {one["verdict"] for one in found.values()} == {"works", "advice"}
    assert found["api server"]["says"].startswith("v1.36.3, answers within ")
    assert found["rights of workers"]["says"] == (
        "pods: create get list watch patch delete; events: list watch"
    )
    assert found["pod"]["says"] == "a sandbox of 1 cpu, 2 GiB memory, 4 GiB disk is accepted (dry run)"
    assert "room for 4 sandboxes" in found["nodes"]["says"]
    assert cluster.pods() == []
    assert cluster.requests["POST pods"] == 3


def test_each_line_is_one_finding_with_its_verdict(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--kubeconfig", str(cluster.kubeconfig)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line[:9].rstrip() for line in lines} == {"works", "advice"}
    assert lines[0].split()[:2] == ["works", "cluster"]
    assert "a sandbox needs --image" in lines[-1]


def test_each_missing_verb_is_named_with_what_fails_without_it(doctor: Doctor, cluster: FakeCluster) -> None:
    cluster.forbid("patch", "pods")
    cluster.forbid("create", "pods/proxy")
    cluster.forbid("list", "nodes")
    code, found = doctor("--no-start")
    assert code == 3
    assert found["rights of workers"]["verdict"] == "does not"
    assert "may not patch pods: changes of owner and renewal; apply: " in found["rights of workers"]["says"]
    # Another way may lead to the launchers, and nothing but people's tools reads nodes.
    assert found["rights for api_proxy"]["verdict"] == "advice"
    assert "create pods/proxy" in found["rights for api_proxy"]["says"]
    assert found["nodes"] == {
        "what": "nodes", "verdict": "advice", "says": 'not known: user "fake" may not list nodes'
    }  # fmt: skip


def test_a_way_that_the_run_insists_on_is_needed(doctor: Doctor, cluster: FakeCluster) -> None:
    cluster.forbid("create", "pods/proxy")
    code, found = doctor("--no-start", "--data-path", "api_proxy")
    assert (code, found["rights for api_proxy"]["verdict"]) == (3, "does not")


def test_what_admission_says_is_passed_on(doctor: Doctor, cluster: FakeCluster) -> None:
    quota = 'pods "sbx-0000000000000000" is forbidden: exceeded quota: q, requested: pods=1, used: pods=9'
    cluster.refuse_creates(RefusalError(403, "Forbidden", quota))
    code, found = doctor("--no-start")
    assert (code, found["pod"]["verdict"]) == (3, "does not")
    assert "exceeded quota: q" in found["pod"]["says"]
    assert "ResourceQuota" in found["pod"]["says"]


def test_the_level_of_pod_security_is_read_of_a_refusal(doctor: Doctor, cluster: FakeCluster) -> None:
    ours = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    privileged = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged'
    cluster.refuse_creates(RefusalError(403, "Forbidden", ours), RefusalError(403, "Forbidden", privileged))
    code, found = doctor("--no-start")
    assert code == 3
    assert "runAsNonRoot" in found["pod"]["says"]
    assert "restricted" in found["pod security"]["says"]
    assert "run_as_user" in found["pod security"]["says"]


@pytest.mark.anyio
@pytest.mark.parametrize(("wanted", "verdict"), [(True, "does not"), (False, "advice")])
async def test_an_api_server_without_image_volumes(cluster: FakeCluster, wanted: bool, verdict: str) -> None:
    says = 'Pod "x" is invalid: spec.volumes[2]: Required value: must specify a volume type'
    cluster.refuse_creates(RefusalError(422, "Invalid", says))
    config = msgspec.structs.replace(CONFIG, kubeconfig=cluster.kubeconfig)
    api = PodApi(ApiAccess(config), config, SystemClock())
    found = await admission._injection(api, config, knows_injection=wanted)
    assert (found.verdict, "must specify a volume type; take Injection(kind='init_copy')" in found.says) == (
        verdict, True
    )  # fmt: skip
    assert (await admission._injection(api, config, knows_injection=wanted)).verdict == "works"
    api.close()


@pytest.mark.skipif(bool(why_no_process_pods()), reason=why_no_process_pods())
@pytest.mark.parametrize("fake_pods", ["process"], indirect=True)
def test_a_real_sandbox_is_started_and_every_way_to_it_tried(doctor: Doctor, cluster: FakeCluster) -> None:
    words = ("--image", "example.com/any:1", "--tools-image", "example.com/tools:1")
    code, found = doctor(*words)
    assert code == 0, found
    tried = ("start", "pod_ip", "api_proxy", "port_forward", "inside", "stop")
    assert [found[name]["verdict"] for name in tried] == ["works"] * len(tried), found
    assert "bash" in found["inside"]["says"]
    assert cluster.pods() == []


@pytest.mark.anyio
async def test_start_up_files_and_the_first_python_are_told(root: Path) -> None:
    """SWE-agent/mini-swe-agent#773: nobody could tell which Python commands got, and why."""
    async with SandboxClient.local(LocalConfig(root=root, isolation="process")) as client:
        sandbox = await client.start()
        home = (await sandbox.execute("echo $HOME")).stdout_text.strip()
        await sandbox.write(f"{home}/env/bin/python3", b"#!/bin/sh\n", mode=0o755)
        await sandbox.write(f"{home}/.bashrc", b"PATH=~/env/bin:$PATH\n")
        found = await _inside(sandbox, SystemClock())
    assert found.verdict == "works"
    assert f", {home}/env/bin/python3, " in found.says
    assert found.says.endswith(", ~/.bashrc")


def test_a_sandbox_that_does_not_start_is_explained(doctor: Doctor, cluster: FakeCluster) -> None:
    cluster.doom("image-not-found")
    code, found = doctor("--image", "example.com/none:1", "--tools-image", "example.com/tools:1")
    assert (code, found["start"]["verdict"]) == (3, "does not")
    assert "image_not_found" in found["start"]["says"]
    assert all("deletionTimestamp" in pod["metadata"] for pod in cluster.pods())


def test_a_cluster_that_does_not_answer_is_a_finding(
    tmp_path: Path, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = tmp_path / "silent"
    silent.write_text(cluster.kubeconfig.read_text().replace(cluster.url, "http://127.0.0.1:1"))
    (tmp_path / "run.toml").write_text("api_patience_s = 0.1\n[injection]\nkind = 'baked'\n")
    words = ["doctor", "--kubeconfig", str(silent), "--config", str(tmp_path / "run.toml"), "--json"]
    assert main(words) == 3
    found = json.loads(capsys.readouterr().out)
    assert [one["verdict"] for one in found] == ["works", "does not"]
    assert "http://127.0.0.1:1" in found[1]["says"]
    assert "does not answer: Connection refused; check the address" in found[1]["says"]


@pytest.mark.cluster
@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
def test_a_real_cluster(config: ClientConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert isinstance(config, KubernetesConfig)
    assert config.injection.image is not None
    assert config.image is not None
    file = tmp_path / "run.toml"
    file.write_text(f"cpu = 0.2\nmemory_bytes = {128 << 20}\ndisk_bytes = {100 << 20}\n")
    words = ["doctor", "--json", "--config", str(file), "--kubeconfig", str(config.kubeconfig)]
    words += [
        "--namespace",
        config.namespace,
        "--run",
        config.run,
        "--run-key-file",
        str(config.run_key_file),
    ]
    words += ["--image", config.image, "--tools-image", config.injection.image]
    assert main(words) == 0
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    tried = ["rights of workers", "pod", "injection", "nodes", "image volumes"]
    tried += ["start", "pod_ip", "api_proxy", "port_forward", "inside", "stop"]
    assert {name: found[name]["verdict"] for name in tried} == dict.fromkeys(tried, "works"), found


CONFIG = KubernetesConfig(
    injection=Injection(kind="image_volume", image="example.com/tools:1"), cpu=2.0, memory_bytes=4 << 30
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1500m", 1.5), ("16Gi", 16 * 2**30), ("1e3", 1000.0), ("0", 0.0), ("128974848", 128974848.0),
     ("123Mi", 123 * 2**20), ("2k", 2000.0)],
)  # fmt: skip
def test_quantities(text: str, value: float) -> None:
    assert capacity.quantity(text) == value


def test_a_word_that_is_no_quantity_is_refused() -> None:
    with pytest.raises(ValueError, match="'12 eggs' is no quantity"):
        capacity.quantity("12 eggs")


def test_the_tightest_line_of_a_quota_counts() -> None:
    hard = {"requests.cpu": "10", "limits.memory": "20Gi", "count/secrets": "1"}
    quota = {"metadata": {"name": "q"}, "status": {"hard": hard, "used": {"requests.cpu": "7500m"}}}
    (found,) = capacity.of_quotas([quota], CONFIG)
    assert (found.verdict, found.says) == (
        "works", "q: room for 1 more sandboxes (requests.cpu: 7500m of 10 used)"
    )  # fmt: skip
    quota["status"]["used"]["limits.memory"] = "18Gi"
    (found,) = capacity.of_quotas([quota], CONFIG)
    assert (found.verdict, found.says) == (
        "does not", "q: room for 0 more sandboxes (limits.memory: 18Gi of 20Gi used)"
    )  # fmt: skip
    unrelated = {"metadata": {"name": "other"}, "status": {"hard": {"count/secrets": "1"}, "used": {}}}
    assert [one.says for one in capacity.of_quotas([unrelated], CONFIG)] == ["none that limits sandboxes"]


def test_nodes_that_take_no_sandbox_do_not_count() -> None:
    def node(name: str, architecture: str = "amd64", *, ready: str = "True", **spec: Any) -> dict[str, Any]:
        return {
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/arch": architecture}},
            "spec": spec,
            "status": {
                "conditions": [{"type": "Ready", "status": ready}],
                "allocatable": {"cpu": "7910m", "memory": "31Gi", "ephemeral-storage": "90Gi", "pods": "110"},
                "nodeInfo": {"containerRuntimeVersion": "containerd://1.7.20"},
            },
        }

    taint = {"key": "gpu", "effect": "NoSchedule"}
    nodes = [
        node("good"), node("arm", "arm64"), node("lost", ready="Unknown"),
        node("cordoned", unschedulable=True), node("tainted", taints=[taint]),
    ]  # fmt: skip
    room, volumes = capacity.of_nodes(nodes, CONFIG)
    assert room.verdict == "works"
    assert "5 nodes, 4 with kubernetes.io/arch=amd64, 1 of them ready and open; room for 3" in room.says
    assert (volumes.verdict, "init_copy" in volumes.says) == ("does not", True)
    assert [one.verdict for one in capacity.of_nodes(nodes[1:2], CONFIG)] == ["does not"]


def test_limits_runtime_classes_and_network_policies() -> None:
    limits = {"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container", "max": {"cpu": "1"}}]}}
    (found,) = capacity.of_limit_ranges([limits], CONFIG)
    assert (found.verdict, "l allows at most 1 cpu per Container" in found.says) == ("does not", True)
    (found,) = capacity.of_runtime_classes([{"metadata": {"name": "gvisor"}}], CONFIG)
    assert (found.verdict, "gvisor" in found.says) == ("advice", True)
    assert capacity.of_network_policies([], CONFIG)[0].verdict == "advice"
    closing = {
        "metadata": {"name": "closed"},
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "sandbox-k8s"}},
            "policyTypes": ["Egress"],
        },
    }
    assert capacity.of_network_policies([closing], CONFIG)[0].verdict == "works"


def test_the_rules_of_a_role_name_each_resource_once() -> None:
    rules = permissions.rules(permissions.WORKER + permissions.API_PROXY + permissions.REAPER)
    assert [rule["resources"] for rule in rules] == [["pods"], ["events"], ["pods/proxy"]]
    assert rules[0]["verbs"] == ["create", "get", "list", "watch", "patch", "delete"]
