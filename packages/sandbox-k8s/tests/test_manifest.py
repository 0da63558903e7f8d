"""The pod of a sandbox: what every one must say, whatever is asked for."""

import hashlib
import json
from importlib.metadata import version
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_k8s import ConfigError, Injection, KubernetesConfig, PodPlace, SandboxHandle, SandboxSpec
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.manifest import pod_manifest

TOKEN = "8c3ae6e0f9d64b31a1f3d5c7"
HASH = hashlib.sha256(TOKEN.encode()).hexdigest()

injections = st.sampled_from(
    [
        Injection(kind="image_volume", image="registry/tools:1"),
        Injection(kind="init_copy", image="registry/tools:1"),
        Injection(kind="baked"),
        Injection(kind="pip"),
    ]
)
COPIED = ("init_copy", "pip")
configs = st.builds(
    KubernetesConfig,
    injection=injections,
    image=st.just("python:3.12"),
    runtime_class=st.sampled_from([None, "gvisor"]),
    run_as_user=st.sampled_from([None, 1000]),
    read_only_root=st.booleans(),
    add_capabilities=st.sampled_from([(), ("CHOWN",)]),
    architecture=st.sampled_from(["amd64", "arm64"]),
    node_selector=st.sampled_from([{}, {"pool": "rl"}]),
    image_pull_policy=st.sampled_from([None, "Never"]),
)
specs = st.builds(
    SandboxSpec,
    image=st.sampled_from([None, "busybox:1"]),
    cpu=st.sampled_from([None, 0.25, 3.0]),
    memory_bytes=st.sampled_from([None, 1 << 30]),
    disk_bytes=st.sampled_from([None, 1 << 30]),
    workdir=st.sampled_from([None, "/testbed"]),
    network=st.booleans(),
    env=st.dictionaries(
        st.from_regex("[A-Z]{1,5}", fullmatch=True), st.text(max_size=5).filter(lambda t: "\0" not in t)
    ),
    labels=st.dictionaries(st.text(max_size=5), st.text(max_size=5)),
)


def manifest(spec: SandboxSpec, config: KubernetesConfig) -> dict[str, Any]:
    record = records.Record(
        key_id="k", workdir="/w", lease_s=60.0, detached_lease_s=60.0, created_ns=1, labels=spec.labels
    )
    annotations = records.annotations(record, request="r", epoch=1, expires_ns=2)
    return pod_manifest(spec, config, sandbox_id="0" * 16, token_hash=HASH, annotations=annotations)


