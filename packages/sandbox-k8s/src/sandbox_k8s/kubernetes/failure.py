"""A failure class: its name, one of a closed set, and what is known of it."""

from typing import Literal

import msgspec

from sandbox_k8s.errors import Fault

FailureName = Literal[
    "image_name_invalid",
    "image_not_found",
    "image_auth",
    "image_not_present",
    "image_architecture",
    "image_rate_limit",
    "image_registry_error",
    "image_registry_unreachable",
    "image_registry_host_unknown",
    "image_registry_tls",
    "image_pull_cut",
    "image_pull_slow",
    "image_pull_failed",
    "unschedulable_resources",
    "unschedulable_placement",
    "unschedulable_nodes_down",
    "unschedulable",
    "kubelet_rejected",
    "node_disk_full",
    "pod_sandbox",
    "volume_missing",
    "volume_failed",
    "config_missing",
    "container_config",
    "command_missing",
    "container_create",
    "command_not_found",
    "command_not_executable",
    "start_failed",
    "start_timeout",
    "init_failed",
    "oom_at_start",
    "oom_at_run",
    "process_ended",
    "process_crashed",
    "process_killed",
    "liveness_failed",
    "readiness_failed",
    "evicted_storage_limit",
    "evicted_node_pressure",
    "drained",
    "preempted",
    "node_shutdown",
    "node_lost",
    "deadline_exceeded",
    "deleted",
    "pod_failed",
    "quota_exceeded",
    "limits_refused",
    "policy_refused",
    "reference_missing",
    "spec_invalid",
    "request_too_large",
    "permission_denied",
    "credentials_refused",
    "namespace_missing",
    "namespace_terminating",
    "name_taken",
    "api_overloaded",
    "api_unavailable",
    "create_refused",
]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the list.

    Attributes:
        title: What happened, a sentence.
        fault: As in `sandbox_k8s.errors`: only ``task`` and ``agent`` may ever count against a rollout.
        retryable: Whether a new sandbox, there or later, can succeed without anybody changing anything.
        heals: Whether Kubernetes itself keeps trying and this very pod may still become ready. If not,
            waiting is pointless.
        advice: What to do about it.
    """

    title: str
    fault: Fault
    retryable: bool
    heals: bool
    advice: str
