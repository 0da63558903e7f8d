"""Who one is to the API server, and how to reach it.

The only file that loads the official client. It brings every way of proving who one is: tokens that are
renewed, client certificates, programs, in-cluster accounts. Its models and generated calls are not used: they
drop fields that they do not know, differ from release to release, and since 37 the first call of each builds
pydantic schemas for seconds while it holds the interpreter.
"""

import ssl
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sandbox_k8s.errors import BackendUnavailableError, ClusterError, ConfigError

from .admission import classify_refusal
from .config import KubernetesConfig


class ApiAccess:
    """A cluster's address and the caller's credentials."""

    def __init__(self, config: KubernetesConfig) -> None:
        """Read the kubeconfig or the in-cluster configuration; may block.

        Raises:
            BackendUnavailableError: The client library is not installed, or sends no credentials.
            ConfigError: There is no usable configuration.
        """
        try:
            self._library: Any = import_module("kubernetes")
            self._rest: Any = import_module("kubernetes.client.rest")
            http: Any = import_module("urllib3")
        except ImportError as problem:
            raise BackendUnavailableError(
                f"no Kubernetes client library ({problem}); do: pip install 'sandbox-k8s[kubernetes]'"
            ) from problem
        self.no_answer: tuple[type[Exception], ...] = (http.exceptions.HTTPError, OSError)
        self.timeout: Callable[..., Any] = http.Timeout
        self._configuration = self._load(config)
        self.base_url = str(self._configuration.host).rstrip("/") + "/"
        self.tls = _tls(self._configuration) if self.base_url.startswith("https") else None
        if self._configuration.api_key and not self.options()["headers"]:
            # kubernetes-client/python#2591: every request would be an anonymous one.
            raise BackendUnavailableError(
                f"kubernetes {self._library.__version__} holds a token and sends none with its requests; do: "
                "pip install 'kubernetes!=36.0.0,!=36.0.1'"
            )

    def new_pool(self) -> Any:
        """urllib3's ``PoolManager`` with the client's TLS and proxy settings, for one thread at a time."""
        return self._rest.RESTClientObject(self._configuration).pool_manager

    def options(self) -> dict[str, Any]:
        """What each streamed request needs: ``headers`` with the token of now, perhaps a proxy.

        Tokens of service accounts are short-lived: their file is read again each minute, and the kubelet
        replaces it long before the old one expires.

        Raises:
            ClusterError: The token cannot be read now; the next time may be better.
        """
        try:
            settings = self._configuration.auth_settings().values()
        except (self._library.config.ConfigException, OSError) as problem:
            what = f"reading the credentials: {type(problem).__name__}: {problem}"
            raise ClusterError(what, diagnosis=classify_refusal(0, what), code=0) from problem
        headers = {one["key"]: one["value"] for one in settings if one["in"] == "header" and one["value"]}
        options: dict[str, Any] = {"headers": headers}
        if self._configuration.proxy:
            options["proxy"] = self._configuration.proxy
        server_name = getattr(self._configuration, "tls_server_name", None)  # not in all releases
        if server_name:
            options["server_hostname"] = server_name
        return options

    def _load(self, config: KubernetesConfig) -> Any:
        configuration = self._library.client.Configuration()
        loader = self._library.config
        try:
            if config.kubeconfig is None and config.context is None and self._in_cluster():
                loader.load_incluster_config(client_configuration=configuration)
            else:
                file = None if config.kubeconfig is None else str(config.kubeconfig)
                loader.load_kube_config(file, context=config.context, client_configuration=configuration)
        except (loader.ConfigException, OSError) as problem:
            where = str(config.kubeconfig or "")
            if not where:
                where = "this is no pod with a service account's token, and $KUBECONFIG or ~/.kube/config"
            raise ConfigError(f"KubernetesConfig.kubeconfig: {where} cannot be used: {problem}") from problem
        configuration.retries = False  # PodApi knows what may be tried again
        return configuration

    def _in_cluster(self) -> bool:
        loader = self._library.config
        try:
            loader.load_incluster_config(client_configuration=self._library.client.Configuration())
        except loader.ConfigException:
            return False
        return True


def _tls(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(
        cafile=configuration.ssl_ca_cert, cadata=getattr(configuration, "ca_cert_data", None)
    )
    if getattr(configuration, "disable_strict_ssl_verification", False):
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
