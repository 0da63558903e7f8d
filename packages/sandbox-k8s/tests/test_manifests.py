"""The shipped manifests: what the YAML says, who may do what, who reaches whom, and what the reaper is."""

import ipaddress
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_k8s import ConfigError, Injection, KubernetesConfig, SandboxSpec
from sandbox_k8s.cli import main
from sandbox_k8s.cli.main import _parser
from sandbox_k8s.cli.where import chooses_cluster
from sandbox_k8s.kubernetes import permissions, records
from sandbox_k8s.kubernetes.manifest import pod_manifest
from sandbox_k8s.kubernetes.shipped import KINDS, ManifestOptions, manifests, objects
from sandbox_k8s.kubernetes.shipped.yaml import document

yaml = pytest.importorskip("yaml", reason="the extra sandbox-k8s[kubernetes] brings a YAML reader")
IMAGE = "registry.example/sandbox-k8s:1"
TRICKY = st.sampled_from(
    ["yes", "No", "null", "1e3", "0x1F", "1_000", "12:30:00", "- a", "a: b", "# c", "", "~"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | TRICKY
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | TRICKY, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=5) | TRICKY, VALUES, min_size=1, max_size=4))
def test_the_yaml_says_what_was_meant(value: dict[str, Any]) -> None:
    assert yaml.safe_load(document(value, ["a comment: {", ""])) == value


def test_everything_is_one_stream_of_documents_with_comments() -> None:
    options = ManifestOptions(image=IMAGE, allow=("192.0.2.0/24:443",), dns=True)
    text = manifests("all", options)
    read = list(yaml.safe_load_all(text))
    assert read == objects("all", options)
    assert [one["kind"] for one in read] == [  # what is bound comes before what binds it
        *("ServiceAccount", "Role", "RoleBinding") * 2,
        *("NetworkPolicy", "NetworkPolicy", "CronJob"),
    ]
    assert {one["metadata"]["namespace"] for one in read} == {"default"}
    parts = "".join(manifests(kind, options) for kind in KINDS if kind != "all")  # type: ignore[arg-type]
    assert parts == text
    for one in permissions.WORKER:
        assert f"#   {one.name}: {one.why}\n" in text


def rules(kind: str, options: ManifestOptions) -> set[tuple[str, str]]:
    """Resource and verb of the Role of that name."""
    (role,) = [
        one for one in objects("rbac", options) if (one["kind"], one["metadata"]["name"]) == ("Role", kind)
    ]
    assert all(rule["apiGroups"] == [""] for rule in role["rules"])
    return {
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }


def test_a_role_has_the_verbs_of_the_data_paths_that_are_used() -> None:
    base = {("pods", verb) for verb in ("create", "get", "list", "watch", "patch", "delete")}
    base |= {("events", "list"), ("events", "watch")}
    assert rules("sandbox-k8s-worker", ManifestOptions(data_paths=("pod_ip",))) == base
    proxy = {("pods/proxy", verb) for verb in ("get", "create", "update")}
    assert rules("sandbox-k8s-worker", ManifestOptions(data_paths=("pod_ip", "api_proxy"))) == base | proxy
    forward = {("pods/portforward", "get"), ("pods/portforward", "create")}
    assert rules("sandbox-k8s-worker", ManifestOptions()) == base | proxy | forward
    assert rules("sandbox-k8s-reaper", ManifestOptions()) == {("pods", "list"), ("pods", "delete")}


def test_what_is_of_the_whole_cluster_is_asked_for_and_read_only() -> None:
    made = objects("rbac", ManifestOptions(namespace="rl", read_nodes=True))
    assert made[:6] == objects("rbac", ManifestOptions(namespace="rl"))
    role, binding, cluster_role, cluster_binding = made[6:]
    assert (role["kind"], cluster_role["kind"]) == ("Role", "ClusterRole")
    assert "namespace" not in {**cluster_role["metadata"], **cluster_binding["metadata"]}
    assert cluster_binding["metadata"]["name"] == "sandbox-k8s-reader-rl"
    worker = {"kind": "ServiceAccount", "name": "sandbox-k8s-worker", "namespace": "rl"}
    assert binding["subjects"] == cluster_binding["subjects"] == [worker]
    verbs = {verb for one in (role, cluster_role) for rule in one["rules"] for verb in rule["verbs"]}
    assert verbs <= {"get", "list"}


