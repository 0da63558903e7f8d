"""A new owner comes while a reset of an older one works for longer than a fence waits."""

import anyio
import pytest
from sandbox_k8s import FencedError, LocalConfig, Sandbox, SandboxClient, SandboxLostError, double_owners

from .conftest import WHY_NO_BUBBLEWRAP

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(bool(WHY_NO_BUBBLEWRAP), reason=WHY_NO_BUBBLEWRAP)]

REPO = """
set -e
git init -q repo && cd repo && printf one > a && printf 'a filter=slow\\n' > .gitattributes && git add .
git -c user.name=t -c user.email=t@example.com commit -qm base
git config filter.slow.smudge 'sleep 20; cat'
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)
async def test_it_does_not_end_what_its_successor_runs(local_config: LocalConfig) -> None:
    async with SandboxClient.local(local_config) as one, SandboxClient.local(local_config) as two:
        used = await one.start()
        assert (await used.execute(REPO)).exit_code == 0
        await used.mark_clean("repo")
        await used.execute("printf changed > repo/a")
        guest = await two.attach(used.handle, take_ownership=False)
        refused: list[Exception] = []

        async def reset() -> None:
            try:
                await used.reset()
            except FencedError as problem:
                refused.append(problem)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reset)
            last = (await guest.log())[-1]
            while (last.what, last.epoch) != ("command", 2):
                await anyio.sleep(0.05)
                last = (await guest.log())[-1]
            owner = await _attach(two, used)
            await owner.execute("printf mine > mine")
            slept = await owner.execute("sleep 3; cat mine")
        assert (slept.exit_code, slept.stdout) == (0, b"mine")
        assert len(refused) == 1
        assert double_owners(await owner.log()) == ()
        await owner.stop()


async def _attach(client: SandboxClient, sandbox: Sandbox) -> Sandbox:
    with anyio.fail_after(60):
        while True:
            try:
                return await client.attach(sandbox.handle)
            except SandboxLostError as problem:
                if "do not end" not in str(problem):
                    raise
