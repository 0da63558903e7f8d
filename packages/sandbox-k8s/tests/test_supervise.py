"""Tasks of a client that meet what nobody thought of."""

import logging
from itertools import pairwise

import anyio
import pytest
from sandbox_k8s import ClientStats
from sandbox_k8s.supervise import supervised

from .virtual_time import run


def test_a_task_that_fails_goes_on_and_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    stats, begun = ClientStats(), list[float]()

    async def work() -> None:
        begun.append(anyio.current_time())
        if len(begun) < 9:
            raise KeyError("metadata")

    with caplog.at_level(logging.INFO, logger="sandbox_k8s"):
        run(supervised("the work", work, stats))
    assert stats.task_faults == 8
    [said] = caplog.records
    assert said.getMessage() == "the work failed and goes on (please report this): KeyError: 'metadata'"
    assert said.exc_info is not None
    pauses = [round(later - sooner, 1) for sooner, later in pairwise(begun)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_it_ends_when_it_is_cancelled() -> None:
    stats = ClientStats()

    async def situation() -> None:
        with anyio.move_on_after(5):
            await supervised("the work", anyio.sleep_forever, stats)

    run(situation())
    assert stats.task_faults == 0