Pod = Mapping[str, str]
SANDBOX = {records.MANAGED_BY: "sandbox-k8s", records.RUN: "r", records.SANDBOX: "0" * 16}
WORKER = {"sandbox-k8s/worker": "true"}
WORKERS_NOT: Pod = {"app": "anything"}


def selected(policy: dict[str, Any], pod: Pod) -> bool:
    return policy["spec"]["podSelector"]["matchLabels"].items() <= pod.items()


def covers(block: dict[str, Any], address: str) -> bool:
    here = ipaddress.ip_address(address)
    inside = [here in ipaddress.ip_network(cidr) for cidr in (block["cidr"], *block.get("except", ()))]
    return inside[0] and not any(inside[1:])


def goes_out(options: ManifestOptions, pod: Pod, address: str, port: int, protocol: str = "TCP") -> bool:
    """What Kubernetes says: no policy, no limit; else any rule of any policy is enough."""
    policies = [one for one in objects("network-policy", options) if selected(one, pod)]
    policies = [one for one in policies if "Egress" in one["spec"]["policyTypes"]]
    if not policies:
        return True
    return any(
        ("ports" not in rule or {"protocol": protocol, "port": port} in rule["ports"])
        and any("ipBlock" in to and covers(to["ipBlock"], address) for to in rule["to"])
        for policy in policies
        for rule in policy["spec"]["egress"]
    )


def comes_in(
    options: ManifestOptions, pod: Pod, port: int, *, of: Pod = WORKERS_NOT, address: str = "192.0.2.9"
) -> bool:
    policies = [one for one in objects("network-policy", options) if selected(one, pod)]
    policies = [one for one in policies if "Ingress" in one["spec"]["policyTypes"]]
    if not policies:
        return True
    return any(
        {"protocol": "TCP", "port": port} in rule["ports"]
        and any(
            covers(source["ipBlock"], address)
            if "ipBlock" in source
            else source["podSelector"]["matchLabels"].items() <= of.items()
            for source in rule["from"]
        )
        for policy in policies
        for rule in policy["spec"]["ingress"]
    )


def test_sandboxes_reach_what_is_allowed_and_only_with_a_network() -> None:
    allow = ("0.0.0.0/0:443", "10.0.0.0/8:53/udp", "192.0.2.7/32", "[::/0]:443")
    options = ManifestOptions(allow=allow, deny=("10.96.0.0/12", "169.254.0.0/16", "fd00::/8"))
    opened = {**SANDBOX, records.NETWORK: "open"}
    for address, port, protocol, expected in (
        ("203.0.113.1", 443, "TCP", True),
        ("203.0.113.1", 80, "TCP", False),
        ("203.0.113.1", 443, "UDP", False),
        ("169.254.169.254", 443, "TCP", False),
        ("10.96.0.1", 443, "TCP", False),
        ("10.1.2.3", 53, "UDP", True),
        ("192.0.2.7", 22, "TCP", True),
        ("2001:db8::1", 443, "TCP", True),
        ("fd00:ec2::254", 443, "TCP", False),
    ):
        assert goes_out(options, opened, address, port, protocol) is expected, (address, port)
        # A label that nobody knows, or none, closes.
        for label in ({records.NETWORK: "closed"}, {records.NETWORK: "ajar"}, {}):
            assert not goes_out(options, {**SANDBOX, **label}, address, port, protocol)
        assert not goes_out(ManifestOptions(), opened, address, port, protocol)
    assert goes_out(options, {"app": "of somebody else"}, "203.0.113.1", 80)


