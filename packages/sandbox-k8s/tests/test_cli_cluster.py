"""``ps``, ``exec``, ``explain`` and ``reap`` about pods: on the fake cluster, and the same on a real one."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from sandbox_k8s import ClientConfig, PodPlace, SandboxClient, SandboxSpec
from sandbox_k8s.cli import main
from sandbox_k8s.clock import SystemClock
from sandbox_k8s.kubernetes import records
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.kubernetes.api import PodApi
from sandbox_k8s.kubernetes.config import KubernetesConfig

PODS = ["fake", pytest.param("kubernetes", marks=pytest.mark.cluster)]
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("place", PODS, indirect=True)]
Cli = Callable[..., Awaitable[tuple[int, str, str]]]
HEADER = [
    "ID", "POD", "RUN", "STATE", "EPOCH", "AGE", "LEASE", "NODE", "IMAGE", "WHY", "LABELS",
]  # fmt: skip


@pytest.fixture
def cluster(config: ClientConfig) -> KubernetesConfig:
    assert isinstance(config, KubernetesConfig)
    return config


@pytest.fixture
def cli(cluster: KubernetesConfig, capfd: pytest.CaptureFixture[str]) -> Cli:
    """The command line with the options of the test's run; its exit code and what it printed."""
    given = {
        "--kubeconfig": cluster.kubeconfig,
        "--namespace": cluster.namespace,
        "--run": cluster.run,
        "--run-key-file": cluster.run_key_file,
    }

    async def run(command: str, *words: str, **instead: str) -> tuple[int, str, str]:
        options = [str(word) for pair in (given | instead).items() if pair[1] for word in pair]
        capfd.readouterr()
        code = await anyio.to_thread.run_sync(main, [command, *options, *words])
        return code, *capfd.readouterr()

    return run


async def test_ps_shows_who_is_there_and_exec_runs_beside_the_owner(client: SandboxClient, cli: Cli) -> None:
    sandbox = await client.start(SandboxSpec(labels={"task": "t1"}))
    assert isinstance(sandbox.handle.place, PodPlace)
    session = await sandbox.session("work")
    await session.run("X=kept")
    code, shown, said = await cli("ps")
    header, row = shown.splitlines()
    assert (code, said) == (0, "")
    assert header.split() == HEADER
    assert row.split()[:5] == [sandbox.id, f"sbx-{sandbox.id}", client.config.run, "running", "1"]
    assert row.split()[-2:] == ["-", "task=t1"]

    assert await cli("exec", sandbox.id[:6], "--", "echo out; echo err >&2; exit 5") == (5, "out\n", "err\n")
    assert await cli("exec", f"sbx-{sandbox.id}", "--", "printf", "%s.", "a b", "c") == (0, "a b.c.", "")
    assert await cli("exec", "--session", "work", sandbox.id, "--", "echo $X") == (0, "kept\n", "")
    code, shown, said = await cli("exec", "--timeout", "0.2", sandbox.id, "--", "echo begun; sleep 60")
    assert (code, shown) == (124, "begun\n")
    assert "timed out after 0." in said
    assert (await session.run("echo still the owner")).stdout == b"still the owner\n"

    code, shown, _ = await cli("explain", sandbox.id)
    assert (code, shown.splitlines()[0]) == (
        0, f"pod {sandbox.handle.place.namespace}/sbx-{sandbox.id}  ready"
    )  # fmt: skip


async def test_ps_as_json_has_every_field_of_a_detached_sandbox(client: SandboxClient, cli: Cli) -> None:
    sandbox = await client.start(SandboxSpec(detached_lease_s=500))
    handle = await sandbox.detach()
    code, shown, _ = await cli("ps", "--json")
    (row,) = json.loads(shown)
    assert code == 0
    assert isinstance(handle.place, PodPlace)
    assert {name: row[name] for name in ("id", "pod", "namespace", "state", "epoch", "condition")} == {
        "id": sandbox.id, "pod": handle.place.pod, "namespace": handle.place.namespace,
        "state": "detached", "epoch": 1, "condition": "ready",
    }  # fmt: skip
    assert 480 < row["lease_left_s"] <= 500
    assert row["node"]
    assert row["image"]
    await (await client.attach(handle)).stop()


