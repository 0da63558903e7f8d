"""``python -m sandbox_k8s.cli``."""

import sys

from .main import main

sys.exit(main())
