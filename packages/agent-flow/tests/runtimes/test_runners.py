"""The runners that are installed here, run now: newer versions must not write logs that we misread."""

import importlib.util
import os
import shutil

import pytest
from agent_flow.runtimes.swebench import judge


def node():
    return bool(os.environ.get("NODE_MODULES")) and shutil.which("node") is not None


INSTALLED = {
    "cargo": shutil.which("cargo") is not None,
    "django": importlib.util.find_spec("django") is not None,
    "go": shutil.which("go") is not None,
    "jest": node(),
    "mocha": node(),
    "mocha_spec": node(),
    "phpunit": shutil.which("phpunit") is not None,
    "pytest": True,
    "pytest_verbose": True,
    "rspec": shutil.which("rspec") is not None,
    "unittest": True,
    "vitest": node(),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", INSTALLED)
def test_a_runner_of_this_machine_is_read_right(name, swebench, runner_row, run_runner, tmp_path):
    if not INSTALLED[name]:
        pytest.skip(f"{name} is not installed here; for node's, NODE_MODULES says where")
    spec = swebench.spec(runner_row(name))
    for state, reward in (("base", 0.0), ("solved", 1.0)):
        log = run_runner(name, state, tmp_path / state).decode("utf-8", "replace")
        assert judge(swebench.read(spec, log), log).verdict().reward == reward, log
