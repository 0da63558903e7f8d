"""Parts of `benchmarks/sandbox.py`."""
