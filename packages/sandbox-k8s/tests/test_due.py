"""One timer for many things."""

import anyio
import anyio.lowlevel
import pytest
from sandbox_k8s.due import DueTimes

pytestmark = pytest.mark.anyio


async def test_things_are_due_in_the_order_of_their_times_once() -> None:
    due = DueTimes()
    now_s = anyio.current_time()
    for name, at_s in (("third", 3.0), ("first", 1.0), ("dropped", 0.0), ("again", 0.5), ("second", 2.0)):
        due.put(name, now_s - 10.0 + at_s)
    due.drop("dropped")
    due.put("again", now_s - 1.0)
    assert [await due.next() for _ in range(4)] == ["first", "second", "third", "again"]
    with anyio.move_on_after(0.01) as waiting:
        await due.next()
    assert waiting.cancelled_caught


async def test_what_is_due_sooner_than_what_is_waited_for_is_told_in_time() -> None:
    due = DueTimes()
    told: list[str] = []
    due.put("in an hour", anyio.current_time() + 3600.0)

    async def wait() -> None:
        told.append(await due.next())

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            due.put("now", anyio.current_time())
    assert told == ["now"]


async def test_much_that_is_due_at_once_lets_others_run() -> None:
    due = DueTimes()
    turns = 0
    for number in range(64):
        due.put(str(number), anyio.current_time())

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for _ in range(64):
            await due.next()
        tasks.cancel_scope.cancel()
    assert turns >= 8
