"""Mistakes in what Python code asks for: named where they are made, with what can be given instead."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from sandbox_k8s import (
    CommandRefusedError,
    ConfigError,
    FencedError,
    Injection,
    KubernetesConfig,
    LocalConfig,
    SandboxClient,
    SandboxSpec,
    SandboxStartError,
)
from sandbox_k8s.testing import FakeClusterConfig

pytestmark = pytest.mark.anyio
BAKED = Injection(kind="baked")


def kubernetes(**settings: Any) -> KubernetesConfig:
    return KubernetesConfig(**{"injection": BAKED, **settings})


@pytest.mark.parametrize(
    ("make", "settings", "says"),
    [
        (LocalConfig, {"isolation": "bubblewrapp"}, "LocalConfig.isolation is 'bubblewrapp': give 'auto', "),
        (LocalConfig, {"isolation": None}, "or 'process'"),
        (LocalConfig, {"root": "/tmp/x"}, "LocalConfig.root is '/tmp/x': give a Path or None"),
        (LocalConfig, {"grace_s": float("nan")}, "LocalConfig.grace_s is nan: give a number"),
        (LocalConfig, {"start_concurrency_max": True}, "is True: give an int"),
        (Injection, {"kind": "image-volume", "image": "t:1"}, "give 'image_volume', 'init_copy', "),
        (kubernetes, {"injection": "baked"}, "give an Injection"),
        (kubernetes, {"namespace": "A_b"}, "KubernetesConfig.namespace 'A_b' is no namespace"),
        (kubernetes, {"memory_bytes": "2Gi"}, "KubernetesConfig.memory_bytes is '2Gi': give an int"),
        (kubernetes, {"data_path": "pod-ip"}, "give 'pod_ip', 'api_proxy', 'port_forward' or None"),
        (kubernetes, {"tolerations": ({1: "x"},)}, r"tolerations\[0\], one of its keys, is 1: give a str"),
        (kubernetes, {"tolerations": {"key": "x"}}, "give a tuple of dict of str to anything"),
        (SandboxSpec, {"memory_bytes": "1Gi"}, "SandboxSpec.memory_bytes is '1Gi': give an int or None"),
        (SandboxSpec, {"read_only_paths": ("/x",)}, r"read_only_paths\[0\] is '/x': give a Path"),
        (SandboxSpec, {"env": {"A": 1}}, r"SandboxSpec.env\['A'\] is 1: give a str"),
        (SandboxSpec, {"labels": {"A": b"x"}}, r"SandboxSpec.labels\['A'\] is of type bytes: give a str"),
        (SandboxSpec, {"workdir": Path("/x")}, "SandboxSpec.workdir is of type PosixPath: give a str"),
        (FakeClusterConfig, {"pods": "banana"}, "FakeClusterConfig.pods is 'banana': give 'process' or"),
    ],
)
def test_a_setting_of_another_type_is_refused(
    make: Callable[..., object], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**settings)


def test_what_fits_is_taken() -> None:
    assert LocalConfig(grace_s=1, root=Path("/tmp/x")).grace_s == 1
    assert kubernetes(tolerations=({"key": "x", "tolerationSeconds": 3},), cpu=2, namespace="a-1").cpu == 2
    paths: Any = [Path("/usr")]
    assert SandboxSpec(read_only_paths=paths, env={"A": ""}).env == {"A": ""}


@pytest.fixture
async def client(root: Path) -> AsyncIterator[SandboxClient]:
    async with SandboxClient.local(LocalConfig(root=root, isolation="process", grace_s=0.3)) as client:
        yield client


async def test_arguments_of_another_type_are_refused_and_the_sandbox_lives(client: SandboxClient) -> None:
    sandbox = await client.start()
    anything: Any = sandbox
    session: Any = await sandbox.session()
    for call, says in (
        (lambda: anything.execute("true", timeout_s="5"), "timeout_s is '5': give a number or None"),
        (lambda: anything.execute("true", timeout_s=-3), "timeout_s must not be negative"),
        (lambda: anything.execute("cat", stdin="abc"), "stdin is 'abc': give bytes"),
        (lambda: anything.execute(["sleep", 1]), r"the command\[1\] is 1: give a str"),
        (lambda: anything.execute(b"true"), "the command is of type bytes"),
        (lambda: anything.execute("true", env={"A": 1}), r"env\['A'\] is 1"),
        (lambda: anything.write("x", "text"), "data is 'text': give bytes"),
        (lambda: session.run(["true"]), "the command is of type list: give a str"),
        (lambda: session.run("true", timeout_s=float("nan")), "timeout_s is nan"),
    ):
        with pytest.raises(ConfigError, match=says):
            await call()
    with pytest.raises(CommandRefusedError, match="empty list"):
        await sandbox.execute([])
    # Another client may not look before it asks.
    head = {"command": [], "grace_s": 1.0, "output_limit": 1000, "merge": False}
    with pytest.raises(CommandRefusedError, match="empty list"):
        await sandbox.launcher.command("/sbx/execute", head, b"", work_s=5.0)
    assert (await sandbox.execute("echo alive")).stdout == b"alive\n"
    maker: Any = client
    for call, says in (
        (lambda: maker.start({"image": "x"}), "spec is of type dict: give a SandboxSpec or None"),
        (lambda: maker.attach(sandbox.handle.to_json()), "SandboxHandle.from_json.* is of type bytes"),
        (lambda: maker.prefetch("python:3.12"), "images is 'python:3.12': give a sequence of str"),
        (lambda: maker.prefetch(["python:3.12"], "node-1"), "nodes is 'node-1'"),
    ):
        with pytest.raises(ConfigError, match=says):
            await call()
    with pytest.raises(ConfigError, match="config is '/tmp/x': give a LocalConfig or None"):
        maker.local("/tmp/x")


async def test_what_another_object_of_this_client_owns_is_not_stopped_in_silence(
    client: SandboxClient,
) -> None:
    async with await client.start() as first:
        second = await client.attach(first.handle)
        with pytest.raises(FencedError, match="the one that reset or attach returned"):
            await first.stop()
    assert (await second.execute("echo alive")).stdout == b"alive\n", "the block's end leaves it alone"
    await second.stop()
    await second.stop()
    await first.stop()


async def test_a_missing_working_directory_is_made_as_in_a_pod(
    root: Path, isolation: Literal["process"]
) -> None:
    async with SandboxClient.local(LocalConfig(root=root, isolation=isolation)) as client:
        missing = "/repo/of the task" if isolation != "process" else f"{root}/../repo/of the task"
        sandbox = await client.start(SandboxSpec(workdir=missing))
        done = await sandbox.execute("pwd && touch x && ls")
        assert (done.exit_code, done.stdout.split(b"/")[-1]) == (0, b"of the task\nx\n"), done
        if isolation != "process":
            done = await (await client.start(SandboxSpec(workdir="/tmp/a/b"))).execute("pwd")
            assert done.stdout == b"/tmp/a/b\n"
        with pytest.raises(SandboxStartError, match=r"workdir /dev/null/x cannot be made: Not a dir"):
            await client.start(SandboxSpec(workdir="/dev/null/x"))
