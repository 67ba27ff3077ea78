import sqlite3
import psycopg, pytest, time
from tests.waiting import wait_for

@pytest.mark.req("D5", "D13")
@pytest.mark.databases("sqlite", "postgres", "postgres15")
@pytest.mark.parametrize("n", range(10))
def test_url(database_url, make_database_url, database, n):
    other = make_database_url()
    assert other != database_url
    if database == "sqlite":
        c = sqlite3.connect(database_url.removeprefix("sqlite:///")); c.execute("create table t(x)"); c.close()
    else:
        with psycopg.connect(database_url) as c:
            c.execute("create table t(x int)")
            v = c.execute("show server_version").fetchone()[0]
            assert v.startswith("15" if database.endswith("15") else "18")

@pytest.mark.req("D1")
@pytest.mark.parametrize("mode", ["fast", "immediate", "smart"])
def test_restart(postgres, database_url, mode):
    c = psycopg.connect(database_url)
    if mode == "smart": c.close()
    port = postgres.port
    postgres.restart(mode)
    assert port == postgres.port
    with psycopg.connect(database_url) as d: d.execute("select 1")
    c.close()

def test_left_stopped(postgres): postgres.stop()
def test_terminate(postgres, database_url):
    cs = [psycopg.connect(database_url) for _ in range(3)]
    name = database_url.rsplit("/",1)[1]
    assert postgres.terminate_connections(name) == 3
    with pytest.raises(psycopg.OperationalError): cs[0].execute("select 1")
    for c in cs: c.close()
@pytest.mark.databases("postgres15")
def test_15(postgres): assert postgres.major == 15
def test_make(make_server):
    s = make_server(18, fsync="on", max_connections="20")
    assert s.execute("show fsync") == [("on",)]
