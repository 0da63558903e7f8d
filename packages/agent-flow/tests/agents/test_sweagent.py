"""`sweagent`: the exit-status table, requeries, autosubmission, and going on after an abort.

Runs against SWE-agent itself where SWE_AGENT_SRC names a checkout, else against `scaffold/`.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from agent_flow.agents.state import AgentState
from agent_flow.errors import AgentError, EngineError, EnvError, TokenError
from agent_flow.outcome import outcome_of

pytestmark = pytest.mark.anyio

CONFIG = Path(__file__).parent / "agent.yaml"


def agent(name="SweAgent", config=CONFIG, **keys):
    lines = [f'provider = "agent_flow.agents.sweagent:{name}"', f'config = "{config}"']
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in keys.items())])


def call(command, thought="Next.", name="bash"):
    arguments = {"command": command} if name == "bash" else {}
    return f"{thought}\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FIX = call("sed -i s/41/42/ answer.py")
SUBMIT = call("", name="submit")
BAD = "I forgot to call a tool."
TURNS = [
    call("cat answer.py; cd ..; export COLOUR=blue", "I look at it first."),
    BAD,
    call("cd repo && pwd && echo $COLOUR"),
    FIX,
    SUBMIT,
]


def text_of(made, ids):
    return made.context.tokenizer.decode(ids)


def sampled(made, done):
    """The text of every sampled turn of every sample, without its stop token."""
    return [[text_of(made, ids[:-1]) for ids in sample["sampled"]] for sample in done.samples]


@pytest.mark.original(
    "A-builder-name",
    "A-problem-statement",
    "A-run",
    "A-query-shape",
    "A-observations",
    "A-no-trajectory-file",
    "A-sweagent",
    "A-query-history",
)
async def test_a_run_and_its_tokens(bench, drive):
    made = bench(agent(), TURNS)
    done = await made.leg(drive.Leg())
    assert done.exit_status == "submitted"
    assert "+ANSWER = 42" in done.patch
    assert sampled(made, done) == [TURNS]
    report = made.last.conversation.report(render_all=True)
    assert report.equal == len(report.prompts) == len(TURNS)
    assert done.messages[1]["content"].endswith("It is 42, not 41. look at answer.py")
    assert {message["agent"] for message in done.messages} == {"worker"}
    shown = [message["content"] for message in done.messages if message["role"] == "tool"]
    assert "ANSWER = 41" in shown[0]
    folder, colour = shown[1].split()[-2:]
    assert (Path(folder).name, colour) == ("repo", "blue")


@pytest.mark.original(
    "A-prompt-boundary", "A-first-turn-fails", "A-requery-resample", "A-requery-shown", "A-error-logs"
)
@pytest.mark.parametrize(
    ("requery", "samples"), [("keep", [[BAD, FIX, SUBMIT]]), ("forget", None), ("resample", None)]
)
async def test_a_rejected_first_answer_stays_as_it_was_sampled(bench, drive, requery, samples):
    made = bench(agent(requery=requery), [BAD, FIX, SUBMIT])
    done = await made.leg(drive.Leg())
    assert done.exit_status == "submitted"
    if samples is not None:
        assert sampled(made, done) == samples
    texts = [text for sample in sampled(made, done) for text in sample]
    assert texts.count(BAD) == texts.count(FIX) == texts.count(SUBMIT) == 1
    prompt = made.engine_of_last.requests[0].prompt_ids.tolist()
    assert all(sample["ids"][: len(prompt)] == prompt for sample in done.samples)
    assert done.samples[0]["prompt"] == len(prompt)
    shown = [text_of(made, request.prompt_ids.tolist()) for request in made.engine_of_last.requests]
    assert (BAD in shown[1]) == (requery != "resample")
    assert (BAD in shown[2]) == (requery == "keep")


SLOW = pytest.mark.slow
QUICK = ("exit_format", "submitted (exit_max_iter_out)", "submitted (exit_context)")
WAYS = {
    "exit_format": ([BAD, BAD, BAD], {}),
    "submitted (exit_format)": ([FIX, BAD, BAD, BAD], {}),
    "exit_forfeit": ([call("", name="exit_forfeit")], {}),
    "submitted (exit_forfeit)": ([FIX, call("", name="exit_forfeit")], {}),
    "exit_command": ([call("exit")], {}),
    "exit_max_iter_out": ([call("true"), call("true")], {"step_limit": 2}),
    "submitted (exit_max_iter_out)": ([FIX], {"step_limit": 1}),
    "exit_command_timeout": ([call("sleep 30"), call("sleep 30")], {}),
    "submitted (exit_command_timeout)": ([FIX, call("sleep 30"), call("sleep 30")], {}),
    "submitted": ([call("sleep 30"), call("sed -i s/41/42/ answer.py"), SUBMIT], {}),
    "exit_context": ([{"text": "", "finish_reason": "length"}], {}),
    "submitted (exit_context)": ([FIX, {"text": "", "finish_reason": "length"}], {}),
}


@pytest.mark.original(
    "A-backfill-exit-status",
    "A-limit-context",
    "A-limit-calls",
    "A-exit-format",
    "A-exit-forfeit",
    "A-exit-command",
    "A-exit-command-timeout",
    "A-exit-context",
    "A-exit-max-iter",
    "A-autosubmit",
    "A-autosubmit-tokens",
)
@pytest.mark.parametrize(
    "status", [status if status in QUICK else pytest.param(status, marks=SLOW) for status in WAYS]
)
async def test_ends(bench, drive, status):
    turns, keys = WAYS[status]
    made = bench(agent(**keys), turns)
    done = await made.leg(drive.Leg()) if status != "exit_context" else None
    if done is None:
        with pytest.raises(TokenError):  # nothing was sampled, so there is no sample
            await made.leg(drive.Leg())
    else:
        assert done.exit_status == status
        asked = [turn for turn in turns if isinstance(turn, str)]
        assert sampled(made, done) == [asked]  # of what was sampled, nothing is dropped or put otherwise
    assert made.last.exit_status == status
    assert outcome_of(status, "train").ends == status


@pytest.mark.original("A-requery-counted", "A-requery-retry-words")
@pytest.mark.parametrize(
    "command",
    [
        "echo '###SWE-AGENT-RETRY-WITH-OUTPUT###'; echo what it said",
        "echo '###SWE-AGENT-RETRY-WITHOUT-OUTPUT###'",
        "vim",
        "if then",
    ],
)
@pytest.mark.slow
async def test_every_requery_counts(bench, drive, command):
    """Upstream asks again for ever after its two retry words."""
    made = bench(agent(), [call(command)] * 4)
    done = await made.leg(drive.Leg())
    assert done.exit_status == "exit_format"
    assert sum(map(len, sampled(made, done))) == 3


@pytest.mark.original("A-query-shape")
async def test_arguments_of_the_wrong_kind_are_a_format_error(bench, drive):
    bad = '<tool_call>\n{"name": "bash", "arguments": ["ls"]}\n</tool_call>'
    number = '<tool_call>\n{"name": "bash", "arguments": {"command": 7}}\n</tool_call>'
    made = bench(agent(), [bad, number, FIX, SUBMIT])
    assert (await made.leg(drive.Leg())).exit_status == "submitted"


@pytest.mark.original(
    "A-limit-cost",
    "A-raised",
    "A-requery-counted",
    "A-exit-cost",
    "A-exit-api",
    "A-exit-environment",
    "A-exit-error",
)
@pytest.mark.slow
async def test_the_table_of_exceptions(bench, drive):
    from agent_flow.agents import swe_scaffold as swe
    from sweagent import exceptions

    made = bench(agent(), [call("true")] * 20)

    class Raising(type(made.agent)):
        error: Exception

        @property
        def _agent_class(self):
            given, error = super()._agent_class, self.error

            class Agent(given.func):
                def handle_action(self, step):
                    raise error

            return lambda **keys: Agent(**given.keywords, **keys)

    raising = Raising(made.agent._config, made.context)
    expected = {
        exceptions.ContextWindowExceededError("full"): "exit_context",
        exceptions.InstanceCallLimitExceededError("calls"): "exit_max_iter_out",
        exceptions.CostLimitExceededError("cost"): "exit_cost",
        swe.RetryError(None): "exit_api",
        swe.CommandTimeoutError("late"): "exit_command_timeout",
        swe.SwerexException("lost"): "exit_environment_error",
        swe.swe._TotalExecutionTimeExceeded(): "exit_total_execution_time",
        swe.swe._ExitForfeit(): "exit_forfeit",
        exceptions.ContentPolicyViolationError("no"): "exit_format",
        swe.BashIncorrectSyntaxError("no bash"): "exit_format",
        RuntimeError("a bug"): "exit_error",
        KeyError("a bug"): "exit_error",
    }
    for error, status in expected.items():
        raising.error = error
        assert (await made.leg(drive.Leg(), agent=raising)).exit_status == status
    for error in (exceptions.TotalCostLimitExceededError("all"), EOFError()):
        raising.error = error
        with pytest.raises(AgentError, match=type(error).__name__):
            await made.leg(drive.Leg(), agent=raising)


@pytest.mark.original("A-exit-total-time")
@pytest.mark.slow
async def test_time_runs_out(bench, drive, tmp_path):
    config = tmp_path / "short.yaml"
    limits = "total_execution_timeout: 0\n    execution_timeout: 2\n"
    config.write_text(CONFIG.read_text().replace("execution_timeout: 2\n", limits))
    made = bench(agent(config=config), [call("true"), call("true")])
    assert (await made.leg(drive.Leg())).exit_status == "exit_total_execution_time"


@pytest.mark.original("A-exit-infrastructure")
async def test_an_engine_failure_is_itself(bench, drive):
    made = bench(agent(), TURNS)
    engine = made.engine(raises={1: EngineError("down", "no answer", retryable=True)})
    with pytest.raises(EngineError, match="no answer"):
        await made.leg(drive.Leg(), engine=engine)


@pytest.mark.original("A-exit-infrastructure")
@pytest.mark.slow
async def test_a_sandbox_failure_is_itself(bench, drive):
    # A shell whose folder is removed is started anew; not where there is no place for one.
    made = bench(agent(), [call('rm -rf "$__af"; touch "$__af"'), FIX])
    with pytest.raises(EnvError, match="the shell's folder cannot be made"):
        await made.leg(drive.Leg())


@pytest.mark.original(
    "A-result-is-last",
    "A-run-aborted",
    "A-resume-order",
    "A-snapshot-open-turn",
    "A-tokens-reset",
    "A-requery-counter",
    "A-agent-state-between",
    "B-partial-parser",
)
@pytest.mark.parametrize(
    ("requery", "turn", "tokens"),
    [
        ("keep", 2, 3),
        ("forget", 2, 3),
        *(
            pytest.param(requery, turn, tokens, marks=SLOW)
            for requery in ("keep", "forget", "resample")
            for turn, tokens in ((0, 0), (1, 2), (2, 0), (3, 5), (4, 1))
        ),
    ],
)
async def test_goes_on_where_it_was_cut(bench, drive, turn, tokens, requery):
    made = bench(agent(requery=requery), TURNS)
    whole = await made.leg(drive.Leg())
    cut = await made.leg(drive.Leg(cut={"turn": turn, "tokens": tokens}))
    assert cut.exit_status == "Aborted"
    state = AgentState.from_bytes(cut.state.encode())
    assert (state.n_calls, state.n_format_fails) == (turn, 1 if turn == 2 else 0)
    cut.cut = {"turn": turn, "had": tokens} if tokens else None
    rest = await made.leg(cut)
    assert rest.exit_status == "submitted"
    assert rest.messages == whole.messages
    assert tokens_of(rest) == tokens_of(whole)
    assert rest.patch == whole.patch


@pytest.mark.original("A-resume-shell", "B-saved-state")
@pytest.mark.slow
async def test_goes_on_in_another_process(bench, drive, process):
    """Its shell is the one it left: folder, variables and background jobs."""
    turns = [call("cd /tmp; colour=blue; sleep 300 & true"), call("pwd; echo $colour; jobs -r"), FIX, SUBMIT]
    turns[2] = call('cd "$ROOT"; sed -i s/41/42/ answer.py')
    made = bench(agent(), turns)
    whole = await made.leg(drive.Leg())
    cut, code = process(made, drive.Leg(cut={"turn": 1, "tokens": 4}))
    assert (code, cut.exit_status) == (-signal.SIGKILL, "Aborted")
    cut.cut = {"turn": 1, "had": 4}
    rest, code = process(made, cut)
    assert (code, rest.exit_status) == (0, "submitted")
    assert rest.messages == whole.messages
    assert "blue" in str(rest.messages)
    assert "sleep 300" in str(rest.messages[-5])
    assert tokens_of(rest) == tokens_of(whole)
    assert rest.patch == whole.patch


@pytest.mark.original("A-sweagent-original")
@pytest.mark.slow
async def test_the_original_loop(bench, drive):
    made = bench(agent("OriginalSweAgent"), [BAD, FIX, SUBMIT])
    done = await made.leg(drive.Leg())
    assert done.exit_status == "submitted"
    texts = [text for sample in sampled(made, done) for text in sample]
    assert texts.count(BAD) == texts.count(FIX) == texts.count(SUBMIT) == 1

    made = bench(agent("OriginalSweAgent", step_limit=1), [FIX])
    assert (await made.leg(drive.Leg())).exit_status == "submitted (exit_cost)"
    cut = await made.leg(drive.Leg(cut={"turn": 0}))
    assert (cut.exit_status, cut.state) == ("Aborted", "")


def tokens_of(leg):
    return [{key: sample[key] for key in ("ids", "mask", "prompt")} for sample in leg.samples]


async def test_where_root_is_not_the_sandbox_s_own(bench, drive):
    made = bench(agent(), [call("command -v submit; cat $(command -v submit)"), FIX, SUBMIT])
    made.isolation = "process"
    done = await made.leg(drive.Leg())
    assert done.exit_status == "submitted"
    (shown, *_) = [message["content"] for message in done.messages if message["role"] == "tool"]
    assert "/home/tools/submit/bin/submit" in shown
    assert "/home/model.patch" in shown
    assert " /root/" not in shown


@pytest.mark.original("A-edited-files")
@pytest.mark.slow
async def test_a_patch_of_files_that_are_not_utf8_and_files_that_are_gone(bench, drive):
    turns = [call("printf 'caf\\351\\n' > latin.txt; git rm -q answer.py"), SUBMIT]
    made = bench(agent(), turns)
    done = await made.leg(drive.Leg())
    assert done.exit_status == "submitted"
    assert "-ANSWER = 41" in done.patch


@pytest.mark.original("A-should-eval-submitted", "A-sweagent")
@pytest.mark.slow
async def test_a_whole_run_to_its_reward(cli, example, tmp_path):
    """The recorded turns of mini-swe-agent's quickstart, with SWE-agent's way to submit."""
    name = "spanset-14"
    recording = json.loads((example / "recordings" / f"{name}.json").read_text())
    recording["rollouts"][0]["turns"][-1]["text"] = SUBMIT
    (tmp_path / "recordings").mkdir()
    (tmp_path / "recordings" / f"{name}.json").write_text(json.dumps(recording))
    rows = (example / "tasks.jsonl").read_text().splitlines()
    (tmp_path / "tasks.jsonl").write_text(next(row for row in rows if name in row) + "\n")
    text = (example / "run.toml").read_text()
    section = text[text.index("[agent]") : text.index("[environment]")]
    text = text.replace(section, f"[agent]\n{agent()}\n\n").replace('"repos"', f'"{example / "repos"}"')
    (tmp_path / "run.toml").write_text(text.replace('"qwen3.jinja"', f'"{example / "qwen3.jinja"}"'))
    path = os.pathsep.join(path for path in sys.path if path)
    done = cli("run", tmp_path / "run.toml", "--json", cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.code == 0, done.stderr
    assert done.summary["delivered"] == 1, done.summary
    assert done.summary["rewards"] == {name: 1.0}, done.summary
