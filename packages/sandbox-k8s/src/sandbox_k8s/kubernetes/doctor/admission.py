"""Whether the namespace takes the pods of sandboxes: asked by creates that are dry runs."""

import re
from typing import Any

import msgspec

from sandbox_k8s.errors import ClusterError
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.api import PodApi, Request
from sandbox_k8s.kubernetes.config import Injection, KubernetesConfig
from sandbox_k8s.kubernetes.explain import in_words
from sandbox_k8s.kubernetes.failure import FailureName
from sandbox_k8s.kubernetes.manifest import pod_manifest, workdir_of
from sandbox_k8s.spec import SandboxSpec

from .finding import Finding, advice, broken, refused, works

_NO_IMAGE = "localhost/doctor:dry-run"
_BAKED = Injection(kind="baked")


async def admission(api: PodApi, config: KubernetesConfig, *, knows_injection: bool) -> list[Finding]:
    """Whether a sandbox's pod is accepted, under which level of Pod Security, and with an image volume."""
    found = [await _pod(api, config)]
    found.append(await _security(api, config, passes=found[0].verdict == "works"))
    if found[0].verdict == "works":
        found.append(await _injection(api, config, knows_injection=knows_injection))
    return found


async def _pod(api: PodApi, config: KubernetesConfig) -> Finding:
    refusal = await _refusal(api, config, _sandbox_pod(config, _BAKED))
    size = f"{config.cpu:g} cpu, {_size(config.memory_bytes)} memory, {_size(config.disk_bytes)} disk"
    if refusal is None:
        return works("pod", f"a sandbox of {size} is accepted (dry run)")
    return broken("pod", f"a sandbox of {size} is refused: {in_words(refusal)}. {_do(refusal)}")


async def _security(api: PodApi, config: KubernetesConfig, *, passes: bool) -> Finding:
    refusal = await _refusal(api, config, _privileged_pod(config))
    level = "privileged"
    if refusal is not None:
        if _failure(refusal) != "policy_refused":
            return refused("pod security", refusal)
        named = re.search(r'violates PodSecurity "([a-z]+)', in_words(refusal))
        if named is None:
            return works("pod security", f"a policy refuses a privileged pod: {in_words(refusal)}")
        level = named[1]
    if level == "privileged":
        return advice(
            "pod security",
            "a privileged pod would be accepted (dry run); sandboxes pass the level baseline: kubectl label "
            f"namespace {config.namespace} pod-security.kubernetes.io/enforce=baseline",
        )
    if level == "restricted" and not passes:
        return advice(
            "pod security",
            f"level {level} is enforced; sandboxes pass it with KubernetesConfig(run_as_user=...)",
        )
    return works("pod security", f"level {level} is enforced, and sandboxes pass it")


async def _injection(api: PodApi, config: KubernetesConfig, *, knows_injection: bool) -> Finding:
    if knows_injection and config.injection.kind != "image_volume":
        return works("injection", f"{config.injection.kind} needs nothing of the cluster")
    image = config.injection.image or _NO_IMAGE
    pod = _sandbox_pod(config, Injection(kind="image_volume", image=image, path=config.injection.path))
    try:
        answer = await _create(api, config, pod)
        takes = any("image" in volume for volume in answer["spec"]["volumes"])
        why = "" if takes else "the API server leaves it out"
    except ClusterError as problem:
        takes, why = False, in_words(problem)
    if takes:
        return works("injection", "image volumes are accepted (dry run); what nodes can do stands below")
    text = f"image volumes are not accepted: {why}; take Injection(kind='init_copy'), which works everywhere"
    return broken("injection", text) if knows_injection else advice("injection", text)


async def _refusal(api: PodApi, config: KubernetesConfig, pod: dict[str, Any]) -> ClusterError | None:
    try:
        await _create(api, config, pod)
    except ClusterError as problem:
        return problem
    return None


async def _create(api: PodApi, config: KubernetesConfig, pod: dict[str, Any]) -> dict[str, Any]:
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    path = f"api/v1/namespaces/{config.namespace}/pods"
    return await api.ask(Request("POST", path, query, pod), "creating a pod (dry run)")


def _sandbox_pod(config: KubernetesConfig, injection: Injection) -> dict[str, Any]:
    spec = SandboxSpec(image=config.image or _NO_IMAGE)
    record = records.Record(
        key_id="0" * 16,
        workdir=workdir_of(spec),
        lease_s=spec.lease_s,
        detached_lease_s=spec.detached_lease_s,
        created_ns=0,
    )
    return pod_manifest(
        spec,
        msgspec.structs.replace(config, injection=injection),
        sandbox_id="0" * 16,
        token_hash="0" * 64,
        annotations=records.annotations(record, request="0", epoch=1, expires_ns=0),
    )


def _privileged_pod(config: KubernetesConfig) -> dict[str, Any]:
    """What no level of Pod Security but the lowest accepts; of a size that quotas accept."""
    pod = _sandbox_pod(config, _BAKED)
    container = {**pod["spec"]["containers"][0], "securityContext": {"privileged": True}}
    return {**pod, "spec": {**pod["spec"], "containers": [container]}}


def _failure(problem: ClusterError) -> FailureName | None:
    return None if problem.diagnosis is None else problem.diagnosis.failure


def _do(problem: ClusterError) -> str:
    details = None if problem.diagnosis is None else problem.diagnosis.details
    return "" if details is None else details.advice


def _size(size: int) -> str:
    return f"{size / (1 << 30):.3g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.3g} MiB"
