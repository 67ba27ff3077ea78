"""``python -m tests.results.dying URL SCENARIO some|all``: the last part of a chord returns in a process that is killed before one of
its statements, BEGIN and COMMIT included; then it is delivered again. Each statement has its turn, or two of them: one in the
middle, and COMMIT. Prints one JSON line for each: what there was after the death, and after the second delivery; first of all
for a process that is not killed.

This process only forks: neither the broker nor the results are used in it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from celery import chain, chord

from dbqueue.database.callers import CallerSession
from dbqueue.database.postgres import PostgresSession
from dbqueue.database.sqlite import SqliteSession
from tests.results.chords import Hand, make_app, messages, request_of, run

Request = dict[str, Any]


def start(url: str, scenario: str) -> tuple[str, Request]:
    """Every part but one returns; the id of the body, and the request that is left."""
    app = make_app(url, url)
    add, fail, total = (app.tasks[f"tests.results.chords.{name}"] for name in ("add", "fail", "total"))
    first = chain(fail.si(), add.si(1, 1)) if scenario == "chain" else fail.s() if scenario == "fails" else add.s(1, 1)
    with closing(Hand(app)) as hand:
        for left in hand.take_all():  # by the chord before
            left.ack()
        result = chord([first, add.s(2, 2)])(total.s())
        parts = hand.take_all()
        for part in parts:
            part.ack()
        hand.run(parts[1])
        return str(result.id), request_of(parts[0])


def last(url: str, request: Request, before: int) -> int:
    """Dies before that statement; else returns how many there were."""
    app = make_app(url, url)
    app.backend.place.database.ready()
    seen = 0

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == before:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        return call

    for session in (PostgresSession, SqliteSession, CallerSession):
        for name in ("execute", "send", "begin", "commit"):
            if hasattr(session, name):
                setattr(session, name, counted(getattr(session, name)))
    run(app, request)
    return seen


def audit(url: str, body: str) -> dict[str, Any]:
    app = make_app(url, url)
    database = app.backend.place.database
    database.ready()
    return {"bodies": messages(database, body), "state": app.AsyncResult(body).state}


def forked(call: Callable[..., Any], *args: Any) -> Any:
    """What it returned in a process of its own; None: that was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        code = 1
        try:
            with os.fdopen(writing, "wb") as out:
                out.write(pickle.dumps(call(*args)))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        data = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return pickle.loads(data) if status == 0 else None


def once(url: str, scenario: str, before: int) -> dict[str, Any]:
    body, request = forked(start, url, scenario)
    statements = forked(last, url, request, before)
    between = forked(audit, url, body)
    forked(last, url, request, 0)
    return {"statements": statements, "between": between, "after": forked(audit, url, body)}


def main(url: str, scenario: str, which: str) -> None:
    told = once(url, scenario, 0)
    print(json.dumps(told), flush=True)
    count = told["statements"]
    for before in range(1, count + 1) if which == "all" else (count // 2, count):
        print(json.dumps(once(url, scenario, before)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
