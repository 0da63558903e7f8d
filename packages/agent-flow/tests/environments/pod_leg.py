"""One leg of one rollout in a pod, as a program: `python pod_leg.py FOLDER LEG_IN LEG_OUT`.

It is that of `tests/agents/drive.py` with the pods that the folder's `run.toml` describes. A leg whose
rollout was aborted leaves its pod, writes down the handle, and ends with SIGKILL.
"""

import importlib.util
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import anyio
import msgspec
from agent_flow.environments.sandbox import SandboxEnvironment
from agent_flow.providers import load_environments
from sandbox_k8s import SandboxHandle

spec = importlib.util.spec_from_file_location("drive", Path(__file__).parents[1] / "agents" / "drive.py")
drive = sys.modules["drive"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(drive)


class PodBench(drive.Bench):
    """The folder's repository is brought to a fresh pod, or lies in the one of the handle."""

    async def sandbox(self, stack, handle=""):
        environments = load_environments(self.context)
        await stack.enter_async_context(environments.session())
        client = environments._client
        if handle:
            sandbox = await client.attach(SandboxHandle.from_json(handle))
            return sandbox, SandboxEnvironment(sandbox, self.spec, name="k8s")
        image = self.context.file.run.environment["image"]
        sandbox = await client.start(msgspec.structs.replace(environments._spec, image=image))
        environment = SandboxEnvironment(sandbox, self.spec, name="k8s")
        await environment.upload(self.spec.repository, environment.workdir)
        return sandbox, environment


def main() -> None:
    folder, given, out = map(Path, sys.argv[1:])
    leg = drive.Leg(**json.loads(given.read_text()))
    done = anyio.run(PodBench(folder).leg, leg)
    out.write_text(json.dumps(asdict(done)))
    if done.state:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
