"""At most one owner, and nothing left, in random schedules of workers, faults and reapers in virtual time."""

import os

import pytest
from sandbox_k8s.run_key import RunKey

from .virtual_cluster import quiet
from .virtual_time import run
from .virtual_workers import schedule

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")
SEED = int(os.environ.get("SANDBOX_K8S_SEED", "0"))


def lives(seeds: range, key: RunKey, steps: int = 14) -> None:
    """Run the schedules of those seeds; one that fails is named, and SANDBOX_K8S_SEED=N runs it again."""
    for seed in seeds:
        try:
            with quiet():
                run(schedule(seed, key, steps))
        except BaseException as problem:
            raise AssertionError(
                f"schedule {seed} of {steps} steps; again with SANDBOX_K8S_SEED={seed}"
            ) from problem


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> RunKey:
    return RunKey(tmp_path_factory.mktemp("key") / "run.key")


def test_300_schedules(key: RunKey) -> None:
    lives(range(SEED, SEED + 1) if SEED else range(300), key, steps=14 if SEED else 6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("thousand", range(10))
def test_10_000_schedules(key: RunKey, thousand: int) -> None:
    lives(range(1000 * thousand, 1000 * (thousand + 1)), key)
