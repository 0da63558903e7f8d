"""The test surface: what of its own judging a patch touches."""

import subprocess

import pytest
from agent_flow.environments.repository import build_repository, git
from agent_flow.environments.test_surface import (
    changed_paths,
    reset_paths,
    split_patch,
    surface_of,
    without_paths,
)
from agent_flow.errors import EnvError
from agent_flow.protocols import EnvironmentSpec


@pytest.fixture
def repository(tmp_path):
    source = tmp_path / "source"
    (source / "tests").mkdir(parents=True)
    for name, text in {
        "a.py": "x = 1\n",
        "tests/test_a.py": "def test_a(): ...\n",
        "tests/test_b.py": "def test_b(): ...\n",
        "setup.cfg": "[metadata]\nname = demo\n\n[options]\nx = y\n\n[tool:pytest]\nfilterwarnings = error\n",
        "pyproject.toml": '[project]\nname = "demo"\n\n[tool.pytest.ini_options]\naddopts = "-q"\n',
        "package.json": '{\n  "name": "demo",\n  "scripts": {\n    "test": "jest"\n  }\n}\n',
        "Cargo.toml": '[package]\nname = "demo"\n\n[[test]]\nname = "all"\npath = "t.rs"\n',
    }.items():
        (source / name).write_text(text)
    commit = build_repository(source, tmp_path / "repository", "demo")
    return tmp_path / "repository", commit


def patch_of(folder, **files):
    """The patch of files that are written over a repository."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    git(folder, "add", "--all", "--force")
    command = ["git", "diff", "--cached", "--binary", "--full-index", "--no-renames"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout


WHOLE = [
    "conftest.py", "a/b/conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", ".coveragerc",
    "sitecustomize.py",
    "usercustomize.py", "lib/x.pth", "jest.config.js", "jest.config.ts", "web/vitest.config.mts",
    "vitest.workspace.ts", "jest.setup.js", ".mocharc.yml", ".mocharc.json", "test/mocha.opts",
    "karma.conf.js", "playwright.config.ts", "babel.config.js", "phpunit.xml.dist", "phpunit.xml", ".rspec",
    "spec/spec_helper.rb", ".config/nextest.toml", ".cargo/config.toml",
    "conftest/__init__.py", "tests/conftest.cpython-311-x86_64-linux-gnu.so", "lib/sitecustomize/__init__.py",
    "demo.dist-info/entry_points.txt", "src/demo.egg-info/entry_points.txt",
    "unittest.py", "pytest/__init__.py", "_pytest/__init__.py", "pluggy.abi3.so", "traceback.py",
]  # fmt: skip


@pytest.mark.parametrize("path", WHOLE)
def test_configuration_of_test_runners_is_flagged(repository, path):
    """verifiers#2152: a planted conftest.py scored 1.0."""
    folder, _ = repository
    found = surface_of(patch_of(folder, **{path: "x\n"}))
    assert found.configuration == (path,)
    assert found.counters()["surface_configuration"] == 1


@pytest.mark.parametrize(
    "path",
    ["a.py", "conftest.pyx", "my_conftest.py", "src/config.js", "docs/tox.init", "jest.md", "setup.py",
     "pytest_utils.py", "pytest_utils/__init__.py", "src/pytest/__init__.py", "pytest/more.py", "unittest.md",
     "pkg/inspect.py", "demo/entry_points.txt", "conftest/data/x.json"],
)  # fmt: skip
def test_other_files_are_not(repository, path):
    assert not surface_of(patch_of(repository[0], **{path: "changed\n"}))


def replaced(folder, name, old, new):
    text = (folder / name).read_text()
    assert old in text
    return patch_of(folder, **{name: text.replace(old, new)})


