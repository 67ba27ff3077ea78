"""Kombu's and Celery's own suites on dbqueue's broker, with dbqueue's results.

    make conformance                                              # both suites, on PostgreSQL and SQLite
    make conformance ARGS="kombu --database sqlite"
    make conformance ARGS="celery -k test_chord --celery 5.4.0"
    make conformance ARGS="--database dbqueue+postgresql://..."   # a database of its own, that may be emptied

Exits with 0 if every test passed that is not in the table of those left out (suites.py), and with 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.conformance import upstream
from tests.conformance.runs import Run, run
from tests.conformance.suites import SUITES
from tests.servers import Servers

REPORT = upstream.CACHE / "report.txt"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    environment = upstream.environment(options.celery, options.kombu)
    print(f"{environment}, {environment.python}")
    runs: list[Run] = []
    options.report.parent.mkdir(parents=True, exist_ok=True)
    for database in options.database:
        for name in options.suite or SUITES:
            with _broker(database) as url:
                done = run(
                    SUITES[name],
                    url,
                    environment,
                    smoke=options.smoke,
                    only=options.only,
                    worker=options.worker,
                    results=options.results,
                    limit=options.limit,
                    show=True,
                )
            print(done.summary(), flush=True)
            runs.append(done)
            # After each run: the whole takes long, and may be interrupted.
            options.report.write_text(
                f"{environment}\n" + "".join(f"{line}\n" for each in runs for line in each.lines())
            )
    print(*(f"FAILED {each.title}: {name}" for each in runs for name in each.failures), sep="\n")
    print(*(each.summary() for each in runs), f"Report: {options.report}", sep="\n")
    return 0 if all(each.ok for each in runs) else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", nargs="*", choices=[[], *SUITES], help="default: both")
    parser.add_argument(
        "--database",
        action="append",
        metavar="NAME_OR_URL",
        help="postgres, sqlite (both are made for the run; default: one after the other), or a broker URL",
    )
    parser.add_argument("--smoke", action="store_true", help="the subset that belongs to make test")
    parser.add_argument("-k", dest="only", metavar="PATTERN", help="tests whose file::class::name has this in it")
    parser.add_argument(
        "--worker",
        choices=["thread", "process", "dbqueue"],
        default="thread",
        help="how Celery's suite gets its worker: in a thread, as it wants it (default), or as the command celery worker, which "
        "some of its tests cannot reach into, or as the command dbqueue worker",
    )
    parser.add_argument(
        "--results",
        choices=["dbqueue", "redis"],
        default="dbqueue",
        help="where Celery's suite keeps the results of its tasks: in the broker's database (default), or in a Redis",
    )
    parser.add_argument("--celery", metavar="VERSION", help="or newest; default: the installed one")
    parser.add_argument("--kombu", metavar="VERSION", help="default: the newest of Celery's minor version")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="for one suite on one database")
    parser.add_argument("--report", type=Path, default=REPORT, help=f"default: {REPORT.relative_to(upstream.ROOT)}")
    options = parser.parse_args(arguments)
    options.database = options.database or ["postgres", "sqlite"]
    for database in options.database:
        if database not in ("postgres", "sqlite") and not database.startswith("dbqueue+"):
            parser.error(f"--database: not postgres, sqlite or a URL that begins with dbqueue+: {database}")
    return options


@contextlib.contextmanager
def _broker(database: str) -> Iterator[str]:
    if database == "sqlite":
        with tempfile.TemporaryDirectory(prefix="dbqueue-conformance-") as folder:
            yield f"dbqueue+sqlite:///{folder}/queue.db"
    elif database == "postgres":
        servers = Servers()
        try:
            server = servers.running(18)
            yield f"dbqueue+{server.dsn(server.create_database())}"
        finally:
            servers.close()
    else:
        yield database


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and workers are ended too
    sys.exit(main())
