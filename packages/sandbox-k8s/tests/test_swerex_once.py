"""Connections that break under SWE-ReX's calls: a command runs once, and half of an output is no result."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("swerex.runtime.remote", reason="needs the extra sandbox-k8s[swerex]")

from sandbox_k8s import LocalConfig, ResultLostError
from sandbox_k8s.answers import NoAnswerError
from sandbox_k8s.swerex import K8sDeployment
from sandbox_k8s.swerex.errors import K8sError
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest

pytestmark = pytest.mark.anyio


@pytest.fixture
async def deployment(root: Path) -> AsyncIterator[K8sDeployment]:
    deployment = K8sDeployment(local=LocalConfig(root=root, isolation="process"))
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    yield deployment
    await deployment.stop()


def lose_answers(deployment: K8sDeployment) -> list[str]:
    """Have the first answer to each request lost on the way; returns the requests that were lost."""
    launcher = deployment.runtime.sandbox.sandbox.launcher
    call = launcher.call
    lost: list[str] = []

    async def lossy(path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        answer = await call(path, body, **options)
        if options["request_id"] not in lost:
            lost.append(options["request_id"])
            raise NoAnswerError("lost on the way")
        return answer

    launcher.call = lossy  # type: ignore[method-assign]
    return lost


@pytest.mark.parametrize("size", [10, 1_100_000])
async def test_a_command_runs_once_however_large_its_answer_is(deployment: K8sDeployment, size: int) -> None:
    lost = lose_answers(deployment)
    command = f"N=$((N+1)); echo run $N; head -c {size} /dev/zero | tr '\\0' a"
    observed = await deployment.runtime.run_in_session(BashAction(command=command, timeout=20))
    assert observed.output == "run 1\n" + "a" * size
    assert len(lost) == 1


async def test_an_answer_that_is_gone_is_an_infrastructure_error(deployment: K8sDeployment) -> None:
    lose_answers(deployment)
    command = "echo run >> runs; head -c 2000000 /dev/zero | tr '\\0' '\\377'"
    with pytest.raises(K8sError, match="was carried out") as gone:
        await deployment.runtime.execute(Command(command=command, shell=True, timeout=20))
    assert isinstance(gone.value.__cause__, ResultLostError)
    assert (gone.value.fault, gone.value.retryable) == ("infra", False)
    assert (await deployment.runtime.execute(Command(command=["cat", "runs"]))).stdout == "run\n"


@pytest.mark.parametrize("check", ["ignore", "silent"])
async def test_a_cut_connection_gives_no_half_of_an_output(deployment: K8sDeployment, check: Any) -> None:
    """It was returned like a whole one: exit code None, no failure reason."""
    runtime = deployment.runtime
    inside = runtime.sandbox.sandbox

    async def cut() -> None:
        await inside.execute("until [ -e begun ]; do sleep 0.01; done")
        for connection in list(inside.launcher._http.connector._acquired):  # type: ignore[union-attr]
            connection.transport.abort()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runtime.sandbox.client.thread.call_from, cut)
        action = BashAction(command="echo half; touch begun; sleep 600", check=check, timeout=600)
        with pytest.raises(K8sError, match="begun and cut off") as lost:
            await runtime.run_in_session(action)
    assert isinstance(lost.value.__cause__, ResultLostError)
