"""`python -m agent_flow`."""

import sys

from agent_flow.cli import main

sys.exit(main())
