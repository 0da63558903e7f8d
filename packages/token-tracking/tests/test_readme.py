import re
import subprocess
import sys
from pathlib import Path


def test_the_readmes_example_runs():
    readme = Path(__file__).parents[1] / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'content': 'hello'" in result.stdout
    assert "1 of 1 prompts equal to their full render" in result.stdout
