"""A scaffold of these tests with the seams of SWE-agent 1.1 that `agent_flow.agents` uses, written for them.

It has no hooks, demonstrations, multi-line commands or logs. The same tests run against SWE-agent itself
where SWE_AGENT_SRC names a checkout.
"""

import os
from pathlib import Path

__version__ = "1.1.0"
CONFIG_DIR = Path(os.environ["SWE_AGENT_CONFIG_DIR"])
TOOLS_DIR = Path(os.environ["SWE_AGENT_TOOLS_DIR"])
assert CONFIG_DIR.is_dir()
assert TOOLS_DIR.is_dir()
