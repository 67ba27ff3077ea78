"""The table in docs/cases.md: each case once, with a test that exists, and none of the tests here without a case."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = "tests/cases/"

_TEST = re.compile(r"test: (tests/[\w/]+\.py)::(\w+)")
_LATER = re.compile(r"later: (beat|results|bridge)( \([^|]+\))?")
_OTHERWISE = re.compile(r"not applicable: \S.+")

ROWS = [
    tuple(cell.strip() for cell in line.strip("|\n").split(" | "))
    for line in (ROOT / "docs" / "cases.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| C\d+ ", line)
]


@cache
def defined_in(path: str) -> dict[str, str]:
    """The tests that a file defines, with their docstrings."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {f.name: ast.get_docstring(f) or "" for f in functions if f.name.startswith("test_")}


def test_every_case_is_there_once() -> None:
    assert len(ROWS) > 50
    assert {len(row) for row in ROWS} == {4}
    numbers = [int(row[0][1:]) for row in ROWS]
    assert numbers == sorted(set(numbers)), "each case once, in order"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_answer_is_one_of_the_three_and_its_tests_exist(row: tuple[str, ...]) -> None:
    for answer in row[3].split("<br>"):
        found = _TEST.fullmatch(answer)
        if found is None:
            assert _LATER.fullmatch(answer) or _OTHERWISE.fullmatch(answer), answer
        else:
            assert found[2] in defined_in(found[1]), f"there is no test {answer}"


def test_every_test_here_names_its_cases_as_the_table_does() -> None:
    listed = {(name, row[0]) for row in ROWS for path, name in _TEST.findall(row[3]) if path.startswith(HERE)}
    written = {
        (name, case)
        for path in sorted((ROOT / HERE).glob("test_*.py"))
        if path.name != Path(__file__).name
        for name, told in defined_in(HERE + path.name).items()
        for case in re.findall(r"\bC\d+\b", told) or ["none"]
    }
    assert written == listed
