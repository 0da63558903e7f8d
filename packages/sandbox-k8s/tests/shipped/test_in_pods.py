"""Pods of a real cluster with the shipped accounts and in-cluster configuration: the reaper, and a worker."""

import signal
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import KubernetesConfig, SandboxClient, SandboxSpec
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.shipped import REAPER, WORKER, ManifestOptions, manifests, objects
from sandbox_k8s.kubernetes.shipped.options import WORKER_LABELS

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.cluster,
    pytest.mark.parametrize("place", ["kubernetes"], indirect=True),
    pytest.mark.timeout(180),
]


START_THREE = """
import sys, anyio, msgspec
from sandbox_k8s import *
async def main():
    config = msgspec.json.decode(sys.argv[1], type=KubernetesConfig, dec_hook=lambda kind, value: kind(value))
    async with SandboxClient.kubernetes(config) as client:
        async def start():
            sandbox = await client.start(SandboxSpec(lease_s=1.0))
            print(sandbox.id, flush=True)
            await sandbox.execute("sleep 600 & sleep 600")
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(start)
anyio.run(main)
"""


async def test_what_a_killed_worker_left_is_removed_by_one_job_and_what_lives_stays(
    worker: KubernetesConfig,
    script: Callable[..., Any],
    start_all: Callable[..., Any],
    kubectl: Callable[..., str],
    reaper_image: None,
) -> None:
    """NovaSky-AI/SkyRL#1194, google/tunix#2312: the trainer is killed before it can clean up."""
    encoded = msgspec.json.encode(msgspec.structs.replace(worker, run="killed"), enc_hook=str).decode()
    process = script(START_THREE, encoded)
    for _ in range(3):
        await anyio.to_thread.run_sync(process.stdout.readline)
    process.send_signal(signal.SIGKILL)

    async with SandboxClient.kubernetes(worker) as client:
        living, silent = await start_all(client, SandboxSpec(), SandboxSpec())
        name = f"-n={worker.namespace}"
        kubectl("annotate", "pod", name, "--overwrite", silent.handle.place.pod, f"{records.EXPIRES}=1")
        killed = f"-l={records.RUN}=killed"
        wait = ("wait", name, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=20s", "pod", killed)
        await anyio.to_thread.run_sync(kubectl, *wait)
        kubectl("create", "job", name, "sweep", f"--from=cronjob/{REAPER}")
        await anyio.to_thread.run_sync(
            kubectl, "wait", name, "--for=condition=Complete", "--timeout=60s", "job/sweep"
        )
        assert kubectl("logs", name, "job/sweep").count("removed") >= 4
        await anyio.to_thread.run_sync(kubectl, "wait", name, "--for=delete", "--timeout=20s", "pod", killed)
        assert {info.handle.sandbox_id for info in await client.list() if info.state != "dead"} == {living.id}
        assert (await living.execute("echo alive")).stdout == b"alive\n"


INSIDE = """
import anyio, pathlib, sys
from sandbox_k8s import *
async def main():
    config = KubernetesConfig(
        injection=Injection(kind="image_volume", image=sys.argv[1]), image=sys.argv[2], namespace=sys.argv[3],
        image_pull_policy="IfNotPresent", run="from-inside", run_key_file=pathlib.Path("/tmp/run.key"),
        run_as_user=1000, cpu=0.2, memory_bytes=256 << 20, disk_bytes=200 << 20, data_path="pod_ip",
    )
    async with SandboxClient.kubernetes(config) as client:
        sandbox = await client.start()
        refused = await sandbox.execute("exec 3<>/dev/tcp/$KUBERNETES_SERVICE_HOST/443", timeout_s=2)
        assert refused.exit_code != 0
        print((await sandbox.execute("echo from inside")).stdout_text, await client.reap())
anyio.run(main)
"""


async def test_a_worker_inside_the_cluster_with_its_account_and_the_policies(
    worker: KubernetesConfig,
    apply: Callable[[Any], str],
    kubectl: Callable[..., str],
    reaper_name: str,
    reaper_image: None,
) -> None:
    """All of it together: in-cluster configuration, the worker's Role, and ingress by the worker's label."""
    options = ManifestOptions(namespace=worker.namespace, run="from-inside")
    apply(manifests("network-policy", options))
    (job,) = objects("reaper", msgspec.structs.replace(options, image=reaper_name))
    spec = job["spec"]["jobTemplate"]["spec"]["template"]["spec"] | {"serviceAccountName": WORKER}
    (container,) = spec["containers"]
    arguments = [worker.injection.image, worker.image, worker.namespace]
    container |= {"command": ["python3", "-c", INSIDE, *arguments]}
    container |= {"volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    spec["volumes"] = [{"name": "tmp", "emptyDir": {"sizeLimit": "16Mi"}}]
    metadata = {"name": "trainer", "namespace": worker.namespace, "labels": WORKER_LABELS}
    apply([{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}])
    name = f"-n={worker.namespace}"
    ended = ("wait", name, "--for=jsonpath={.status.containerStatuses[0].state.terminated}", "--timeout=60s")
    await anyio.to_thread.run_sync(kubectl, *ended, "pod/trainer")
    assert kubectl("logs", name, "trainer") == "from inside\n ()\n"
