"""`agent-flow view`: pages are written again from a run's files, and a broken file is named."""

import os
import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture
def run(own_agent, monkeypatch, qwen_tokenizer):
    monkeypatch.setattr("agent_flow.view_run.tokenizer_of", lambda file: qwen_tokenizer)
    done = own_agent.run("--dump")
    assert done.code == 0, done.stderr
    return done


def test_pages_come_back_byte_for_byte(own_agent, run):
    index, pages = run.folder / "index.html", sorted(run.folder.glob("rollouts/*/view.html"))
    before = {path: path.read_bytes() for path in (index, *pages)}
    assert len(before) == 3
    for path in before:
        path.unlink()
    done = own_agent.call("view", run.folder)
    assert (done.code, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).resolve() == index
    assert {path: path.read_bytes() for path in before} == before
    pages[0].unlink()
    done = own_agent.call("view", pages[0].parent)
    assert (done.code, Path(done.stdout.strip()).resolve()) == (0, pages[0])
    assert pages[0].read_bytes() == before[pages[0]]


def test_pages_that_a_run_did_not_make_can_be_made(own_agent, monkeypatch, qwen_tokenizer):
    monkeypatch.setattr("agent_flow.view_run.tokenizer_of", lambda file: qwen_tokenizer)
    config = own_agent.folder / "run.toml"
    config.write_text("pages = 1\n" + config.read_text())
    done = own_agent.run()
    assert len(list(done.folder.glob("rollouts/*"))) == 2
    assert len(list(done.folder.glob("rollouts/*/view.html"))) == 1
    assert "1 more pages can be made" in (done.folder / "index.html").read_text()
    assert own_agent.call("view", done.folder).code == 0
    assert len(list(done.folder.glob("rollouts/*/view.html"))) == 2
    assert "can be made" not in (done.folder / "index.html").read_text()


@pytest.mark.parametrize("name", ["conversation.snapshot", "provenance.json", "engine.dump"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_broken_file_of_a_run_is_named(own_agent, run, name, damage):
    path = next(run.folder.glob(f"rollouts/*/{name}"))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    else:
        path.unlink()
    done = own_agent.call("view", run.folder)
    if (name, damage) == ("engine.dump", "gone"):
        assert (done.code, done.stderr) == (0, ""), "a run need not have been dumped"
        return
    assert done.code == 1
    assert str(path) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (run.folder / "index.html").exists()
    if name != "engine.dump":
        alone = own_agent.call("view", path.parent)
        assert alone.code == 2
        assert str(path) in alone.stderr


def test_what_is_no_run_is_said(own_agent, tmp_path):
    done = own_agent.call("view", tmp_path)
    assert done.code == 2
    assert "no run folder" in done.stderr


def test_a_browser_is_opened(own_agent, run, cli, tmp_path):
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!{sys.executable}\nimport sys\nopen({str(opened)!r}, "w").write(sys.argv[1])\n')
    browser.chmod(0o755)
    shutil.rmtree(own_agent.folder / "recordings")
    env = {"BROWSER": f"{browser} %s", "PATH": os.environ["PATH"]}
    done = cli("view", run.folder, "--open", cwd=tmp_path, env=env)
    assert done.code == 0, done.stderr
    assert opened.read_text() == (run.folder / "index.html").as_uri()
