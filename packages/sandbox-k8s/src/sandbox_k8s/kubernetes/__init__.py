"""Pods: what the API server says of them, and what that means. Takes plain dicts; loads no client library."""

from .admission import classify_refusal, says_pod_is_missing
from .classify import classify
from .diagnosis import Diagnosis, Evidence, State, WaitsFor, overdue
from .failure import Failure, FailureName
from .failures import FAILURES
from .pod_state import Event, Node, Pod

__all__ = [
    "FAILURES",
    "Diagnosis",
    "Event",
    "Evidence",
    "Failure",
    "FailureName",
    "Node",
    "Pod",
    "State",
    "WaitsFor",
    "classify",
    "classify_refusal",
    "overdue",
    "says_pod_is_missing",
]
