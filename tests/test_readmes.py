"""The examples that readers copy: they run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = sorted(ROOT.glob("packages/*/README.md"))
RUN = [*READMES, ROOT / "docs" / "your-own-agent.md"]


@pytest.mark.parametrize("readme", RUN, ids=lambda path: path.parent.name)
def test_the_python_examples_of_a_readme_run(readme, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, f"{readme} shows no example"
    for number, block in enumerate(blocks):
        script = tmp_path / f"example_{number}.py"
        script.write_text(block)
        done = subprocess.run(
            [sys.executable, "-W", "error", str(script)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{readme}, example {number}:\n{done.stderr}"


def test_the_root_readme_begins_with_the_two_commands_that_ci_runs():
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "readme_commands.py")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "pip install uv && uv run agent-flow run examples/quickstart/run.toml",
        "uv run pytest",
    ]


def test_links_of_the_documents_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *READMES, *ROOT.glob("examples/*/*.md")]
    links = [
        (document, target)
        for document in documents
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
        if "://" not in target
    ]
    assert len(links) > 5
    assert [link for link in links if not (link[0].parent / link[1]).exists()] == []
