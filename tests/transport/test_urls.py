"""The broker URL is all that changes: it is known without an import, shows no password, and refuses wrong options by name (C1)."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu
import kombu.common
import pytest

from dbqueue.errors import ConfigError, ConnectionLost
from dbqueue.kombu_transport import options
from dbqueue.kombu_transport.plugin import SCHEMES
from tests.servers import Server
from tests.transport.shops import Shop

pytestmark = pytest.mark.req("C1")

SECRET = "hunter2"


def test_a_celery_app_needs_no_import(broker_url: str) -> None:
    code = (
        "import sys; from celery import Celery; app = Celery('shop', broker=sys.argv[1]); "
        "assert 'dbqueue.kombu_transport.transport' not in sys.modules; "
        "app.connection_for_write().ensure_connection(max_retries=1); print('reached')"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, broker_url], capture_output=True, text=True, timeout=60
    )
    assert (run.stdout, run.returncode) == ("reached\n", 0), run.stderr


@pytest.mark.req("C1")
@pytest.mark.parametrize(
    "imports", ["import dbqueue; from kombu import Connection", "import kombu; from kombu import Connection; import dbqueue",
                "import kombu.transport; import dbqueue; from kombu import Connection"],
)  # fmt: skip
def test_a_program_of_kombu_alone_needs_one_import(imports: str, broker_url: str) -> None:
    """Whatever comes first: importing dbqueue does not import kombu."""
    text = f"{imports}; c = Connection({broker_url!r}); c.connect(); c.release()"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
    alone = "import dbqueue, sys; assert 'kombu' not in sys.modules"
    subprocess.run([sys.executable, "-c", alone], check=True, timeout=60)


def test_every_scheme_is_registered() -> None:
    from kombu.transport import TRANSPORT_ALIASES

    assert {TRANSPORT_ALIASES[scheme] for scheme in SCHEMES} == {"dbqueue.kombu_transport.transport:Transport"}


def test_the_module_that_kombu_loads_brings_in_nothing_else() -> None:
    code = (
        "import sys, kombu.transport; before = set(sys.modules); import dbqueue.kombu_transport.plugin; "
        "print(sorted(name for name in set(sys.modules) - before if name.partition('.')[0] not in "
        "('dbqueue', 'json', '_json', 'typing', 'contextlib', 'importlib')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"dbqueue+postgresql://app:{SECRET}@db/shop", "dbqueue+postgresql://app:**@db/shop"),
        (f"dbqueue+postgresql://app@db/shop?password={SECRET}&sslmode=require", "dbqueue+postgresql://app@db/shop"),
        (f"dbqueue+postgresql://app:{SECRET}@db:6432/shop?lease=5", "dbqueue+postgresql://app:**@db:6432/shop"),
        ("dbqueue+sqlite:///shop.db", "dbqueue+sqlite:///shop.db"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    connection = kombu.Connection(url)
    assert connection.as_uri() == shown
    assert SECRET not in repr(connection)
    if f":{SECRET}@" in url:
        assert SECRET in connection.as_uri(include_password=True)


@pytest.mark.parametrize(
    ("alternate", "whole"),
    [
        (f"dbqueue+postgresql://app:{SECRET}@h2:6432/shop", f"postgresql://app:{SECRET}@h2:6432/shop"),
        ("dbqueue+postgresql://app:p%40ss%2Fw@h2/shop", "postgresql://app:p%40ss%2Fw@h2/shop"),
        ("dbqueue+sqlite:////tmp/b.db", "sqlite:////tmp/b.db"),
        ("dbqueue+sqlite:///b.db", "sqlite:///b.db"),
    ],
)
def test_a_failover_puts_the_alternate_together_again(alternate: str, whole: str) -> None:
    connection = kombu.Connection(f"dbqueue+postgresql://app@h1/shop;{alternate}")
    assert options.database_url(connection) == "postgresql://app@h1/shop"
    connection.maybe_switch_next()
    assert options.database_url(connection) == whole
    assert SECRET not in connection.as_uri()


@pytest.mark.databases("postgres")
def test_a_failover_reaches_the_second_server(broker_url: str) -> None:
    with kombu.Connection(f"dbqueue+postgresql://app@127.0.0.1:1/shop;{broker_url}", connect_timeout=2) as connection:
        connection.ensure_connection(max_retries=2, interval_start=0)
        assert connection.channel().queue_declare("q").message_count == 0


def test_a_connection_really_reaches_the_database(broker_url: str) -> None:
    dead = (
        "dbqueue+postgresql://app@127.0.0.1:1/shop" if "postgres" in broker_url else "dbqueue+sqlite:////nowhere/x.db"
    )
    with pytest.raises(ConnectionLost):
        kombu.Connection(dead).connect()


@pytest.fixture
def user(postgres: Server, database_url: str) -> Iterator[str]:
    """A role of the test's own, with the password "right"."""
    name = f"user_{uuid4().hex[:8]}"
    postgres.execute(f"CREATE ROLE {name} SUPERUSER LOGIN PASSWORD 'right'")
    yield name
    postgres.execute(f"DROP OWNED BY {name}", dbname=database_url.rpartition("/")[2])
    postgres.execute(f"DROP ROLE {name}")