@given(spec=specs, config=configs)
def test_what_every_pod_says(spec: SandboxSpec, config: KubernetesConfig) -> None:
    pod = manifest(spec, config)
    text = json.dumps(pod)
    assert TOKEN not in text
    assert HASH in text
    body = pod["spec"]
    assert (body["restartPolicy"], body["automountServiceAccountToken"]) == ("Never", False)
    assert body["enableServiceLinks"] is False
    assert body["activeDeadlineSeconds"] == config.max_lifetime_s
    assert body["nodeSelector"] == {"kubernetes.io/arch": config.architecture, **config.node_selector}
    assert body["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert body.get("runtimeClassName") == config.runtime_class
    assert ("runAsUser" in body["securityContext"]) == (config.run_as_user is not None)
    for container in [*body["containers"], *body.get("initContainers", [])]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert set(resources["limits"]) == {"cpu", "memory", "ephemeral-storage"}
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert not {"privileged", "hostPID", "hostNetwork", "hostPath"} & set(words(pod))


@given(spec=specs, config=configs)
def test_every_mount_has_its_volume_and_every_volume_its_limit(
    spec: SandboxSpec, config: KubernetesConfig
) -> None:
    """omnigent-ai/omnigent#6744: an unbounded volume filled the node, and its neighbours were evicted."""
    body = manifest(spec, config)["spec"]
    volumes = {volume["name"]: volume for volume in body["volumes"]}
    main = body["containers"][0]
    mounts = {mount["name"]: mount for mount in main["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert len({mount["mountPath"] for mount in mounts.values()}) == len(mounts)
    for volume in volumes.values():
        assert "image" in volume or "sizeLimit" in volume["emptyDir"]
    assert main["workingDir"] == (spec.workdir or "/workspace")
    assert ("tools" in mounts) == (config.injection.kind != "baked")
    assert all(mount.get("readOnly") for name, mount in mounts.items() if name == "tools")
    assert ("initContainers" in body) == (config.injection.kind in COPIED)
    # What a pod may write is limited in sum, and the copied tree counts: a small sandbox was evicted for it.
    disk = spec.disk_bytes or config.disk_bytes
    copied = int(volumes["tools"]["emptyDir"]["sizeLimit"]) if config.injection.kind in COPIED else 0
    assert int(main["resources"]["limits"]["ephemeral-storage"]) == disk + copied
    assert int(volumes["state"]["emptyDir"]["sizeLimit"]) == disk


@given(spec=specs, config=configs)
def test_the_record_in_the_annotations_comes_back(spec: SandboxSpec, config: KubernetesConfig) -> None:
    pod = manifest(spec, config)
    pod["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    held = records.read_record(pod, "c")
    assert (held.handle.labels, held.handle.epoch, held.handle.sandbox_id) == (spec.labels, 1, "0" * 16)
    assert (held.state, held.expires_ns, held.resource_version, held.ended) == ("running", 2, "7", False)
    assert len(held.handle.to_json()) < 4096


def test_the_handle_tells_which_run_of_the_container_and_which_image_it_is_of() -> None:
    pod = manifest(SandboxSpec(image="python:3.12"), KubernetesConfig(injection=Injection(kind="baked")))
    sidecar = {"name": "proxy", "restartCount": 9, "imageID": "example.com/proxy@sha256:9"}
    own = {"name": "sandbox", "restartCount": 2, "imageID": "docker.io/library/python@sha256:ab"}
    pod["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    pod["status"] = {"containerStatuses": [sidecar, own]}
    handle = records.read_record(pod, "c").handle
    assert isinstance(handle.place, PodPlace)
    assert (handle.place.uid, handle.place.restart_count, handle.place.image_digest) == ("u", 2, "sha256:ab")
    assert SandboxHandle.from_json(handle.to_json()) == handle


@pytest.mark.parametrize("state", ["suspended", "snapshot", "of a later release"])
def test_a_state_that_this_release_does_not_know_is_not_taken_for_running(state: str) -> None:
    """The first two are reserved; a reaper leaves such a pod alone until it ends."""
    pod = manifest(SandboxSpec(image="python:3.12"), KubernetesConfig(injection=Injection(kind="baked")))
    pod["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    pod["metadata"]["annotations"][records.STATE] = state
    with pytest.raises(ConfigError, match=f"is in state '{state}'"):
        records.read_record(pod, "c")


def test_pip_comes_from_the_sandboxs_own_image_and_brings_this_version() -> None:
    for asked, wanted in ((None, f"sandbox-k8s=={version('sandbox-k8s')}"), ("/w.whl", "/w.whl")):
        config = KubernetesConfig(injection=Injection(kind="pip", requirement=asked), image="python:3.12")
        body = manifest(SandboxSpec(), config)["spec"]
        (installer,) = body["initContainers"]
        assert (installer["image"], installer["command"][-1]) == ("python:3.12", wanted)
        assert "--no-deps" in installer["command"]
        command = body["containers"][0]["command"]
        assert command[0] == "python3"
        assert command[command.index("pod") - 1] == "/opt/sandbox-k8s/sandbox_k8s/launcher"


def words(value: Any) -> list[str]:
    """All keys of a JSON value."""
    if isinstance(value, dict):
        return [word for key, inner in value.items() for word in [key, *words(inner)]]
    return [word for inner in value for word in words(inner)] if isinstance(value, list) else []


def test_what_a_pod_cannot_have_is_refused_by_name() -> None:
    config = KubernetesConfig(injection=Injection(kind="baked"))
    with pytest.raises(ConfigError, match=r"SandboxSpec\.image is missing"):
        manifest(SandboxSpec(), config)
    with pytest.raises(ConfigError, match="read_only_paths"):
        manifest(SandboxSpec(image="x", read_only_paths=(config.resolved_run_key_file(),)), config)
    for wrong in (
        {"kind": "baked", "image": "x"},
        {"kind": "pip", "image": "x"},
        {"kind": "init_copy"},
        {"kind": "baked", "path": "opt"},
        {"kind": "baked", "requirement": "sandbox-k8s"},
    ):
        with pytest.raises(ConfigError, match="Injection"):
            Injection(**wrong)  # type: ignore[arg-type]
    for wrong in (
        {"api_timeout_s": 40.0},
        {"port": 0},
        {"run_as_user": 0},
        {"run": "a b"},
        {"cpu": 0.0},
        {"grace_s": -1.0},
    ):
        with pytest.raises(ConfigError, match=f"KubernetesConfig.{next(iter(wrong))}"):
            msgspec.structs.replace(config, **wrong)
