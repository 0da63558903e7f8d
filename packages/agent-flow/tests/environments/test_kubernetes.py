"""What is of Kubernetes alone: settings, errors, and sandboxes that somebody else took."""

import msgspec
import pytest
from agent_flow.environments.k8s import KubernetesEnvironments
from agent_flow.environments.local import LocalEnvironments
from agent_flow.errors import ConfigError, EnvError
from agent_flow.outcome import outcome_of_error
from sandbox_k8s import LocalConfig, SandboxClient

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
Config = KubernetesEnvironments.Config


@pytest.mark.original("A-k8s-settings")
@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"injection": "image_volume"}, "needs a tools image"),
        ({"injection": "baked", "tools_image": "x:1"}, "takes no tools image"),
        ({"injection": "pip", "namespace": "No_Namespace"}, "is no namespace"),
        ({"injection": "pip", "run_as_user": 0}, "not root"),
        ({"injection": "pip", "lease_s": 0.5}, "lease_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(context, keys, why):
    with pytest.raises(ConfigError, match=why) as caught:
        KubernetesEnvironments(Config(**keys), context)
    assert caught.value.where.endswith("[environment]")


async def test_a_kubeconfig_that_is_not_there_is_said_at_the_start(context, why_not):
    if why := why_not("fake"):
        pytest.skip(why)
    config = Config(
        injection="baked", kubeconfig="/nowhere/kubeconfig", run_key_file=str(context.scratch / "key")
    )
    with pytest.raises(ConfigError, match="kubeconfig"):
        async with KubernetesEnvironments(config, context).session():
            pass


@pytest.mark.original("A-generate-start-error")
@pytest.mark.parametrize(
    ("doom", "cause", "fault"),
    [("image-not-found", "image_not_found", "image"), ("oom-at-start", "oom_at_start|start_failed", "task")],
)
async def test_a_pod_that_does_not_come_up_says_why(why_not, request, repository, doom, cause, fault):
    if why := why_not("fake"):
        pytest.skip(why)
    made = request.getfixturevalue("make_place")("fake")
    async with made.environments.session():
        request.getfixturevalue("fake").doom(doom)
        with pytest.raises(EnvError) as caught:
            async with made.environments.open(repository):
                pass
    error = caught.value
    assert error.cause in cause.split("|")
    assert error.fault in (fault, "infra")
    assert error.evidence
    row = outcome_of_error(error)
    assert (row.sample, row.reward) == (False, None), "never a reward of 0"
    assert made.left() == []


@pytest.mark.original("A-one-owner")
async def test_a_sandbox_that_another_worker_took_costs_no_rollout(context, repository):
    """Its stop is refused: counted, logged, and what was done in it stands."""
    root = context.scratch / "taken"
    environments = LocalEnvironments(LocalEnvironments.Config(root=str(root)), context)
    async with SandboxClient.local(LocalConfig(root=root)) as other, environments.session():
        async with environments.open(repository) as environment:
            done = await environment.execute(["true"], timeout_s=30)
            (info,) = await other.list()
            taken = await other.attach(info.handle)
        assert done.exit_code == 0
        assert (environments.stops.done, environments.stops.failed) == (0, 1)
        await taken.stop()


async def test_a_sandbox_that_is_lost_is_an_infrastructure_failure(context, repository):
    root = context.scratch / "lost"
    environments = LocalEnvironments(LocalEnvironments.Config(root=str(root)), context)
    async with (
        SandboxClient.local(LocalConfig(root=root)) as other,
        environments.session(),
        environments.open(repository) as environment,
    ):
        (info,) = await other.list()
        await (await other.attach(info.handle)).stop()
        with pytest.raises(EnvError) as caught:
            await environment.execute(["true"], timeout_s=30)
    assert caught.value.fault == "infra"
    row = outcome_of_error(caught.value)
    assert (row.sample, row.reward) == (False, None)


@pytest.mark.original("A-k8s-settings")
def test_every_key_is_documented():
    """`init` and the reference are made from these."""
    import ast
    import inspect

    from agent_flow.environments.docker import DockerEnvironments
    from agent_flow.environments.e2b import E2bEnvironments

    for provider in (KubernetesEnvironments, DockerEnvironments, E2bEnvironments, LocalEnvironments):
        (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(provider))).body
        (config,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        keys = [
            (node.target.id, isinstance(after, ast.Expr))
            for node, after in zip(config.body, [*config.body[1:], None], strict=True)
            if isinstance(node, ast.AnnAssign)
        ]
        assert [name for name, documented in keys if not documented] == []
        assert {name for name, _ in keys} == {field.name for field in msgspec.structs.fields(provider.Config)}
