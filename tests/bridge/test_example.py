"""The example runs, and the page that explains it shows what runs and names every option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import celery_bridge
from celery_bridge.options import CallOptions, TaskOptions
from tests.testing_kit.test_deployment import BROKEN, run_pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "bridge"
PAGE = (ROOT / "docs" / "bridge.md").read_text(encoding="utf-8")


@pytest.mark.req("C8", "D21")
def test_the_example_passes_on_any_machine() -> None:
    assert "4 passed" in run_pytest(ROOT, str(EXAMPLE), **BROKEN)


def test_the_page_quotes_the_example() -> None:
    text = (EXAMPLE / "shop.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        for piece in block.strip("\n").split("\n\n\n"):
            assert piece in text, f"not in the example any more:\n{piece}"


def test_the_page_names_every_option_and_what_there_is() -> None:
    for name in (*CallOptions.__annotations__, *TaskOptions.__annotations__):
        assert re.search(rf"`{name}[`=]", PAGE), name
    named = {"AsyncResult", "InvalidPayload", "Request", "Signature", "TaskError", "EagerResult", "Task"}
    for name in set(celery_bridge.__all__) - named:
        assert re.search(rf"\b{name}\b", PAGE), name