@pytest.mark.parametrize(
    ("name", "old", "new", "flagged"),
    [
        ("setup.cfg", "filterwarnings = error", "filterwarnings = ignore", True),
        ("setup.cfg", "name = demo", "name = demo\n[tool:pytest]\naddopts = -p planted", True),
        ("setup.cfg", "name = demo", "name = other", False),
        ("pyproject.toml", '"-q"', '"-q --deselect x"', True),
        ("pyproject.toml", 'name = "demo"', 'name = "other"', False),
        (
            "pyproject.toml",
            'name = "demo"\n',
            'name = "demo"\n[tool.pytest.ini_options]\npythonpath = "x"\n',
            True,
        ),
        ("pyproject.toml", '"demo"\n', '"demo"\n[ tool . "pytest".ini_options ]\nxx = 1\n', True),
        ("pyproject.toml", '"demo"\n', "\"demo\"\n['tool'.pytest.'ini_options']\nxx = 1\n", True),
        ("pyproject.toml", '"demo"\n', '"demo"\n["tool"."p\\u0079test".ini_options]\nxx = 1\n', True),
        ("pyproject.toml", '"demo"\n', '"demo"\n[tool]\npytest . ini_options . xx = 1\n', True),
        ("pyproject.toml", '"demo"\n', '"demo"\n[tool]\npytest = { ini_options = { xx = 1 } }\n', True),
        ("pyproject.toml", "addopts", "'addopts' ", True),
        ("pyproject.toml", '"demo"\n', '"demo"\n[tool.poetry.dev-dependencies]\npytest = "^7"\n', False),
        ("pyproject.toml", '"demo"\n', '"demo"\n[tool.ruff]\nline-length = 9\n', False),
        ("pyproject.toml", '"demo"\n', '"demo"\n# \0\n', True),  # binary: nobody sees what changed
        ("package.json", '"jest"', '"true"', True),
        ("package.json", '"demo"', '"other"', False),
        ("package.json", '"name": "demo",', '"name": "demo",\n  "jest": {"testMatch": []},', True),
        ("Cargo.toml", "t.rs", "u.rs", True),
        ("Cargo.toml", 'name = "demo"', 'name = "demo"\nautotests = false', True),
        ("Cargo.toml", 'name = "demo"', 'name = "other"', False),
    ],
)
def test_of_files_with_many_purposes_the_part_about_tests_counts(repository, name, old, new, flagged):
    found = surface_of(replaced(repository[0], name, old, new))
    assert found.configuration == ((name,) if flagged else ())


def test_files_of_the_test_patch_are_their_own_kind(repository, tmp_path):
    folder, _ = repository
    test_patch = patch_of(
        folder, **{"tests/test_a.py": "def test_a(): assert 1\n", "tests/new/conftest.py": "\n"}
    )
    git(folder, "reset", "--hard", "--quiet")
    patch = patch_of(
        folder,
        **{
            "a.py": "x = 2\n",
            "tests/test_a.py": "",
            "tests/test_b.py": "",
            "tests/new/conftest.py": "evil\n",
        },
    )
    found = surface_of(patch, test_patch)
    assert found.tests == ("tests/new/conftest.py", "tests/test_a.py")
    assert found.other_tests == ("tests/test_b.py",)
    assert found.configuration == ()
    assert found.reset("reset", "flag") == found.tests
    assert found.reset("flag", "flag") == ()
    assert b'"tests/test_a.py"' in found.to_json()
    graded = without_paths(patch, found.tests)
    assert changed_paths(graded) == ("a.py", "tests/test_b.py")
    git(folder, "reset", "--hard", "--quiet")
    subprocess.run(["git", "apply", "--binary", "-"], cwd=folder, input=graded, check=True)
    assert (folder / "a.py").read_text() == "x = 2\n"


def test_what_is_imported_instead_of_a_test_file_or_before_it_is_one_too(repository):
    folder, _ = repository
    test_patch = patch_of(
        folder, **{"src/demo/tests/unit/test_new.py": "\n", "demo/test_b.py": "\n", "tests/data.json": "1\n"}
    )
    git(folder, "reset", "--hard", "--quiet")
    shadows = [
        "src/demo/tests/unit/test_new/__init__.py", "src/demo/tests/unit/test_new.cpython-311.so",
        "src/demo/tests/unit/__init__.py", "src/demo/tests/__init__.py", "src/demo/tests.py",
        "demo/test_b/__init__.py", "demo/test_b.abi3.so",
    ]  # fmt: skip
    others = [
        "src/demo/__init__.py", "src/__init__.py", "demo/__init__.py", "demo.py", "src/demo/unit.py",
        "src/demo/tests/unit/test_new/data.json", "src/demo/tests/unit/test_newer.py", "data/__init__.py",
    ]  # fmt: skip
    found = surface_of(patch_of(folder, **dict.fromkeys([*shadows, *others], "x\n")), test_patch)
    assert found.tests == tuple(sorted(shadows))


