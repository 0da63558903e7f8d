"""Refuses files that must not be in the repository: unfinished code, swallowed errors, large files."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
SWALLOWED = re.compile(r"except( Exception| BaseException)?( as \w+)?:\s*\n\s*pass\b")
MAX_BYTES = 2_000_000

listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
files = listing.stdout.split(b"\0")
found: list[str] = []
for name in (Path(raw.decode()) for raw in files if raw):
    path = ROOT / name
    if path.is_symlink() or not path.is_file():
        continue
    if path.stat().st_size > MAX_BYTES:
        found.append(f"{name}: {path.stat().st_size} bytes")
    if name.suffix != ".py" or name.parts[0] == ".ci":
        continue
    text = path.read_text(encoding="utf-8")
    for rule, what in ((UNFINISHED, "unfinished"), (SWALLOWED, "swallows an error")):
        found += [f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {what}" for hit in rule.finditer(text)]
print("\n".join(found) or "no forbidden words")
sys.exit(1 if found else 0)
