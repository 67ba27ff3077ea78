"""What lies beside a SQLite file is found under whatever name the file was opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbqueue.clock import SECOND
from dbqueue.database.alive import is_alive
from dbqueue.database.engine import Database
from dbqueue.database.tables import Letter
from dbqueue.mail import Mail

pytestmark = [pytest.mark.databases("sqlite"), pytest.mark.req("C3", "C4")]


@pytest.mark.parametrize("of", ["file", "folder"])
def test_a_symbolic_link_leads_to_the_same_log_and_the_same_locks(tmp_path: Path, of: str) -> None:
    """As a release's folder links to what is shared by all releases: a worker of one must hear what another says, and see it live."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "release").mkdir()
    if of == "file":
        (tmp_path / "release" / "shop.db").symlink_to(tmp_path / "shared" / "shop.db")
        other = tmp_path / "release" / "shop.db"
    else:
        (tmp_path / "release" / "data").symlink_to(tmp_path / "shared")
        other = tmp_path / "release" / "data" / "shop.db"
    one, two = Database(f"sqlite:///{tmp_path / 'shared' / 'shop.db'}"), Database(f"sqlite:///{other}")
    one.ready()
    two.ready()
    here, there = Mail(one), Mail(two)
    here.open("q")
    there.post(Letter("", "q", b"{}", b"heard", 60 * SECOND, ()))
    assert [item.payload for item in here.read("q", [], 10)] == [b"heard"]
    alive = one.dialect.live("w")
    assert alive is not None
    assert is_alive(str(other), "w")
    alive.close()
    assert not is_alive(str(other), "w")
    for closing in (here, there, one, two):
        closing.close()
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["shop.db", "shop.db-alive", "shop.db-mail"]
