from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the fields of trainers that cannot be installed here, under their own names."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "peers")
