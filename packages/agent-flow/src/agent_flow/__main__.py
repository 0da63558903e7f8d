"""`agent-flow` and `python -m agent_flow`."""

import sys


def main() -> int:
    """Run the command line; an interrupt during the imports ends as quietly as one during the run."""
    try:
        from agent_flow.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        sys.stderr.write("agent-flow: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
