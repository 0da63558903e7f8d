"""The subcommands of `agent-flow`, a file each."""
