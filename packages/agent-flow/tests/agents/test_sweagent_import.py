"""SWE-agent is imported only if it is asked for and there; else the error says what to do."""

import os
import subprocess
import sys

import pytest
from agent_flow.errors import ConfigError

CODE = """
import sys
sys.modules["sweagent"] = None  # as where it is not installed
from pathlib import Path
from agent_flow.agents.sweagent import SweAgent
from agent_flow.errors import ProviderError
assert "swerex" not in sys.modules and "litellm" not in sys.modules
try:
    SweAgent(SweAgent.Config(), type("Context", (), {"scratch": Path("/tmp")}))
except ProviderError as error:
    print(error)
"""


@pytest.mark.original("A-provider-lazy")
def test_what_is_missing_is_named():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "SWE-agent 1.x cannot be imported: ModuleNotFoundError" in done.stdout
    assert "git clone --branch v1.1.0 https://github.com/SWE-agent/SWE-agent" in done.stdout


@pytest.mark.parametrize(
    "text",
    ["", "agent: 7", "tools: {}", "agent: {type: retry}", "agent: {max_requeries: many}", "a: [", None],
)
def test_a_configuration_that_cannot_be_used(bench, tmp_path, text):
    config = tmp_path / "bad.yaml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(ConfigError, match=r"SWE-agent's configuration cannot be used"):
        bench(f'provider = "agent_flow.agents.sweagent:SweAgent"\nconfig = "{config}"', [])
