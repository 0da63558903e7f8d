"""A worker process for tests of ownership: does what lines of JSON on standard input say, until killed."""

import json
import sys
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from sandbox_k8s import (
    KubernetesConfig,
    LocalConfig,
    Sandbox,
    SandboxClient,
    SandboxError,
    SandboxHandle,
    SandboxSpec,
)


async def main(kind: str, settings: str) -> None:
    """Serve until standard input ends; leaving the client then stops what is owned."""
    sandboxes: dict[str, Sandbox] = {}

    def say(number: int, **answer: Any) -> None:
        print(json.dumps({"number": number, **answer}), flush=True)

    async def act(order: dict[str, Any]) -> dict[str, Any]:
        do = order["do"]
        if do == "start":
            sandbox = await client.start(
                SandboxSpec(lease_s=order["lease_s"], detached_lease_s=order["detached_s"])
            )
        elif do == "attach":
            sandbox = await client.attach(SandboxHandle.from_json(order["handle"]))
        else:
            sandbox = sandboxes[order["sandbox"]]
            if do == "execute":
                result = await sandbox.execute(order["command"], timeout_s=10)
                return {"out": result.stdout_text, "exit_code": result.exit_code}
            if do == "detach":
                return {"handle": (await sandbox.detach()).to_json().decode()}
            await sandbox.stop()
            return {}
        sandboxes[sandbox.id] = sandbox
        return {"handle": sandbox.handle.to_json().decode(), "epoch": sandbox.handle.epoch}

    async def carry_out(order: dict[str, Any]) -> None:
        try:
            say(order["number"], **await act(order))
        except (SandboxError, KeyError) as problem:
            say(order["number"], error=type(problem).__name__, text=str(problem)[:300])

    config: Any = LocalConfig if kind == "LocalConfig" else KubernetesConfig
    read = msgspec.json.decode(settings, type=config, dec_hook=lambda kind, value: kind(value))
    make = SandboxClient.local if kind == "LocalConfig" else SandboxClient.kubernetes
    async with make(read) as client, anyio.create_task_group() as tasks:
        say(0)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            tasks.start_soon(carry_out, json.loads(line))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
