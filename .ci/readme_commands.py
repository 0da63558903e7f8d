"""Prints the commands of README.md's first shell block, so that CI runs what the README says."""

import re
import sys
from pathlib import Path

readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
block = re.search(r"```(?:bash|sh)\n(.*?)```", readme, re.DOTALL)
if block is None:
    sys.exit("README.md has no shell block")
commands = [line for line in block.group(1).splitlines() if line.strip() and not line.startswith("#")]
if len(commands) != 2:
    sys.exit(f"README.md must begin with two commands, found {len(commands)}")
print("\n".join(commands))
