"""``sandbox-k8s``: look at sandboxes, run something in them, tidy up; on this machine or in a cluster.

One file per command; `main` puts them together, `where` says which sandboxes they are about.
"""

from .main import main
from .problems import EXIT_NOT_FOUND, EXIT_TIMED_OUT, EXIT_USAGE

__all__ = ["EXIT_NOT_FOUND", "EXIT_TIMED_OUT", "EXIT_USAGE", "main"]