def with_user(broker_url: str, user: str, password: str) -> str:
    return f"dbqueue+postgresql://{user}:{password}@{broker_url.rpartition('@')[2]}"


def test_a_url_that_the_server_turns_down_is_not_tried_again(postgres: Server, broker_url: str, user: str) -> None:
    for url, reason in (
        (with_user(broker_url, user, SECRET), "wrong user or password"),
        (with_user(broker_url, user, "right") + "_not_there", "no such user or database"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            kombu.Connection(url).ensure_connection(max_retries=None, interval_start=0)
        assert SECRET not in str(caught.value)


def test_a_password_that_is_changed_later_is_waited_for(postgres: Server, broker_url: str, user: str) -> None:
    """A worker must not end because its database got the new password a moment before its own restart."""
    with kombu.Connection(with_user(broker_url, user, "right")) as connection:
        connection.ensure_connection(max_retries=1)
        postgres.execute(f"ALTER ROLE {user} PASSWORD 'other'")
        postgres.terminate_connections(broker_url.rpartition("/")[2])
        with pytest.raises(ConnectionLost):
            connection.clone().connect()
        postgres.execute(f"ALTER ROLE {user} PASSWORD 'right'")
        connection.ensure_connection(max_retries=10, interval_start=0.1)


def test_a_worker_with_a_wrong_password_ends_and_says_why(
    postgres: Server, broker_url: str, user: str, tmp_path: Path
) -> None:
    shop = Shop(tmp_path, with_user(broker_url, user, SECRET), {})
    worker = shop.celery("worker", "-P", "solo")
    assert worker.wait(60) != 0
    log = shop.logs[0].read_text()
    assert "wrong user or password" in log
    assert SECRET not in log


def test_options_stand_in_the_url_or_in_the_transport_options(broker_url: str) -> None:
    url = broker_url.removeprefix("dbqueue+")
    joint = "&" if "?" in url else "?"
    read = options.read(f"{url}{joint}lease=30&poll=0.5&eta_lead=7&prefix=mine_", {"lease": 45})
    assert (read.settings.lease_ms, read.settings.poll_ms, read.eta_lead, read.settings.prefix) == (
        45_000,
        500,
        7.0,
        "mine_",
    )
    assert read.settings.url == url
    assert not read.redis_priorities
    assert options.read(url, {"priority_order": "redis"}).redis_priorities


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"lease": "long"}, "lease"), ({"lease": 0}, "lease"), ({"poll": -1}, "poll"), ({"eta_lead": "soon"}, "eta_lead"),
        ({"eta_lead": True}, "eta_lead"), ({"delivery_limit": 1.5}, "delivery_limit"), ({"delivery_limit": -1}, "delivery_limit"),
        ({"priority_order": "up"}, "priority_order"),
        ({"visibility_timeout": "x"}, "visibility_timeout"), ({"notify": 1}, "notify"), ({"prefix": "Bad Name"}, "prefix"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        options.read("postgresql://db/shop", given)


def test_a_wrong_value_in_the_url_too() -> None:
    with pytest.raises(ConfigError, match="lease"):
        options.read("postgresql://db/shop?lease=soon", {})


def test_what_other_transports_know_is_ignored_and_the_unknown_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_told", set())
    with caplog.at_level(logging.WARNING):
        options.read("postgresql://db/shop", {"fanout_prefix": True, "socket_keepalive": True, "confirm_publish": True})
        assert caplog.messages == []
        for _ in range(2):
            options.read("postgresql://db/shop", {"leese": 3})
    assert len(caplog.messages) == 1
    assert "leese" in caplog.messages[0]


def test_an_inherited_visibility_timeout_is_a_short_lease(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_told", set())
    with caplog.at_level(logging.WARNING):
        assert options.read("postgresql://db/shop", {"visibility_timeout": 43_200}).settings.lease_ms == 60_000
        assert options.read("postgresql://db/shop", {"visibility_timeout": 5}).settings.lease_ms == 5_000
        assert (
            options.read("postgresql://db/shop", {"visibility_timeout": 43_200, "lease": 9}).settings.lease_ms == 9_000
        )
    assert len(caplog.messages) == 1


def test_tls_is_said_in_the_drivers_words() -> None:
    read = options.read("postgresql://db/shop", {}, {"ssl_cert_reqs": "required", "ssl_ca_certs": "/ca.pem"})
    assert read.settings.url == "postgresql://db/shop?sslmode=verify-full&sslrootcert=%2Fca.pem"
    for url, given in (("sqlite:///shop.db", True), ("postgresql://db/shop", {"ciphers": "x"})):
        with pytest.raises(ConfigError, match="broker_use_ssl"):
            options.read(url, {}, given)


def test_connections_of_one_process_share_one_station(connect: Callable[..., kombu.Connection]) -> None:
    first, second = connect(), connect()
    assert first.connection.station is second.connection.station
