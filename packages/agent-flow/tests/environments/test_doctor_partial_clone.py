"""`agent-flow doctor` refuses a partial clone as the flow does, before a rollout meets it."""

import anyio
import pytest
from agent_flow.environments.repository import build_repository, git
from agent_flow.probe import look_inside
from agent_flow.protocols import CommandOutput, EnvironmentSpec

pytestmark = pytest.mark.anyio


class Here:
    """A folder of this machine as an environment."""

    def __init__(self, folder):
        self.workdir = str(folder)

    async def execute(self, command, *, timeout_s, cwd=None):
        done = await anyio.run_process(list(command), cwd=cwd or self.workdir, check=False)
        return CommandOutput(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def describe(self):
        return {}


class Heard:
    def __init__(self):
        self.failed, self.warned = [], []

    def fail(self, text, fix=""):
        self.failed.append(text)

    def warn(self, text, fix=""):
        self.warned.append(text)


@pytest.fixture
def origin(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("x = 1\n")
    commit = build_repository(source, tmp_path / "origin", "demo")
    git(tmp_path / "origin", "config", "uploadpack.allowFilter", "true")
    return tmp_path / "origin", commit


@pytest.mark.parametrize("how", ["--filter=blob:none", "--filter=tree:0"])
async def test_a_partial_clone_is_named(origin, tmp_path, how):
    folder, commit = origin
    git(tmp_path, "clone", "--quiet", how, f"file://{folder}", "clone")
    heard = Heard()
    spec = EnvironmentSpec(image="i", workdir=str(tmp_path / "clone"), base_commit=commit)
    assert await look_inside(Here(tmp_path / "clone"), spec, heard) == ""
    (said,) = heard.failed
    assert said.startswith(f"{tmp_path / 'clone'}: a partial clone; the image needs a whole one")


async def test_a_whole_one_is_fine(origin, tmp_path):
    folder, commit = origin
    git(tmp_path, "clone", "--quiet", f"file://{folder}", "clone")
    heard = Heard()
    spec = EnvironmentSpec(image="i", workdir=str(tmp_path / "clone"), base_commit=commit)
    assert commit[:12] in await look_inside(Here(tmp_path / "clone"), spec, heard)
    assert (heard.failed, heard.warned) == ([], [])
