"""Who one is to the API server, and how to reach it.

The only file that loads the official client. It brings every way of proving who one is: tokens that are
renewed, client certificates, programs, in-cluster accounts. Its models and generated calls are not used: they
drop fields that they do not know, differ from release to release, and since 37 the first call of each builds
pydantic schemas for seconds while it holds the interpreter.
"""

import logging
import ssl
from collections.abc import Callable
from importlib import import_module
from threading import Lock
from typing import Any

import anyio
import anyio.to_thread

from sandbox_k8s.clock import SystemClock
from sandbox_k8s.errors import BackendUnavailableError, ClusterError, ConfigError, SandboxError
from sandbox_k8s.stats import ClientStats

from .admission import classify_refusal
from .config import KubernetesConfig
from .kubeconfig import find_context

_log = logging.getLogger("sandbox_k8s")
_READ_EVERY_S = 10.0
_RENEW_EVERY_S = 5.0


class ApiAccess:
    """A cluster's address and the caller's credentials.

    Reading credentials may run a program or ask an identity provider: seconds, in which nothing else may
    wait. One thread at a time does it, ahead of time since the library renews what ends within five minutes;
    everybody else gets what is known.
    """

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
        self._bad_yaml: type[Exception] = import_module("yaml").YAMLError  # the client library needs it, too
        self.timeout: Callable[..., Any] = http.Timeout
        self._config = config
        self._configuration = self._load(config)
        self._known: dict[str, Any] | None = None
        self._reading = Lock()
        self._clock = SystemClock()
        self._renewed_s = float("-inf")
        self.base_url = str(self._configuration.host).rstrip("/") + "/"
        try:
            self.tls = _tls(self._configuration) if self.base_url.startswith("https") else None
        except (OSError, ValueError) as problem:  # SSLError is one
            where = config.kubeconfig or "this configuration"
            raise ConfigError(
                f"KubernetesConfig.kubeconfig: the certificates of {where} cannot be used: {problem}"
            ) from problem
        headers = self.options()["headers"]
        if self._configuration.api_key and not headers:
            # kubernetes-client/python#2591: every request would be an anonymous one.
            raise BackendUnavailableError(
                f"kubernetes {self._library.__version__} holds a token and sends none with its requests; do: "
                "pip install 'kubernetes!=36.0.0,!=36.0.1'"
            )

    def new_pool(self) -> Any:
        """urllib3's ``PoolManager`` with the client's TLS and proxy settings, for one thread at a time."""
        return self._rest.RESTClientObject(self._configuration).pool_manager

    def options(self) -> dict[str, Any]:
        """What each request needs: ``headers`` with the token of now, perhaps a proxy. May block.

        Tokens of service accounts are short-lived: their file is read again each minute, and the kubelet
        replaces it long before the old one expires.

        Raises:
            ClusterError: The token cannot be read now; the next time may be better.
        """
        if self._known is not None and self._reading.locked():
            return self.known_options()  # another thread is at it
        with self._reading:
            self._known = self._read()
        return self.known_options()

    def known_options(self) -> dict[str, Any]:
        """The same as it was read last, for the event loop; see `keep_fresh`."""
        known = self._known or {"headers": {}}
        return {**known, "headers": dict(known["headers"])}

    async def keep_fresh(self, stats: ClientStats) -> None:
        """Read them again and again in a thread, until cancelled.

        Args:
            stats: Counts ``credential_failures``.
        """
        failing = False
        while True:
            await anyio.sleep(_READ_EVERY_S)
            try:
                # Left alone when cancelled: a program that hangs must not keep a client from closing.
                await anyio.to_thread.run_sync(self.options, abandon_on_cancel=True)
                failing = False
            except ClusterError as problem:
                stats.credential_failures += 1
                level = logging.DEBUG if failing else logging.WARNING
                _log.log(level, "%s; those that were read last are used on", problem)
                failing = True

    def renew(self) -> bool:
        """Read everything again, since the API server refused who we are: the kubeconfig may have changed.

        May block. Certificates of connections stay as they are.

        Returns:
            Whether another try makes sense: it was done, or has just been done.
        """
        with self._reading:
            if self._clock.monotonic_s() - self._renewed_s < _RENEW_EVERY_S:
                return True
            before = self._configuration
            try:
                self._configuration = self._load(self._config)
                self._known = self._read()
            except SandboxError as problem:
                self._configuration = before
                _log.warning("the API server refuses the credentials, and there are no others: %s", problem)
                return False
            self._renewed_s = self._clock.monotonic_s()
            return True

    def _read(self) -> dict[str, Any]:
        try:
            settings = self._configuration.auth_settings().values()
        except Exception as problem:  # the library, a plug-in, an identity provider: no list is complete
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
                find_context(config.kubeconfig, config.context)  # its errors say what there is instead
                file = None if config.kubeconfig is None else str(config.kubeconfig)
                loader.load_kube_config(file, context=config.context, client_configuration=configuration)
        except (loader.ConfigException, OSError, ValueError, TypeError, self._bad_yaml) as problem:
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
