"""`python -m trainer_bridge` is `trainer-bridge`."""

from __future__ import annotations

import sys

from trainer_bridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
