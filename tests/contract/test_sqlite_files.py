"""An SQLite file that cannot be opened: the error names what is wrong with the path, and the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dbqueue import ConnectionLost, DatabaseError, DBQueue

pytestmark = pytest.mark.req("D17")


def refused(path: Path | str, kind: type[DatabaseError] = ConnectionLost) -> str:
    queue = DBQueue(f"sqlite:///{path}")
    with pytest.raises(DatabaseError) as caught:
        queue.send("raw", 1)
    queue.close()
    assert type(caught.value) is kind
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "var" / "lib"
    told = f"the folder {folder} does not exist: create it, or correct the URL"
    assert refused(folder / "app.db").endswith(told)
    monkeypatch.chdir(tmp_path)
    assert re.search(re.escape(told) + r" \(three slashes .* four an absolute one\)$", refused("var/lib/app.db"))
    link = tmp_path / "link.db"
    link.symlink_to(folder / "app.db")
    assert refused(link).endswith(told)
    (tmp_path / "var").touch()
    assert refused(folder / "app.db").endswith(told)


def test_a_folder_in_the_files_place(tmp_path: Path) -> None:
    assert refused(tmp_path).endswith(f"{tmp_path} is a folder: name a file in it")


def test_a_path_that_this_user_may_not_use(tmp_path: Path) -> None:
    path = tmp_path / "closed" / "app.db"
    path.parent.mkdir()
    path.parent.chmod(0)
    with as_nobody():
        told = refused(path)
    path.parent.chmod(0o700)
    assert f"{path} may not be read and written, or made, by this user" in told


@pytest.mark.parametrize("content", [b"a text " * 1_000, bytes(range(256)) * 32], ids=["text", "bytes"])
def test_a_file_that_is_no_database_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    told = refused(path, DatabaseError)
    assert told.startswith(f"{path} is no SQLite database")
    assert "correct the URL, or move the file away" in told
    assert path.read_bytes() == content


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may do everything, so it is somebody else for that long."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(was)
