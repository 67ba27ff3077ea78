"""Files that hold what the code generates, so that a change of it shows in review. `pytest --update-golden` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest


class Golden:
    def __init__(self, update: bool) -> None:
        self.update = update

    def check(self, path: Path, text: str) -> None:
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        assert text == kept, f"{path.name} differs from what is generated: look at it, then run pytest --update-golden"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(bool(request.config.getoption("--update-golden")))
