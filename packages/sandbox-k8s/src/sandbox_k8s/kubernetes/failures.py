"""The closed list of what can happen to a pod: whose fault, whether to try again, what to do.

The list is data. Which signs lead to which entry is in `classify` (pods) and `admission` (refusals); what a
real cluster was seen to do is in the recordings of the tests.
"""

from .failure import Failure, FailureName


def _infra(title: str, advice: str, *, retryable: bool = True, heals: bool = False) -> Failure:
    return Failure(title=title, fault="infra", retryable=retryable, heals=heals, advice=advice)


def _image(title: str, advice: str, *, retryable: bool = False, heals: bool = False) -> Failure:
    return Failure(title=title, fault="image", retryable=retryable, heals=heals, advice=advice)


def _task(title: str, advice: str) -> Failure:
    return Failure(title=title, fault="task", retryable=False, heals=False, advice=advice)


_IMAGES: dict[FailureName, Failure] = {
    "image_name_invalid": _image(
        "The image's name is not a valid reference.",
        "Correct the name: [registry/]repository[:tag|@digest], the repository in small letters.",
    ),
    "image_not_found": _image(
        "The registry has no such image or tag.",
        "Check the repository and the tag; push the image, or point the task at one that exists.",
    ),
    "image_auth": _image(
        "The registry refuses to give the image to this cluster.",
        "Check the name first: many registries answer the same for a repository that does not exist. "
        "If it is right, give the pod a pull secret that may read it (imagePullSecrets).",
    ),
    "image_not_present": _image(
        "The image is not on the node, and the pull policy forbids to fetch it.",
        "Load the image onto the nodes, or set imagePullPolicy to IfNotPresent.",
    ),
    "image_architecture": _image(
        "The program in the image, or the image itself, is for another processor than the node's.",
        "Use an image (and tools) of the node's architecture, or select nodes by kubernetes.io/arch.",
    ),
    "image_rate_limit": _infra(
        "The registry limits how often this cluster may pull.",
        "Start fewer different images at once, prefetch, use a mirror, or authenticate for a higher limit.",
        heals=True,
    ),
    "image_registry_error": _infra(
        "The registry fails (an answer of 5xx).",
        "Wait; the kubelet tries again with growing pauses. If it lasts, look at the registry.",
        heals=True,
    ),
    "image_registry_unreachable": _infra(
        "The node cannot reach the registry.",
        "Check the registry, its port, and the node's network and proxy; the kubelet tries again.",
        heals=True,
    ),
    "image_registry_host_unknown": _infra(
        "The node cannot find the registry's host name.",
        "A typo in the name never heals, an outage of DNS does: check the spelling, then the node's DNS.",
        heals=True,
    ),
    "image_registry_tls": _infra(
        "The node does not trust the registry's certificate, or one of them does not speak TLS.",
        "Give the container runtime of the nodes the registry's CA, or correct the certificate.",
        retryable=False,
    ),
    "image_pull_cut": _infra(
        "The image arrived incomplete or damaged.",
        "The kubelet pulls again. If it goes on, look at the registry, the proxy in between, or push anew.",
        heals=True,
    ),
    "image_pull_slow": _infra(
        "The image was not there in time.",
        "Pulls are one at a time per node by default and show no progress: a big or stalled pull holds up "
        "all others, and deleting its pod may not free them. Prefetch, raise the start time-out, or use "
        "another node.",
        heals=True,
    ),
    "image_pull_failed": _infra(
        "The image cannot be pulled.",
        "Read the evidence; the kubelet tries again.",
        heals=True,
    ),
}

