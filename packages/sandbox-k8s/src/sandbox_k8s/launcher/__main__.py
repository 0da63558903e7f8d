"""Entry point of the programs: ``python -I -S .../launcher serve|keep|pod|install``."""

import sys
from importlib import import_module
from pathlib import Path

PROGRAMS = {
    "serve": "launcher.server",
    "keep": "launcher.keeper",
    "pod": "launcher.pod",
    "install": "launcher.install",
}


def main() -> int:
    """Run the program named by the first argument; 2 when there is none of that name."""
    if len(sys.argv) < 2 or sys.argv[1] not in PROGRAMS:
        sys.stderr.write(f"usage: python -I -S launcher ({' | '.join(PROGRAMS)}) ...\n")
        return 2
    # Isolated mode leaves the folder above this one out of sys.path; appended last, it can shadow nothing.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    return import_module(PROGRAMS[sys.argv[1]]).main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
