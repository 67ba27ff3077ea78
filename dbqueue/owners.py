"""Whose version of a Celery app's entries is the valid one: that of the beat that started last.

A rolling deployment runs two versions of the code for a while, and both know entries of the same names. Who starts takes the app,
with the digest of all that it declares; beats of another digest see that in the transaction in which they would fire, and fire
nothing. The cursors stay where they are, so no slot is lost between the two and none is fired twice. Verbs on the caller's
session, which never commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from dbqueue import schedules
from dbqueue.clock import to_datetime
from dbqueue.database.dialect import Dialect, Session
from dbqueue.database.postgres import as_text
from dbqueue.schedules import Definition


class Owner(NamedTuple):
    digest: str
    beat: str
    since: datetime


def digest_of(declared: Sequence[Definition]) -> str:
    """Of all that one version declares. Equal for equal versions."""
    parts = sorted(f"{definition.name}\0{definition.digest}" for definition in declared)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def take(dialect: Dialect, session: Session, app: str, beat: str, declared: Sequence[Definition]) -> None:
    """The app's entries are these from now on: written where they are new or other ones, retired where they are gone. Of the same
    version nothing changes. Beats that start together take turns here."""
    session.execute(
        dialect.portable(
            "INSERT INTO {owners} AS o (app, digest, beat, since) VALUES (:app, :digest, :beat, {now}) ON CONFLICT (app) "
            "DO UPDATE SET digest = excluded.digest, beat = excluded.beat, since = excluded.since WHERE o.digest <> excluded.digest"
        ),
        {"app": app, "digest": digest_of(declared), "beat": beat, "offset": dialect.clock.offset},
    )
    stored = {entry.name: entry for entry in schedules.find(dialect, session, app)}
    for definition in sorted(declared, key=lambda definition: definition.name):
        entry = stored.pop(definition.name, None)
        if entry is None or entry.retired or entry.digest != definition.digest:
            schedules.write(dialect, session, definition)
    for entry in stored.values():
        if not entry.retired:
            schedules.retire(dialect, session, entry.name, app)


def owner_of(dialect: Dialect, session: Session, app: str) -> Owner | None:
    """Who it is stays so until the transaction has ended: ``take`` waits for it."""
    found = session.execute(
        dialect.portable("SELECT digest, beat, since FROM {owners} WHERE app = :app {share}"), {"app": app}
    )
    return Owner(as_text(found[0][0]), as_text(found[0][1]), to_datetime(found[0][2])) if found else None