async def test_what_is_not_there_is_said_with_what_is(client: SandboxClient, cli: Cli) -> None:
    sandbox = await client.start()
    near = sandbox.id[:-1] + ("0" if sandbox.id[-1] != "0" else "1")
    code, _, said = await cli("exec", near, "--", "true")
    assert code == 2
    assert f"no sandbox begins with '{near}'; there are 1, for example {sandbox.id}" in said
    assert client.config.run in said
    code, _, said = await cli("explain", near)
    assert code == 4
    assert said.startswith(f"sandbox-k8s: there is no pod '{near}' (deleted, or never there)")
    code, _, said = await cli("exec", sandbox.id, "--", "true", **{"--run-key-file": "/nonexistent/key"})
    assert (code, said.count("\n")) == (2, 1)
    assert "no run key /nonexistent/key" in said
    code, _, said = await cli("exec", sandbox.id, "--", "true", **{"--cluster": "another"})
    assert (code, said.count("\n")) == (2, 1)
    assert "cluster 'another' (--cluster)" in said


async def test_a_sandbox_that_was_stopped_is_explained_by_its_last_event(
    client: SandboxClient, cli: Cli
) -> None:
    sandbox = await client.start()
    await sandbox.stop()
    code, shown, said = await cli("explain", sandbox.id)
    assert (code, shown) == (4, "")
    assert f"there is no pod '{sandbox.id}' any more; its last event, " in said
    assert "ago: " in said
    assert said.count("\n") == 1


async def test_reap_says_what_it_would_remove_and_then_does(
    cluster: KubernetesConfig, client: SandboxClient, cli: Cli
) -> None:
    sandbox = await client.start()
    handle = await sandbox.detach()
    none = f"removed 0 dead sandboxes of run '{cluster.run}' in namespace {cluster.namespace}\n"
    assert await cli("reap") == (0, none, "")
    assert isinstance(handle.place, PodPlace)
    api = PodApi(ApiAccess(cluster), cluster, SystemClock())
    pod = await api.get(handle.place.pod)
    await api.annotate(handle.place.pod, {records.EXPIRES: "1"}, pod["metadata"]["resourceVersion"])
    api.close()
    code, shown, _ = await cli("reap", "--dry-run")
    assert code == 0
    assert shown.splitlines()[0].startswith(f"would remove {sandbox.id} (nobody renewed it, ")
    (row,) = json.loads((await cli("ps", "--json"))[1])
    assert row["lease_left_s"] < 0
    code, shown, _ = await cli("reap")
    assert (code, shown.split()[:2]) == (0, ["removed", sandbox.id])
    assert "removed 1 dead sandboxes" in shown


async def test_the_settings_of_a_run_come_from_a_file(
    cluster: KubernetesConfig, client: SandboxClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sandbox = await client.start()
    file = tmp_path / "run.toml"
    settings = {"kubeconfig": str(cluster.kubeconfig), "namespace": cluster.namespace, "run": cluster.run}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    # Relative paths are the file's.
    assert cluster.run_key_file is not None
    (tmp_path / "key").write_bytes(cluster.run_key_file.read_bytes())
    (tmp_path / "key").chmod(0o600)
    injection = msgspec.json.encode(cluster.injection.image).decode()
    lines += ["run_key_file = 'key'\n", f"[injection]\nkind = 'image_volume'\nimage = {injection}\n"]
    file.write_text("".join(lines), encoding="utf-8")
    words = ["exec", "--config", str(file), sandbox.id, "--", "exit 9"]
    assert await anyio.to_thread.run_sync(main, words) == 9
    words = ["ps", "--config", str(file), "--run", "another"]
    assert await anyio.to_thread.run_sync(main, words) == 0
    assert "no sandboxes of run 'another'" in capfd.readouterr().err