_PLACES: dict[FailureName, Failure] = {
    "unschedulable_resources": _infra(
        "No node has enough of what the pod asks for.",
        "Wait for other sandboxes to end or for the autoscaler; if no node is that big, ask for less.",
        heals=True,
    ),
    "unschedulable_placement": _infra(
        "No node fits the pod's selector, affinity or tolerations.",
        "Compare nodeSelector, affinity and tolerations with the labels and taints of the nodes.",
        heals=True,
    ),
    "unschedulable_nodes_down": _infra(
        "The nodes are cordoned or not ready.",
        "Look at `kubectl get nodes`; uncordon them or wait until they are back.",
        heals=True,
    ),
    "unschedulable": _infra(
        "The scheduler finds no node.",
        "Read the scheduler's reason in the evidence.",
        heals=True,
    ),
    "kubelet_rejected": _infra(
        "The node refused the pod when it arrived.",
        "Start again: the scheduler did not know yet what the node knew. Do not set spec.nodeName.",
    ),
    "node_disk_full": _infra(
        "The node's disk is full.",
        "Let the node clean up images, or use another; give sandboxes a limit of ephemeral-storage.",
        heals=True,
    ),
    "pod_sandbox": _infra(
        "The node cannot set up the pod's network or its pause container.",
        "Look at the network plugin (CNI) and the runtime of the node; the kubelet tries again.",
        heals=True,
    ),
}

_CONFIGURATION: dict[FailureName, Failure] = {
    "volume_missing": _infra(
        "A volume's source does not exist.",
        "Create the Secret, ConfigMap, claim or folder that the evidence names, in the pod's namespace.",
        retryable=False,
    ),
    "volume_failed": _infra(
        "A volume cannot be attached or mounted.",
        "Look at the storage driver; the kubelet tries again.",
        heals=True,
    ),
    "config_missing": _infra(
        "A Secret or ConfigMap (or a key of it) for the environment does not exist.",
        "Create what the evidence names, in the pod's namespace.",
        retryable=False,
    ),
    "container_config": _infra(
        "The container's settings contradict each other or the image.",
        "Read the evidence; with runAsNonRoot, also set a numeric runAsUser.",
        retryable=False,
    ),
    "command_missing": _image(
        "The image says no command, nor does the pod.",
        "Give the container a command.",
    ),
    "container_create": _infra(
        "The runtime cannot create the container.",
        "Read the evidence; the kubelet tries again.",
        heals=True,
    ),
    "command_not_found": _image(
        "The command does not exist in the image.",
        "Check the command and its path inside the image; for a script, also the program in its first line.",
    ),
    "command_not_executable": _image(
        "The command may not be executed.",
        "Set its mode, check that it is a file and not a folder, and that its volume allows execution.",
    ),
    "start_failed": _infra(
        "The container's process cannot be started.",
        "Read the runtime's message in the evidence.",
    ),
    "start_timeout": _infra(
        "The pod was not ready in time, and nothing says why.",
        "Look at the node (kubelet, runtime, load) and raise the start time-out if starts are just slow.",
    ),
    "init_failed": _infra(
        "An init container failed.",
        "Read its log: kubectl logs POD -c NAME. The one that copies the tools needs a writable folder.",
        retryable=False,
    ),
}

