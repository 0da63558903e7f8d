"""Run by the Python of another environment, one with swebench 4.1: what its specs say of classic rows.

Reads rows as JSON lines on stdin; writes, for each, the columns of swebench 5.x or `error`. swebench 5 ships
log parsers and no specs, and the two cannot be installed together. Nothing of this package is imported here.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

FAIL_ONLY_SINCE_5 = {"bpmn-io/bpmn-js", "openlayers/openlayers", "eslint/eslint"}
"""Beyond those of 4.1: repositories whose log parser records failures alone (swebench 5.0.2, `constants`)."""


def columns_of(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that a row in swebench 5.x form has beyond the classic ones.

    Raises:
        KeyError: swebench 4.1 has no specs or no log parser for the repository, or not for its version.
    """
    constants = importlib.import_module("swebench.harness.constants")
    parsers = importlib.import_module("swebench.harness.log_parsers").MAP_REPO_TO_PARSER
    scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
    repo, version = row["repo"], row["version"]
    specs = constants.MAP_REPO_VERSION_TO_SPECS[repo][version]
    # Not `make_test_spec`: it also makes the image's script, for which it fetches files of the repository.
    script = scripts.make_eval_script_list(
        row, specs, "testbed", "/testbed", row["base_commit"], row["test_patch"]
    )
    name = f"sweb.eval.x86_64.{row['instance_id'].lower()}".replace("__", "_1776_")
    fail_only = repo in constants.FAIL_ONLY_REPOS or repo in FAIL_ONLY_SINCE_5
    return {
        "image": f"swebench/{name}:latest",
        "eval_script": "\n".join(["#!/bin/bash", "set -uxo pipefail", *script]) + "\n",
        "log_parser": parsers[repo].__name__,
        "eval_type": "fail_only" if fail_only else "pass_and_fail",
    }


def main() -> None:
    """One line out for each line in."""
    for line in sys.stdin:
        row = json.loads(line)
        try:
            answer = columns_of(row)
        except KeyError as error:
            answer = {"error": f"swebench 4.1 knows no {error} of {row.get('repo')} {row.get('version')}"}
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
