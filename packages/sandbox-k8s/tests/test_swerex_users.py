"""SWE-agent and mini-swe-agent, unmodified, with a `K8sDeployment`."""

import asyncio
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from sandbox_k8s import ClientConfig, KubernetesConfig, LocalConfig

pytest.importorskip("swerex.runtime.remote", reason="needs the extra sandbox-k8s[swerex]")

from sandbox_k8s.swerex import K8sDeployment, K8sDeploymentConfig


@pytest.fixture
def local(root: Path) -> LocalConfig:
    return LocalConfig(root=root, isolation="process", grace_s=0.3)


@pytest.mark.parametrize(
    "place", ["process", "fake", pytest.param("kubernetes", marks=pytest.mark.cluster)], indirect=True
)
def test_mini_swe_agent(config: ClientConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    reason = "needs mini-swe-agent"
    module = pytest.importorskip("minisweagent.environments.extra.swerex_docker", reason=reason)
    submitted = pytest.importorskip("minisweagent.exceptions", reason=reason).Submitted

    class K8sEnvironment(module.SwerexDockerEnvironment):
        def __init__(self, deployment: K8sDeployment, **config: Any) -> None:
            self.config = module.SwerexDockerEnvironmentConfig(**config)
            self.deployment = deployment
            asyncio.run(self.deployment.start())

    place = "kubernetes" if isinstance(config, KubernetesConfig) else "local"
    environment = K8sEnvironment(K8sDeployment(**{place: config}), image="", cwd="/", timeout=5)
    asked = {"command": "pwd; echo err >&2; exit 3"}
    assert environment.execute(asked) == {"output": "/\nerr\n", "returncode": 3, "exception_info": ""}
    late = environment.execute({"command": "sleep 30"}, timeout=1)
    assert (late["returncode"], late["extra"]["exception_type"]) == (-1, "CommandTimeoutError")
    with pytest.raises(submitted):
        environment.execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo the patch"})
    asyncio.run(environment.deployment.stop())


@pytest.mark.filterwarnings("default")  # its own, at import
def test_swe_agent(local: LocalConfig) -> None:
    """Its own settings take SWE-ReX's deployments alone, so ours goes in by assignment or as an object."""
    if not list(distributions(name="sweagent")):  # some tests bring a module of this name
        pytest.skip("needs SWE-agent 1.1, not on PyPI")
    module = pytest.importorskip("sweagent.environment.swe_env", reason="needs SWE-agent 1.1, not on PyPI")
    config = module.EnvironmentConfig(post_startup_commands=["export FROM_SETTINGS=1"])
    config.deployment = K8sDeploymentConfig(local=local)
    by_object = module.SWEEnv(
        deployment=K8sDeployment(local=local), repo=None, post_startup_commands=["export FROM_SETTINGS=1"]
    )
    for environment in (module.SWEEnv.from_config(config), by_object):
        environment.start()
        assert environment.communicate("cd /tmp; echo $FROM_SETTINGS", check="raise") == "1\n"
        environment.write_file("/tmp/sweagent-ours", "a\n")
        assert environment.read_file("/tmp/sweagent-ours") == "a\n"
        environment.execute_command("rm /tmp/sweagent-ours")
        environment.hard_reset()
        assert environment.communicate("pwd", check="raise") == "/\n"
        with pytest.raises(RuntimeError, match="failed"):
            environment.communicate("false", check="raise")
        environment.close()
