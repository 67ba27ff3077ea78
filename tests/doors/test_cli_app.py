"""`-A module[:attr]`: which DBQueue is meant, and what is said when that cannot be told."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue
from dbqueue.cli import apps
from dbqueue.cli.distribution import check_distribution
from dbqueue.errors import ConfigError, ForeignDistribution, InvalidTarget
from tests.doors.conftest import ROOT, Run

QUEUE = "from dbqueue import DBQueue\n"

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / (f"{name}.py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))

    return write


@pytest.mark.parametrize(
    ("spec", "files"),
    [
        ("shop", {"shop": QUEUE + "anything = DBQueue('sqlite:///a.db')"}),
        ("shop:second", {"shop": QUEUE + "first, second = DBQueue('sqlite:///b.db'), DBQueue('sqlite:///a.db')"}),
        ("shop:config.queue", {"shop": QUEUE + "class config: queue = DBQueue('sqlite:///a.db')"}),
        ("shop", {"shop": QUEUE + "queue = also = DBQueue('sqlite:///a.db')"}),
        ("shop.jobs", {"shop/jobs": QUEUE + "queue = DBQueue('sqlite:///a.db')"}),
        ("shop", {"shop/__init__": "", "shop/queue": QUEUE + "queue = DBQueue('sqlite:///a.db')"}),
        ("shop", {"shop/__init__": "", "shop/app": QUEUE + "jobs = DBQueue('sqlite:///a.db')"}),
        ("shop.jobs", {"shop/q": QUEUE + "queue = DBQueue('sqlite:///a.db')", "shop/jobs": "from shop.q import queue"}),
    ],
)  # fmt: skip
def test_found(write: Write, spec: str, files: dict[str, str]) -> None:
    write(**files)
    queue = apps.find_queue(spec)
    assert isinstance(queue, DBQueue)
    assert queue.database.label == "sqlite:///a.db"
    queue.close()


TWO = QUEUE + "a = DBQueue('{}')\nb = DBQueue('{}')"


@pytest.mark.parametrize(
    ("spec", "files", "told"),
    [
        ("shpo", {}, "there is no module 'shpo' in "),
        ("shop.jobs", {"shop/__init__": ""}, "there is no module 'shop.jobs' in "),
        ("shop.py", {"shop": ""}, "write -A shop"),
        ("shop/jobs.py", {"shop/jobs": ""}, "write -A shop.jobs"),
        ("./shop/jobs.py:queue", {"shop/jobs": ""}, "write -A shop.jobs:queue"),
        ("shop.queue", {"shop": QUEUE + "queue = DBQueue('sqlite:///a.db')"}, "write -A shop:queue"),
        ("shop:", {"shop": ""}, "module or module:attribute"),
        (":queue", {}, "module or module:attribute"),
        ("", {}, "module or module:attribute"),
        ("shop:a:b", {}, "module or module:attribute"),
        ("sqlite:///a.db", {}, "use --url"),
        ("shop", {"shop": "x = 1"}, "no DBQueue in shop;"),
        ("shop", {"shop/__init__": "", "shop/app": ""}, "no DBQueue in shop, shop.app;"),
        ("shop:x", {"shop": QUEUE + "x, q = 1, DBQueue('sqlite:///a.db')"}, "its type is int; it has: shop:q"),
        ("shop:y", {"shop": QUEUE + "q = DBQueue('sqlite:///a.db')"}, "no attribute 'y'; it has: shop:q"),
        ("shop:y", {"shop": ""}, "it has no DBQueue"),
    ],
)  # fmt: skip
def test_wrong_spellings(cli: Run, write: Write, spec: str, files: dict[str, str], told: str) -> None:
    write(**files)
    code, out, err = cli("queues", "-A", spec)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert err.endswith(" [config_error]\n")


@pytest.mark.req("D5")
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("sqlite:///a.db", "sqlite:///b.db"),
        ("sqlite:///a.db", "sqlite:///a.db?prefix=own_"),
        ("sqlite:///a.db", "postgresql://h/d"),
        ("postgresql://h/d", "postgresql://h2/d"),
        ("postgresql://h/d", "postgresql://h:5433/d"),
        ("postgresql://h/d", "postgresql://h/d2"),
        ("postgresql://h/d", "postgresql://h/d?schema=own"),
    ],
)
@pytest.mark.parametrize("command", ["worker", "queues"])
def test_conflicting_databases_are_refused(cli: Run, write: Write, a: str, b: str, command: str) -> None:
    write(shop=TWO.format(a, b))
    code, out, err = cli(command, "-A", "shop")
    assert (code, out) == (2, "")
    assert f"conflicting databases: shop:a ({a.partition('?')[0]}), shop:b ({b.partition('?')[0]})" in err


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("sqlite:///a.db", "sqlite:///./a.db"),
        ("postgresql://u:p4ssw0rd@h/d", "postgresql://v@h:5432/d?application_name=x"),
        ("postgresql+psycopg2://h/d", "dbqueue+postgresql://h/d"),
    ],
)
def test_two_queues_of_one_database_have_to_be_told_apart(cli: Run, write: Write, a: str, b: str) -> None:
    write(shop=TWO.format(a, b))
    code, out, err = cli("queues", "-A", "shop")
    assert (code, out) == (2, "")
    assert "more than one DBQueue: shop:a, shop:b; name the one that you mean: -A shop:a" in err
    assert "p4ssw0rd" not in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import nowhere_at_all", "failed: ModuleNotFoundError: No module named 'nowhere_at_all' (shop.py, line 1)"),
        ("import shop.inner", "ModuleNotFoundError: No module named 'shop.inner'"),
        ("\n\n1 / 0", "importing shop failed: ZeroDivisionError: division by zero (shop.py, line 3)"),
        ("def (", "importing shop failed: SyntaxError: "),
        ("import sys; sys.exit(0)", "SystemExit: it exits while it is imported"),
        ("raise ValueError('first\\nsecond')", "ValueError: first second (shop.py, line 1)"),
        ("raise ValueError('postgresql://u:p4ssw0rd@h/d')", "ValueError: postgresql://*** (shop.py, line 1)"),
    ],
)  # fmt: skip
def test_errors_inside_the_module_are_its_own(cli: Run, write: Write, text: str, told: str) -> None:
    write(shop=text)
    code, out, err = cli("queues", "-A", "shop")
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert "p4ssw0rd" not in err


def test_traceback_shows_the_users_frames_only(cli: Run, write: Write) -> None:
    write(shop="import inner\n", inner="url = 'postgresql://u:p4ssw0rd@h/d'; raise ValueError(url)\n")
    code, _, err = cli("queues", "-A", "shop", "--traceback")
    assert code == 2
    assert err.startswith("Traceback (most recent call last):\n")
    assert 'shop.py", line 1' in err
    assert 'inner.py", line 1' in err
    assert "apps.py" not in err
    assert "p4ssw0rd" not in err


def test_an_error_of_ours_inside_the_module_keeps_its_code(cli: Run, write: Write) -> None:
    write(shop=QUEUE + "q = DBQueue('sqlite:///a.db')\n@q.job(max_attempts=0, timeout=1)\ndef f() -> None: ...\n")
    code, _, err = cli("queues", "-A", "shop")
    assert code == 2
    assert "max_attempts" in err
    assert err.endswith("[invalid_target]\n")
    with pytest.raises(InvalidTarget):
        apps.find_queue("shop")


def test_the_option_may_stand_before_the_command(cli: Run, write: Write, tmp_path: Path) -> None:
    write(shop=QUEUE + "q = DBQueue('sqlite:///a.db')")
    assert cli("-A", "shop", "migrate").out.splitlines()[0] == "applied 0001_jobs"
    assert (tmp_path / "a.db").exists()


def test_app_and_url_exclude_each_other(cli: Run) -> None:
    assert cli("queues", "-A", "shop", "--url", "sqlite:///a.db").code == 2


def test_a_queue_without_url_takes_that_of_the_settings(
    cli: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(shop=QUEUE + "q = DBQueue()")
    assert cli("migrate", "-A", "shop").code == 2
    monkeypatch.setenv("DBQUEUE_URL", "sqlite:///a.db")
    assert cli("migrate", "-A", "shop:q").code == 0


def test_without_any_database(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = cli("queues")
    assert code == 2
    assert err.startswith("Error: no database is named: give -A or --url, or set DBQUEUE_URL")
    monkeypatch.setenv("DBQUEUE_NONSENSE", "1")
    assert cli("queues", "--url", "sqlite:///a.db").code == 2


# -- whose module is it? -----------------------------------------------------------------------------------------------


def distribution(folder: Path, name: str, file: str, text: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / file).write_text(text)


FOREIGN = [
    ("dbqueue", "RECORD", "dbqueue/__init__.py,sha256=x,1\ndbqueue/main.py,,\n"),
    ("other-queue", "RECORD", "other/x.py,,\ndbqueue/__init__.py,,\n"),
    ("dbqueue", "RECORD", "dbqueue.py,,\n"),
    ("dbqueue", "top_level.txt", "dbqueue\n"),
]


@pytest.mark.parametrize(("name", "file", "text"), FOREIGN)
def test_a_foreign_distribution_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, text: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    distribution(tmp_path, name, file, text)
    with pytest.raises(
        ForeignDistribution, match=f"'{name}' also brings a package named dbqueue.*pip uninstall -y {name}"
    ):
        check_distribution()
    assert issubclass(ForeignDistribution, ConfigError)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("celery-dbqueue", "dbqueue/__init__.py,,\n"),
        ("Celery_DBQueue", "dbqueue/__init__.py,,\n"),
        ("dbqueue-dashboard", "dbqueue_dashboard/__init__.py,,\ntests/dbqueue/__init__.py,,\n"),
    ],
)
def test_ours_and_neighbours_are_left_in_peace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    distribution(tmp_path, name, "RECORD", text)
    check_distribution()


@pytest.mark.req("H17")
def test_a_foreign_distribution_stops_every_command(process: Run, tmp_path: Path) -> None:
    distribution(tmp_path, *FOREIGN[0])
    assert os.getcwd() == str(tmp_path)
    code, out, err = process("--version")
    assert (code, out) == (2, "")
    assert err.startswith("Error: the installed distribution 'dbqueue'")
    assert err.endswith("[foreign_distribution]\n")
    answer: Any = process("queues", "--json")
    assert (answer.code, answer.error["error"]) == (2, "foreign_distribution")


CELERY = "from celery import Celery\n"
BROKER = "Celery('shop', broker='dbqueue+sqlite:///broker.db?prefix=own_', set_as_current=False)"


@pytest.mark.req("C7")
@pytest.mark.parametrize(
    ("spec", "files", "file", "celery"),
    [
        ("shop", {"shop": CELERY + f"app = {BROKER}"}, "broker.db", "shop"),
        ("shop", {"shop": CELERY + f"anything = {BROKER}"}, "broker.db", "shop"),
        ("shop:inner.app", {"shop": CELERY + f"class inner: app = {BROKER}"}, "broker.db", "shop"),
        ("shop", {"shop/__init__": "", "shop/celery": CELERY + f"app = {BROKER}"}, "broker.db", "shop"),
        ("shop", {"shop": CELERY + f"app = object()\ncelery = {BROKER}"}, "broker.db", "shop"),  # a web application, say
        ("shop", {"shop": QUEUE + CELERY + f"app = {BROKER}\nqueue = DBQueue('sqlite:///a.db')"}, "a.db", "shop"),
        ("shop:queue", {"shop": QUEUE + CELERY + f"app = {BROKER}\nqueue = DBQueue('sqlite:///a.db')"}, "a.db", None),
        ("shop:app", {"shop": QUEUE + CELERY + f"app = {BROKER}\nqueue = DBQueue('sqlite:///a.db')"}, "broker.db", "shop"),
        ("shop", {"shop": QUEUE + "app = queue = DBQueue('sqlite:///a.db')"}, "a.db", None),
    ],
)  # fmt: skip
def test_a_celery_app_is_found_as_celery_finds_it(
    write: Write, spec: str, files: dict[str, str], file: str, celery: str | None
) -> None:
    write(**files)
    queue, app = apps.find_queue(spec), apps.find_celery(spec)
    assert queue.database.label == f"sqlite:///{file}"
    assert queue.database.dialect.names.prefix == ("own_" if file == "broker.db" else "dbqueue_")
    assert (None if app is None else app.main) == celery
    queue.close()


@pytest.mark.req("C6")
@pytest.mark.parametrize(
    ("broker", "works"),
    [
        ("dbqueue+sqlite:///a.db", True),
        ("memory://", False),
        ("redis://nowhere", False),
        ("dbqueue+sqlite:///b.db", None),
    ],
)
def test_a_worker_takes_the_tasks_of_an_app_on_its_own_database_only(
    write: Write, broker: str, works: bool | None
) -> None:
    app = f"app = Celery('shop', broker={broker!r}, set_as_current=False)"
    write(shop=QUEUE + CELERY + f"{app}\nqueue = DBQueue('sqlite:///a.db')")
    queue, celery = apps.find_queue("shop"), apps.find_celery("shop")
    if works is None:
        with pytest.raises(ConfigError, match="a worker works for one of them"):
            apps.is_broker(celery, queue)
    else:
        assert apps.is_broker(celery, queue) is works
    queue.close()


def test_celery_is_not_imported_for_who_does_not_use_it(write: Write, tmp_path: Path) -> None:
    write(shop=QUEUE + "queue = DBQueue('sqlite:///a.db')")
    look = "import sys; from dbqueue.cli import apps; apps.find_queue('shop'); apps.find_celery('shop'); print('celery' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.stdout == "False\n"


@pytest.mark.req("C7")
def test_an_entry_needs_its_app_to_be_run_by_hand(cli: Run) -> None:
    answer = cli("schedules", "run-now", "e", "--owner", "shop", "--url", "sqlite:///a.db")
    assert answer.code == 2
    assert "name the app with -A" in answer.err