def test_workers_alone_reach_launchers() -> None:
    options = ManifestOptions(port=9000, worker_cidrs=("198.51.100.0/24",))
    sandbox = {**SANDBOX, records.NETWORK: "open"}
    assert comes_in(options, sandbox, 9000, of=WORKER)
    assert comes_in(options, sandbox, 9000, address="198.51.100.3")
    for port, of in ((9000, {}), (9000, sandbox), (22, WORKER), (9000, {"sandbox-k8s/worker": "no"})):
        assert not comes_in(options, sandbox, port, of=of)
    (closed, _) = objects("network-policy", ManifestOptions(worker_namespace="trainers"))
    (source,) = closed["spec"]["ingress"][0]["from"]
    # In one entry: those pods in that namespace. In two it would be all pods of that namespace as well.
    assert source["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "trainers"}}
    assert source["podSelector"] == {"matchLabels": WORKER}


def test_policies_select_the_pods_that_are_made() -> None:
    config = KubernetesConfig(injection=Injection(kind="baked"), image="any:1", run="a-run", port=9000)
    for network, label in ((True, "open"), (False, "closed")):
        pod = pod_manifest(
            SandboxSpec(network=network), config, sandbox_id="0" * 16, token_hash="0" * 64, annotations={}
        )
        labels = pod["metadata"]["labels"]
        for run, expected in ((None, True), ("a-run", True), ("another", False)):
            closed, opened = objects("network-policy", ManifestOptions(run=run, port=9000))
            assert selected(closed, labels) is expected
            assert selected(opened, labels) is (expected and label == "open")
        (port,) = pod["spec"]["containers"][0]["ports"]
        assert closed["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port["containerPort"]}]


def test_the_reapers_pod_is_restricted_and_no_sandbox_itself() -> None:
    (job,) = objects("reaper", ManifestOptions(image=IMAGE, image_pull_policy="Always", namespace="rl"))
    template = job["spec"]["jobTemplate"]["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("sandbox-k8s-reaper", True)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (container["image"], container["imagePullPolicy"]) == (IMAGE, "Always")
    # Else a sweep would take it for a sandbox, and a policy cut it off from the API server.
    assert records.MANAGED_BY not in template["metadata"]["labels"]


@pytest.mark.parametrize("run", [None, "a-run", "Odd_Run.1" + "x" * 50])
def test_the_reapers_command_is_one_that_the_program_knows(run: str | None) -> None:
    (job,) = objects("reaper", ManifestOptions(image=IMAGE, namespace="rl", run=run))
    assert len(job["metadata"]["name"]) <= 52
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    program, *words = container["command"]
    options = _parser().parse_args(words)
    assert program == "sandbox-k8s"
    assert chooses_cluster(options)
    assert (options.namespace, options.run, options.dry_run) == ("rl", run, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"namespace": "No_Name"}, "namespace 'No_Name'"),
        ({"run": "a b"}, "run 'a b'"),
        ({"port": 0}, "port"),
        ({"allow": ("anything",)}, "allow 'anything'"),
        ({"allow": ("10.0.0.1/8",)}, "has host bits set"),
        ({"allow": ("10.0.0.0/8:70000",)}, "no port 70000"),
        ({"allow": ("2001:db8::/32:443",)}, "2001:db8::/32:443"),
        ({"allow": ("169.254.169.254/32:80",)}, "lies within 169.254.0.0/16"),
        ({"deny": ("x",)}, "deny 'x'"),
        ({"worker_cidrs": ("y",)}, "worker_cidrs 'y'"),
        ({"worker_labels": {}}, "worker_labels"),
        ({"worker_labels": {"sandbox-k8s/run": "r"}}, "worker_labels"),
        ({"schedule": "@hourly"}, "schedule"),
    ],
)
def test_options_that_make_no_sense_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ManifestOptions(**given)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "manifests",
        "network-policy",
        "-n",
        "rl",
        "--allow",
        "0.0.0.0/0:443",
        "--deny",
        "10.0.0.0/8",
        "--dns",
    ]
    assert main([*words, "--worker-label", "app=trainer", "--worker-cidr", "192.0.2.0/24"]) == 0
    closed, opened = yaml.safe_load_all(capsys.readouterr().out)
    sources = closed["spec"]["ingress"][0]["from"]
    assert sources == [
        {"podSelector": {"matchLabels": {"app": "trainer"}}},
        {"ipBlock": {"cidr": "192.0.2.0/24"}},
    ]
    first, dns = opened["spec"]["egress"]
    assert {"10.0.0.0/8", "169.254.0.0/16"} <= set(first["to"][0]["ipBlock"]["except"])
    assert [one["port"] for one in dns["ports"]] == [53, 53]
    assert main(["manifests"]) == 2
    assert "--image" in capsys.readouterr().err


def test_the_commands_of_the_threat_model_work(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "threat-model.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("sandbox-k8s manifests")]
    words = shlex.split(line.partition("|")[0])
    assert main(words[1:]) == 0
    read = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {one["metadata"]["namespace"] for one in read} == {"rl-sandboxes"}