def test_compiled_python_is_never_graded(repository):
    """An unchecked `.pyc` runs in place of the test file that it is named after."""
    folder, _ = repository
    compiled = ["tests/__pycache__/test_a.cpython-311.pyc", "a.pyc", "b.pyo", "x/__pycache__/any"]
    patch = patch_of(folder, **dict.fromkeys(compiled, b"\0pyc"), **{"a.py": "x = 2\n", "c.pycx": "1\n"})
    found = surface_of(patch)
    assert found.compiled == tuple(sorted(compiled))
    assert found.counters()["surface_compiled"] == 4
    for policy in ("flag", "reset"):
        graded = without_paths(patch, found.reset(policy, policy))
        assert changed_paths(graded) == ("a.py", "c.pycx")


def test_a_runner_that_is_the_repositorys_own_may_be_mended(repository):
    folder, _ = repository
    patch_of(folder, **{"pytest.py": "x = 1\n"})
    git(folder, "commit", "--quiet", "--message", "a runner")
    assert not surface_of(patch_of(folder, **{"pytest.py": "x = 2\nnew file mode 100644\n"}))


def test_a_patch_is_the_sum_of_its_parts(repository):
    """Names that git quotes, binary and empty files, links, modes, and text that looks like a patch."""
    folder, _ = repository
    awkward = ["with space.txt", "ü.txt", 'q"uote.txt', "tab\there.txt", "new\nline.txt", "b/a b/b.txt"]
    (folder / "link").symlink_to("a.py")
    (folder / "a.py").chmod(0o755)
    patch = patch_of(
        folder,
        **dict.fromkeys(awkward, "text\n"),
        **{"empty": "", "with space": "", "bin": bytes(range(256)), "é": b"\0"},
        **{
            "looks.diff": "diff --git a/conftest.py b/conftest.py\n"
            "--- a/conftest.py\n+++ b/conftest.py\n@@ -1 +1 @@\n"
        },
    )
    assert b"".join(part.data for part in split_patch(patch)) == patch
    expected = {*awkward, "link", "a.py", "empty", "with space", "bin", "é", "looks.diff"}
    assert set(changed_paths(patch)) == expected
    assert not surface_of(patch)
    assert set(changed_paths(without_paths(patch, ["ü.txt", "bin"]))) == expected - {"ü.txt", "bin"}
    assert split_patch(b"") == ()


def test_both_names_of_a_renamed_file_count(repository):
    folder, _ = repository
    git(folder, "mv", "tests/test_a.py", "away.py")
    patch = subprocess.run(
        ["git", "diff", "--cached", "-M"], cwd=folder, check=True, capture_output=True
    ).stdout
    assert changed_paths(patch) == ("away.py", "tests/test_a.py")


def test_a_name_that_is_not_utf8_goes_through(repository):
    folder, _ = repository
    (folder / "tests").joinpath("x").mkdir()
    name = b"tests/\xff.py".decode("utf-8", "surrogateescape")
    (folder / name).write_text("x\n")
    patch = patch_of(folder)
    found = surface_of(patch)
    assert found.other_tests == (name,)
    assert rb"tests/\\xff.py" in found.to_json()
    assert without_paths(patch, found.other_tests) == b""


@pytest.mark.anyio
@pytest.mark.timeout(240)  # images are made on the way
async def test_paths_are_set_back_in_a_sandbox(place, repository):
    folder, commit = repository
    spec = EnvironmentSpec(repository=folder, base_commit=commit)
    async with place.environments.open(spec) as environment:
        script = """
        echo evil > tests/test_a.py; rm tests/test_b.py; mkdir 'n w'; echo > 'n w/conftest.py'; echo 2 > a.py
        """
        await environment.execute(["bash", "-c", script], timeout_s=30, cwd=environment.workdir)
        await reset_paths(
            environment, ["tests/test_a.py", "tests/test_b.py", "n w/conftest.py", "never"], commit
        )
        said = await environment.execute(
            ["git", "status", "--porcelain"], timeout_s=30, cwd=environment.workdir
        )
        assert said.stdout == b" M a.py\n"
        await reset_paths(environment, [], commit)
        environment.workdir = "/tmp"
        with pytest.raises(EnvError, match="set back"):
            await reset_paths(environment, ["x"], "no-such-commit")
