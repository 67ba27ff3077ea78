"""`dbqueue results`, and the result beside its job: what is shown of what a task returned, and what only if it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from dbqueue import DBQueue, results
from dbqueue.clock import SECOND
from dbqueue.doctor import broker
from tests.doors.conftest import Run
from tests.doors.test_doctor import Look, not_ok
from tests.doors.test_doctor import look as look
from tests.servers import Server

pytestmark = pytest.mark.req("C9", "D10")

MakeApp = Callable[..., Celery]


@pytest.fixture
def make_app(database_url: str, queue: DBQueue) -> Iterator[MakeApp]:
    made: list[Celery] = []

    def make(**settings: Any) -> Celery:
        url = f"dbqueue+{database_url}"
        made.append(Celery("shop", broker=url, backend=url, set_as_current=False))
        made[-1].conf.update(task_default_queue="shop", **settings)
        return made[-1]

    yield make
    for app in made:
        app.backend.place.database.close()
        app.close()


def test_a_result(cli: Run, database_url: str, make_app: MakeApp) -> None:
    make_app().backend.mark_as_done("a", {"name": "müller\x1b[2J"})
    code, out, err = cli("results", "show", "a", "--url", database_url)
    assert (code, err) == (0, "")
    shown = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(shown) == ["task_id", "state", "stored_at", "expires_at", "size"]
    assert (shown["task_id"], shown["state"]) == ("a", "SUCCESS")
    assert shown["stored_at"] < shown["expires_at"]
    assert shown["size"].endswith(" bytes")
    told = cli("results", "show", "a", "--url", database_url, "--json").json
    assert (told["state"], told["size"] > 50) == ("SUCCESS", True)
    assert "stored" not in told
    out = cli("results", "show", "a", "--url", database_url, "--with-result").out
    assert '"name": "müller\\u001b[2J"' in out
    assert "\x1b" not in out
    told = cli("results", "show", "a", "--url", database_url, "--with-result", "--json").json
    assert told["stored"]["result"] == {"name": "müller\x1b[2J"}


@pytest.mark.parametrize(
    "settings",
    [{"result_serializer": "pickle", "accept_content": ["pickle"]}, {"result_compression": "zlib"}],
    ids=["pickle", "zlib"],
)
def test_what_is_no_json_is_not_shown(cli: Run, database_url: str, make_app: MakeApp, settings: dict[str, Any]) -> None:
    app = make_app(**settings)
    app.backend.mark_as_done("a", "secret" * 3)
    if settings.get("result_compression") and not app.backend.compression:
        pytest.skip("this Celery knows no result_compression")
    out = cli("results", "show", "a", "--url", database_url, "--with-result").out
    assert out.endswith("stored         (no JSON)\n")
    assert "secret" not in out
    assert cli("results", "show", "a", "--url", database_url, "--with-result", "--json").json["stored"] is None


def test_there_is_none(cli: Run, database_url: str, make_app: MakeApp) -> None:
    app = make_app(result_expires=60)
    answer = cli("results", "show", "a\x1b", "--url", database_url)
    assert (answer.code, answer.out) == (1, "")
    assert "there is no result of task" in answer.err
    assert "\x1b" not in answer.err
    app.backend.place.database.clock.offset -= 61 * SECOND
    app.backend.mark_as_done("old", 1)
    assert cli("results", "show", "old", "--url", database_url).code == 1


def test_a_result_that_is_kept_for_ever(cli: Run, database_url: str, make_app: MakeApp) -> None:
    make_app(result_expires=None).backend.mark_as_failure("a", ValueError("no"))
    shown = cli("results", "show", "a", "--url", database_url, "--json").json
    assert (shown["state"], shown["expires_at"]) == ("FAILURE", None)
    assert "expires_at" not in cli("results", "show", "a", "--url", database_url).out


def test_a_job_and_its_result_together(cli: Run, database_url: str, make_app: MakeApp, queue: DBQueue) -> None:
    """Both by the job's id and by the task's."""
    app = make_app()
    task_id = app.send_task("shop.add", (1, 2)).id
    job_id = str(queue.jobs(queue="shop")[0].id)
    for name in (task_id, job_id):
        shown = cli("jobs", "show", name, "--url", database_url, "--json").json
        assert (shown["id"], shown["task_id"], shown["result"]) == (job_id, task_id, None)
    app.backend.mark_as_done(task_id, "secret")
    for name in (task_id, job_id):
        shown = cli("jobs", "show", name, "--url", database_url, "--json", "--payload").json
        assert shown["result"]["state"] == "SUCCESS"
        assert set(shown["result"]) == {"state", "stored_at", "expires_at"}
        assert shown.get("payload") or shown.get("payload_hex")
        out = cli("jobs", "show", name, "--url", database_url).out
        assert "result_state" in out
        assert "secret" not in out


def test_a_native_job_has_no_result(cli: Run, database_url: str, queue: DBQueue) -> None:
    job_id = queue.send("mail", {}).id
    assert cli("jobs", "show", job_id, "--url", database_url, "--json").json["result"] is None


@pytest.mark.databases("postgres")
def test_who_may_not_read_results_still_sees_the_job(
    cli: Run, database_url: str, make_app: MakeApp, queue: DBQueue, postgres: Server
) -> None:
    app = make_app()
    task_id = app.send_task("shop.add", (1, 2)).id
    app.backend.mark_as_done(task_id, 1)
    name = database_url.rpartition("/")[2]
    postgres.execute("DROP ROLE IF EXISTS looker")
    postgres.execute("CREATE ROLE looker LOGIN PASSWORD 'looker'")
    tables = ", ".join(f"dbqueue_{table}" for table in ("jobs", "finished", "meta", "migrations"))
    postgres.execute(f"GRANT SELECT ON {tables} TO looker", dbname=name)
    try:
        url = f"postgresql://looker:looker@127.0.0.1:{postgres.port}/{name}"
        assert cli("jobs", "show", task_id, "--url", url, "--json").json["result"] is None
        assert cli("results", "show", task_id, "--url", url).code == 3
    finally:
        postgres.execute("DROP OWNED BY looker", dbname=name)
        postgres.execute("DROP ROLE looker")


def test_the_doctor_sees_results_that_nobody_prunes(
    look: Look, queue: DBQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "MANY_RESULTS", 3)
    database = queue.database

    def store(name: str, ago: float) -> None:
        ttl = -round(ago * SECOND)
        database.run(lambda s: results.store(database.dialect, s, name, "SUCCESS", b"{}", ttl))

    store("young", -60)
    store("expired today", 3_600)
    found = look()
    assert not_ok(found) == {}
    assert found["results"]["sentence"] == "no result has expired more than a day ago"
    for number in range(3):
        store(f"old{number}", 2 * 86_400)
    database.run(lambda s: results.save_group(database.dialect, s, "g", b"{}", -2 * 86_400 * SECOND))
    found = look()
    assert not_ok(found) == {"results": "warning"}
    assert "3 results and 1 groups expired more than a day ago" in found["results"]["sentence"]
    store("one more", 2 * 86_400)
    assert "more than 3 results" in look()["results"]["sentence"]
    database.run(lambda s: results.prune(database.dialect, s, 100))
    assert not_ok(look()) == {}, "the remedy cures it"
