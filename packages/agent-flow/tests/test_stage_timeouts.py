"""Whose fault a stage's time-out is: it depends on where the limit cut it."""

from contextlib import asynccontextmanager, suppress

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
from agent_flow.errors import AgentError, EngineError, EnvError, StageTimeoutError
from agent_flow.stage import opening, waiting_for, within

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def sandbox(start=None, stop=None):
    if start is not None:
        await start()
    yield "sandbox"
    if stop is not None:
        await stop()


async def opens_for_ever():
    async with opening(sandbox(start=anyio.sleep_forever)):
        pass


async def model_hangs():
    async with opening(sandbox()):
        with waiting_for("the model"):
            await anyio.sleep_forever()


async def model_hangs_in_a_thread():
    async def ask():
        with waiting_for("the model"):
            await anyio.sleep_forever()

    await anyio.to_thread.run_sync(anyio.from_thread.run, ask)


async def model_hangs_in_a_task():
    async with anyio.create_task_group() as group:
        group.start_soon(model_hangs)


async def cut_before_and_the_agent_works_on():
    with anyio.move_on_after(0):
        await model_hangs()
    await anyio.sleep_forever()


async def slow_all_in_all():
    while True:
        with waiting_for("the model"):
            await anyio.lowlevel.checkpoint()


async def agent_hangs():
    async with opening(sandbox()) as opened:
        assert opened == "sandbox"
        await anyio.sleep_forever()


async def makes_something_of_the_cut():
    async with opening(sandbox()):
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            raise EnvError("lost", "the command was cut") from None


async def open_makes_something_of_the_cut():
    async def start():
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            raise EnvError("start", "cut") from None

    async with opening(sandbox(start=start)):
        pass


@pytest.mark.parametrize(
    ("work", "fault", "said"),
    [
        (opens_for_ever, "infra", "still waiting for a sandbox"),
        (open_makes_something_of_the_cut, "infra", "still waiting for a sandbox"),
        (model_hangs, "infra", "still waiting for the model"),
        (model_hangs_in_a_thread, "infra", "still waiting for the model"),
        (model_hangs_in_a_task, "infra", "still waiting for the model"),
        (cut_before_and_the_agent_works_on, "agent", "generate_timeout_s = 0.6 s"),
        (agent_hangs, "agent", "generate_timeout_s = 0.6 s"),
        (slow_all_in_all, "agent", "generate_timeout_s = 0.6 s"),
        (makes_something_of_the_cut, "agent", "generate_timeout_s = 0.6 s"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_it_is_the_agents_where_the_agent_worked(work, fault, said):
    with pytest.raises(StageTimeoutError) as caught:
        await within(0.6, "generate", work())
    assert (caught.value.cause, caught.value.fault) == ("generate_timeout", fault)
    assert caught.value.message.endswith(said)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (EngineError("unavailable", "the provider is down"), True),
        (EnvError("lost", "the pod is gone"), True),
        (AgentError("broke", "x", fault="agent"), False),
        (ValueError("x"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_a_failure_that_stood_before_the_limit_is_kept(error, kept):
    async def fails_and_takes_long_to_leave():
        try:
            raise error
        finally:
            with suppress(anyio.get_cancelled_exc_class()):
                await anyio.sleep_forever()

    with pytest.raises((type(error), StageTimeoutError)) as caught:
        await within(0.1, "generate", fails_and_takes_long_to_leave())
    assert (caught.value is error) == kept
    assert kept or isinstance(caught.value, StageTimeoutError)


SLOW = """
from contextlib import asynccontextmanager
import anyio
from agent_flow.environments.local import LocalEnvironments


class Slow(LocalEnvironments):
    @asynccontextmanager
    async def open(self, spec):
        await anyio.sleep_forever()
        yield
"""


def test_a_sandbox_that_never_comes_up_is_no_reward_of_0(cli, example, tmp_path):
    (tmp_path / "slow_sandboxes.py").write_text(SLOW)
    row = (example / "tasks.jsonl").read_text().splitlines()[0]
    (tmp_path / "tasks.jsonl").write_text(f"{row}\n")
    text = (example / "run.toml").read_text()
    text = text.replace('provider = "local"', 'provider = "slow_sandboxes:Slow"')
    text = text.replace('path = "tasks.jsonl"', f'path = "{tmp_path}/tasks.jsonl"')
    text = text.replace("[worker]", "[worker]\nmax_refills = 0\ngenerate_timeout_s = 1.0")
    (tmp_path / "run.toml").write_text(f'base = "{example}"\npython_path = ["{tmp_path}"]\n{text}')
    done = cli("eval", "run.toml", "--json", cwd=tmp_path)
    assert (done.code, done.summary["failed"], done.summary["missing"]) == (1, {}, 1), done.stderr
    assert done.summary["not_graded"] == {"flow/generate_timeout (infra)": 1}
    assert "still waiting for a sandbox" in done.stdout
