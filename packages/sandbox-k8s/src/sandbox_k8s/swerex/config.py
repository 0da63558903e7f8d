"""Settings of a deployment, as SWE-ReX writes settings: a pydantic model, good for YAML."""

from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, model_validator
from swerex.deployment.abstract import AbstractDeployment

from sandbox_k8s.client import SandboxClient
from sandbox_k8s.config import LocalConfig
from sandbox_k8s.errors import ConfigError
from sandbox_k8s.kubernetes.config import KubernetesConfig
from sandbox_k8s.spec import SandboxSpec

S = TypeVar("S", bound=msgspec.Struct)


def _decoded(kind: type[S], value: object) -> S:
    if isinstance(value, kind):
        return value
    try:
        # Paths are all that these settings hold beside JSON's own types.
        return msgspec.convert(value, kind, dec_hook=lambda wanted, text: wanted(text))
    except (msgspec.ValidationError, TypeError) as problem:
        raise ValueError(f"{kind.__name__}: {problem}") from problem


def _plain(value: msgspec.Struct) -> Any:
    return msgspec.to_builtins(value, enc_hook=str)


_Kubernetes = Annotated[
    KubernetesConfig, PlainValidator(partial(_decoded, KubernetesConfig)), PlainSerializer(_plain)
]
_Local = Annotated[LocalConfig, PlainValidator(partial(_decoded, LocalConfig)), PlainSerializer(_plain)]
_Spec = Annotated[SandboxSpec, PlainValidator(partial(_decoded, SandboxSpec)), PlainSerializer(_plain)]


class K8sDeploymentConfig(BaseModel):
    """Where a deployment's sandbox runs, and what it is. Holds no secret.

    Structures may be given as dicts, as they come from YAML:
    ``K8sDeploymentConfig(image="python:3.12", kubernetes={"run": "r1", "injection": {"kind": "baked"}})``.
    """

    image: str | None = None
    """The sandbox's image; None is that of ``sandbox`` or ``kubernetes``."""
    kubernetes: _Kubernetes | None = None
    """A cluster. Give this, or ``local``, or a shared client to `K8sDeployment`."""
    local: _Local | None = None
    """This machine; ``{}`` for the defaults."""
    sandbox: _Spec = SandboxSpec()
    """Everything else about the sandbox: environment, leases, limits, labels."""
    type: Literal["k8s"] = "k8s"
    """Discriminator for (de)serialization/CLI. Do not change."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.kubernetes is not None and self.local is not None:
            raise ValueError("K8sDeploymentConfig: give kubernetes or local, not both")
        return self

    def spec(self) -> SandboxSpec:
        """The sandbox to start."""
        return self.sandbox if self.image is None else msgspec.structs.replace(self.sandbox, image=self.image)

    def client(self) -> SandboxClient:
        """A client of its place, not open yet.

        Raises:
            ConfigError: No place is given.
        """
        if self.kubernetes is not None:
            return SandboxClient.kubernetes(self.kubernetes)
        if self.local is not None:
            return SandboxClient.local(self.local)
        raise ConfigError(
            "K8sDeployment has no place: give kubernetes=KubernetesConfig(...), local={} for this machine, "
            "or the SyncSandboxClient of several deployments as client="
        )

    def get_deployment(self) -> AbstractDeployment:
        """A deployment of these settings, not started."""
        from .deployment import K8sDeployment  # it needs this module

        return K8sDeployment.from_config(self)
