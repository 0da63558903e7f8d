"""Whether a cluster can do what sandboxes need: asked by dry runs, then tried with one sandbox."""

from .examination import examine
from .finding import Finding, Verdict
from .probe import probe

__all__ = ["Finding", "Verdict", "examine", "probe"]
