"""Parts of benchmarks/agent_flow.py."""
