"""`engines.version`: which text is a weight version."""

import pytest
from agent_flow.engines.version import VersionReader
from token_tracking.sample import MAX_VERSION, UNKNOWN_VERSION


@pytest.mark.parametrize("version", [0, 1, 10, MAX_VERSION])
@pytest.mark.parametrize("run", ["grpo", "lab/grpo-3", "grpo/1"])
def test_what_is_written_is_read(run, version):
    reader = VersionReader(run)
    assert reader.read(reader.text(version)) == version
    assert reader.unknown == {}


@pytest.mark.parametrize(
    "text",
    [
        "default",
        "",
        "grpo",
        "grpo/",
        "grpo/-1",
        "grpo/+1",
        "grpo/01",
        "grpo/1.0",
        "grpo/1 ",
        " grpo/1",
        "grpo/1_0",
        "grpo/\u0661",  # ARABIC-INDIC DIGIT ONE
        "grpo/\u00b2",  # SUPERSCRIPT TWO
        f"grpo/{MAX_VERSION + 1}",
        "grpo/" + "9" * 5000,
        "Grpo/1",
        "other/1",
        "a/grpo/1",
        "1",
        "/1",
    ],
)
def test_anything_else_is_unknown_and_counted(text):
    reader = VersionReader("grpo")
    assert reader.read(text) == UNKNOWN_VERSION
    assert sum(reader.unknown.values()) == 1


def test_without_a_policy_run_nothing_is_a_version():
    assert VersionReader("").read("/1") == UNKNOWN_VERSION


def test_one_line_is_logged_for_each_foreign_run(caplog):
    reader = VersionReader("grpo")
    for text in ("default", "default", "old/1", "old/2", "grpo/5"):
        reader.read(text)
    assert reader.unknown == {"default": 2, "old": 2}
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "'old/1'" in caplog.text
    assert "'old/2'" not in caplog.text
