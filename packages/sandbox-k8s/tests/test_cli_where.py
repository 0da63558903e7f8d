"""Which cluster the options choose, as a user of kubectl expects, and errors that say what to do."""

import argparse
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from sandbox_k8s import ConfigError, Injection, KubernetesConfig, LocalConfig
from sandbox_k8s.cli import main, where
from sandbox_k8s.kubernetes import kubeconfig
from sandbox_k8s.kubernetes.access import ApiAccess
from sandbox_k8s.testing import FakeCluster

pytest.importorskip("kubernetes", reason="the extra sandbox-k8s[kubernetes] is not installed")

FIRST = """
current-context: staging
clusters: [{name: c1, cluster: {server: 'https://one:6443'}}]
contexts:
- {name: staging, context: {cluster: c1, user: u, namespace: evals}}
- {name: prod, context: {cluster: c2, user: u}}
"""
SECOND = """
current-context: prod
clusters: [{name: c2, cluster: {server: 'https://two:6443'}}]
contexts: [{name: staging, context: {cluster: c2, user: u, namespace: ignored}}]
users:
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "one.yaml"
    path.write_text(FIRST)
    return path


def parsed(*words: str) -> argparse.Namespace:
    return where.parent().parse_args(words)


def cluster(*words: str) -> where.Cluster:
    place = where.place_of(parsed(*words))
    assert isinstance(place, where.Cluster)
    return place


def test_without_options_it_is_this_machine(tmp_path: Path) -> None:
    assert where.place_of(parsed("--root", str(tmp_path))) == LocalConfig(root=tmp_path, isolation="process")


def test_the_current_context_and_its_namespace(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cluster("--kubeconfig", str(file))
    assert place.at == "context 'staging' (https://one:6443), namespace 'evals'"
    assert (place.run, place.config.run) == (None, "default")
    monkeypatch.setenv("KUBECONFIG", str(file))
    place = cluster("-k", "-n", "mine", "--run", "r1", "--cluster", "big")
    assert (place.config.namespace, place.run, place.config.cluster) == ("mine", "r1", "big")
    assert place.config.kubeconfig == file
    assert cluster("--context", "prod").config.namespace == "default"


def test_of_several_files_the_first_mention_wins(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = file.with_name("two.yaml")
    second.write_text(SECOND)
    monkeypatch.setenv("KUBECONFIG", f"{file}:{second}:{file.with_name('missing')}")
    assert cluster("-k").at == "context 'staging' (https://one:6443), namespace 'evals'"
    assert cluster("--context", "prod").at == "context 'prod' (https://two:6443), namespace 'default'"


def test_the_kubeconfig_of_the_home_is_found(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(FIRST)
    assert cluster("--run", "r").context.name == "staging"


def test_in_a_pod_the_service_account_is_taken_unless_a_kubeconfig_is_named(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT", tmp_path)
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("runs\n")
    assert cluster("-k").at == "context 'in-cluster' (https://[fd00::1]:443), namespace 'runs'"
    assert cluster("-k").config.kubeconfig is None
    assert cluster("--kubeconfig", str(file)).context.name == "staging"
    monkeypatch.setenv("KUBECONFIG", str(file))
    assert cluster("-k").context.name == "staging"


def test_a_file_of_settings(tmp_path: Path, file: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text(
        f"kubeconfig = '{file.name}'\nrun_key_file = 'keys/run.key'\nrun = 'r1'\n"
        "cpu = 4\nnamespace = 'runs'\n[injection]\nkind = 'init_copy'\nimage = 'tools:1'\n"
    )
    place = cluster("--config", str(settings), "--run", "r2")
    assert place.knows_injection
    assert (place.run, place.config.run, place.config.cpu) == ("r2", "r2", 4.0)
    assert place.config.namespace == "runs"
    assert (place.config.kubeconfig, place.config.run_key_file) == (file, tmp_path / "keys" / "run.key")


def test_from_python_the_errors_are_the_same(file: Path) -> None:
    """The client library's own say "Invalid kube-config file. No configuration found."."""
    baked = Injection(kind="baked")
    for config, says in (
        (KubernetesConfig(injection=baked), "no cluster: .KUBECONFIG is not set"),
        (
            KubernetesConfig(injection=baked, kubeconfig=Path("/nope")),
            "cannot read kubeconfig /nope: No such",
        ),
        (
            KubernetesConfig(injection=baked, kubeconfig=file, context="prd"),
            f"no context 'prd' in {file}; there are: staging, prod; .* KubernetesConfig.context",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            ApiAccess(config)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-k"], "no cluster: $KUBECONFIG is not set, ~/.kube/config is not there, and this is no pod"),
        (["--kubeconfig", "/nonexistent/k"], "cannot read kubeconfig /nonexistent/k: No such file"),
        (["--kubeconfig", "FILE", "--context", "prd"], "no context 'prd' in FILE; there are: staging, prod;"),
        (["--kubeconfig", "BAD"], "BAD is no kubeconfig: "),
        (["--kubeconfig", "EMPTY"], "no current context in EMPTY; there are: none at all"),
        (["-k", "--root", "/tmp"], "--root is for sandboxes of this machine"),
        (["--config", "/nonexistent/c"], "cannot read /nonexistent/c: No such file"),
        (["--config", "FILE"], "FILE is not TOML: "),
        (["--kubeconfig", "FILE", "--run", "-x-"], "argument --run: expected one argument"),
        (["--kubeconfig", "FILE", "--run=-x-"], "KubernetesConfig.run '-x-' is no label"),
        (["--config", "TYPO"], "TYPO: Object contains unknown field `cpus`; see KubernetesConfig"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    words: list[str], says: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"FILE": str(file), "BAD": f"{tmp_path}/bad", "EMPTY": f"{tmp_path}/empty"}
    names["TYPO"] = f"{tmp_path}/typo.toml"
    Path(names["BAD"]).write_text("contexts: [3]")
    Path(names["EMPTY"]).write_text("{}")
    Path(names["TYPO"]).write_text(f"kubeconfig = '{file}'\ncpus = 3\n")
    code: object
    try:
        code = main(["ps", *(names.get(word, word) for word in words)])
    except SystemExit as ended:  # of argparse
        code = ended.code
    for name, path in names.items():
        says = says.replace(name, path)
    err = capsys.readouterr().err
    assert (code, says in err) == (2, True), err


def test_a_verb_that_is_missing_is_named(
    fake_cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_cluster.forbid("list", "pods")
    assert main(["ps", "--kubeconfig", str(fake_cluster.kubeconfig)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"context 'fake' ({fake_cluster.url}), namespace 'default': user " in line
    assert 'user "fake" may not list pods; ' in line
    assert "sandbox-k8s manifests rbac" in line


def test_refusals_of_the_fake_cluster_have_the_words_of_a_real_one(fake_cluster: FakeCluster) -> None:
    """Recorded of Kubernetes 1.36 with a service account that is bound to nothing."""
    fake_cluster.forbid("get", "pods/proxy")
    fake_cluster.forbid("list", "nodes")
    said = {
        "namespaces/default/pods/x/proxy/": (
            'pods "x" is forbidden: User "fake" cannot get resource "pods/proxy" in API group "" in the '
            'namespace "default"',
            {"name": "x", "kind": "pods"},
        ),
        "nodes": (
            'nodes is forbidden: User "fake" cannot list resource "nodes" in API group "" '
            "at the cluster scope",
            {"kind": "nodes"},
        ),
    }
    for path, (message, details) in said.items():
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{fake_cluster.url}/api/v1/{path}")
        status = json.loads(refused.value.read())
        refused.value.close()
        assert (status["code"], status["reason"]) == (403, "Forbidden")
        assert (status["message"], status["details"]) == (message, details)


@pytest.mark.parametrize("break_it", ["port", "token"])
def test_a_server_that_is_silent_or_does_not_know_the_caller(
    fake_cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: str
) -> None:
    text = fake_cluster.kubeconfig.read_text()
    said = {"port": (fake_cluster.url, "http://127.0.0.1:1"), "token": (fake_cluster.token, "stale")}
    broken = tmp_path / "broken"
    broken.write_text(text.replace(*said[break_it]))
    settings = tmp_path / "quick.toml"
    settings.write_text("api_patience_s = 0.1\n")
    code = main(["ps", "--config", str(settings), "--kubeconfig", str(broken)])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    if break_it == "port":
        assert code == 3
        assert "does not answer: Connection refused; check the address" in err
    else:
        assert code == 2
        assert "Unauthorized; renew the token or certificate of the kubeconfig" in err


def test_the_library_is_asked_for_when_it_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(kubeconfig, "import_module", refuse)
    with pytest.raises(Exception, match=r"pip install 'sandbox-k8s\[kubernetes\]'") as failed:
        kubeconfig.read_kubeconfig(file)
    assert not isinstance(failed.value, ConfigError)
