"""Parts of benchmarks/conformance.py."""
