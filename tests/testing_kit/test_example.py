"""The example runs, and the page that explains it shows what runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.testing_kit.test_deployment import BROKEN, run_pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "testing"


@pytest.mark.req("D21")
def test_the_example_passes_on_any_machine() -> None:
    assert "4 passed" in run_pytest(ROOT, str(EXAMPLE), **BROKEN)


def test_the_page_quotes_the_example() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    files = [path.read_text(encoding="utf-8") for path in sorted(EXAMPLE.glob("*.py"))]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        for piece in block.strip("\n").split("\n\n\n"):
            assert any(piece in text for text in files), f"not in the example any more:\n{piece}"
