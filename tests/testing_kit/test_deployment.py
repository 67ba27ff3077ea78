"""What the developer's machine says never reaches a test, and a test without jobs loads nothing (D21).

Each of these runs pytest as a user does: in a directory of its own, with the plugin that the installed distribution
brings, and with settings that would stop every program that reads them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dbqueue import ConfigError, DBQueue, Runtime, settings
from dbqueue.settings import RuntimeSettings, Settings
from dbqueue.testing import CaseFactory, case
from tests.testing_kit.app import other, queue, unnamed
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.req("D21")

BROKEN = {"DBQUEUE_LEASE_MS": "nonsense", "DBQUEUE_URL": "postgresql://nobody@127.0.0.1:1/production"}


def run_pytest(folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    (folder / "dbqueue.toml").write_text("[jobs\nthis is = no TOML", encoding="utf-8")


def test_tests_without_jobs_load_no_settings_and_nothing_heavy(tmp_path: Path) -> None:
    write(
        tmp_path,
        test_nothing="""
        import sys

        def test_nothing(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("dbqueue")
            assert "dbqueue.testing.plugin" in sys.modules
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert not loaded & {"sqlalchemy", "msgspec", "sqlite3", "psycopg", "click", "celery", "kombu"}
            ours = {name for name in sys.modules if name.partition(".")[0] == "dbqueue"}
            assert ours == {"dbqueue", "dbqueue.testing", "dbqueue.testing.plugin"}
        """,
    )
    assert "1 passed" in run_pytest(tmp_path, **BROKEN)


def test_tests_with_jobs_do_not_see_the_deployment(tmp_path: Path) -> None:
    write(
        tmp_path,
        shop="""
        from dbqueue import DBQueue

        queue = DBQueue()
        named = DBQueue("postgresql://nobody@127.0.0.1:1/production")

        @queue.job(max_attempts=1, timeout=3600)
        def work() -> None: ...

        @named.job(max_attempts=1, timeout=3600, name="named")
        def named_work() -> None: ...
        """,
        test_shop="""
        import os
        import pytest
        from dbqueue import ConfigError, settings
        from shop import named, named_work, queue, work

        def test_in_a_case(dbqueue_case):
            case, also = dbqueue_case(queue), dbqueue_case(named)
            work.enqueue()
            named_work.enqueue()
            assert case.drain().succeeded == also.drain().succeeded == 1
            assert queue.settings.lease_ms == named.settings.lease_ms == 7_200_000
            assert settings.load(with_jobs=False).jobs.url is None

        def test_in_a_process(dbqueue_case):
            case = dbqueue_case(queue)
            case.process("shop:queue")
            case.wait_for(work.enqueue())

        @pytest.mark.parametrize("again", [1, 2])
        def test_after_a_case_the_machine_counts_again(again):
            assert os.environ["DBQUEUE_LEASE_MS"] == "nonsense"
            assert "DBQUEUE_CONFIG" not in os.environ
            with pytest.raises(ConfigError, match="TOML"):
                work.enqueue()
        """,
    )
    assert "4 passed" in run_pytest(tmp_path, **BROKEN)


def test_only_the_last_of_several_cases_restores_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBQUEUE_LEASE_MS", "nonsense")
    first, second = case(unnamed), case(queue)
    first.__enter__()
    second.__enter__()
    other.enqueue()
    first.__exit__(None, None, None)  # not in the order of their beginning, as in two threads
    assert "DBQUEUE_LEASE_MS" not in os.environ
    os.environ["DBQUEUE_WORKERS"] = "7"  # a test's own
    assert settings.load(with_jobs=False).jobs.workers == 7
    second.__exit__(None, None, None)
    assert os.environ["DBQUEUE_LEASE_MS"] == "nonsense"
    assert not {"DBQUEUE_WORKERS", "DBQUEUE_CONFIG"} & set(os.environ)


def test_a_queue_without_a_case_finds_no_database(dbqueue_case: CaseFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBQUEUE_URL", "postgresql://nobody@127.0.0.1:1/production")
    dbqueue_case(queue)
    forgotten = DBQueue()
    with pytest.raises(ConfigError, match="no database is named"):
        forgotten.counts()


def test_a_runtime_can_be_tested_in_a_case(dbqueue_case: CaseFactory) -> None:
    opened = dbqueue_case(unnamed)
    job = other.enqueue()
    runtime = Runtime(Settings(runtime=RuntimeSettings(mode="all"), jobs=settings.JobSettings()))

    class Api:
        def serve(self) -> None:
            wait_for(lambda: opened.job(job).state == "succeeded")
            runtime.stop()

        def close(self) -> None: ...

    assert runtime.run(api=Api(), jobs=unnamed) == 0


def test_a_worker_of_a_killed_session_does_not_outlive_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        test_killed="""
        import os, signal
        from pathlib import Path
        from tests.testing_kit.app import Do, queue, work

        def test_killed(dbqueue_case):
            case = dbqueue_case(queue)
            worker = case.process("tests.testing_kit.app:queue")
            case.wait_for(work.enqueue(Do()))
            Path("pid").write_text(str(worker.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    with pytest.raises(AssertionError):
        run_pytest(tmp_path, PYTHONPATH=str(ROOT))
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not _alive(pid), message=f"worker {pid} is still there")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_parallel_sessions_share_nothing(tmp_path: Path) -> None:
    """As the processes of pytest-xdist do: the same tests at the same time."""
    write(
        tmp_path,
        test_parallel="""
        import pytest
        from tests.testing_kit.app import Do, queue, work

        @pytest.mark.parametrize("n", range(20))
        def test_alone(dbqueue_case, n):
            case = dbqueue_case(queue)
            work.enqueue(Do())
            assert case.drain().succeeded == len(case.jobs()) == 1
        """,
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    sessions = [
        subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for session in sessions:
        output, _ = session.communicate(timeout=60)
        assert b"20 passed" in output, output