_RUNS: dict[FailureName, Failure] = {
    "oom_at_start": _task(
        "The memory limit is too low for the container to start.",
        "Raise the memory limit.",
    ),
    "oom_at_run": _task(
        "The container used more memory than its limit, and its main process was killed.",
        "Raise the memory limit, or limit what the commands inside take.",
    ),
    "process_ended": _infra(
        "The main process ended by itself, with exit code 0.",
        "A sandbox's main process should live until it is stopped: check the command, or its lease.",
    ),
    "process_crashed": _infra(
        "The main process ended by itself with an error.",
        "Read its log: kubectl logs POD (with --previous if it was restarted).",
    ),
    "process_killed": _infra(
        "The main process was killed, and nothing says by whom.",
        "Perhaps a command inside killed it, or the node ran out of memory: look at the node's kernel log.",
    ),
    "liveness_failed": _infra(
        "The kubelet killed the container because its liveness (or startup) probe failed.",
        "Remove the liveness probe: a busy sandbox is not a dead one.",
    ),
    "readiness_failed": _infra(
        "The container runs but does not pass its readiness probe.",
        "Read its log; the probe may come right again.",
        heals=True,
    ),
    "evicted_storage_limit": _task(
        "The pod wrote more to disk than its own limit allows.",
        "Raise ephemeral-storage (or the emptyDir's sizeLimit), or write less. Other pods are not affected.",
    ),
    "evicted_node_pressure": _infra(
        "The node ran short of memory, disk or processes and evicted the pod.",
        "Start again elsewhere; set requests = limits, ephemeral-storage too: such pods are evicted last.",
    ),
    "drained": _infra(
        "The pod was evicted through the API, as a drain of its node does.",
        "Start again: another node takes it. For long sandboxes, a PodDisruptionBudget delays drains.",
    ),
    "preempted": _infra(
        "The scheduler removed the pod for one of a higher priority.",
        "Start again, or give the sandboxes a PriorityClass that is not preempted.",
    ),
    "node_shutdown": _infra(
        "The node was shut down.",
        "Start again elsewhere; on spot machines expect it.",
    ),
    "node_lost": _infra(
        "The node does not answer any more.",
        "A node that comes back brings the sandbox with it: wait a little, then start a new one. The old "
        "processes may still run: never let both act on one outside resource.",
        heals=True,
    ),
    "deadline_exceeded": _infra(
        "The pod reached the longest life it was given (activeDeadlineSeconds).",
        "Raise the deadline, which is the last stop behind the lease, or park for shorter times.",
    ),
    "deleted": _infra(
        "Somebody else deleted the pod.",
        "See who deletes pods in this namespace: another reaper, a person, a clean-up job.",
    ),
    "pod_failed": _infra(
        "The pod failed, and nothing says why.",
        "Look at its events before they expire (1 h): kubectl describe pod.",
    ),
}

_REFUSALS: dict[FailureName, Failure] = {
    "quota_exceeded": _infra(
        "The namespace's quota is used up.",
        "Wait until other pods end, or raise the ResourceQuota.",
        heals=True,
    ),
    "limits_refused": _infra(
        "The namespace does not allow these requests or limits, or demands some that are missing.",
        "Set requests and limits within the LimitRange and for every resource that the ResourceQuota counts.",
        retryable=False,
    ),
    "policy_refused": _infra(
        "A policy of the cluster refuses such a pod.",
        "Set what the evidence lists in the security context, or use a namespace that allows the pod.",
        retryable=False,
    ),
    "reference_missing": _infra(
        "The pod names something that does not exist.",
        "Create the RuntimeClass, PriorityClass or ServiceAccount of the evidence, or do not name it.",
        retryable=False,
    ),
    "spec_invalid": _task(
        "The pod is not valid.",
        "Correct the fields that the evidence names.",
    ),
    "request_too_large": _task(
        "The pod is too large to be stored.",
        "Keep data out of the pod's specification and annotations: upload files after the start.",
    ),
    "permission_denied": _infra(
        "This account may not do that.",
        "Bind the Role of the shipped manifest to the account that the evidence names.",
        retryable=False,
    ),
    "credentials_refused": _infra(
        "The API server does not accept the credentials.",
        "Renew the token or the certificate of the kubeconfig; inside a pod, check its service account.",
        retryable=False,
    ),
    "namespace_missing": _infra(
        "The namespace does not exist.",
        "Create it, or correct its name in the configuration.",
        retryable=False,
    ),
    "namespace_terminating": _infra(
        "The namespace is being deleted.",
        "Use another namespace.",
        retryable=False,
    ),
    "name_taken": _infra(
        "A pod of that name exists.",
        "Read it: if it carries this request's id, it is the answer that was lost; else choose another name.",
    ),
    "api_overloaded": _infra(
        "The API server asks for fewer requests.",
        "Wait as long as Retry-After says and slow down.",
        heals=True,
    ),
    "api_unavailable": _infra(
        "The API server, or the store behind it, failed to answer.",
        "Try again. The pod may have been created all the same: look it up by name first.",
        heals=True,
    ),
    "create_refused": _infra(
        "The API server refused the pod.",
        "Read its message in the evidence.",
        retryable=False,
    ),
}

FAILURES: dict[FailureName, Failure] = {**_IMAGES, **_PLACES, **_CONFIGURATION, **_RUNS, **_REFUSALS}
"""The whole list, by name."""
