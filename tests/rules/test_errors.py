"""The tree of errors: stable codes, docstrings that help, and messages that tell no secret (H17, D10)."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dbqueue
from dbqueue import DBQueue, QueueError
from dbqueue.errors import Code

SECRET = "p4ssw0rd"

# A code is a promise to programs that compare it: this list only ever grows.
PROMISED = re.findall(
    r"\S+",
    """
    queue_error config_error foreign_distribution invalid_target target_is_not_a_value invalid_payload
    invalid_argument invalid_name reserved_name invalid_spec invalid_cron unknown_target not_supported enqueue_failed
    not_in_transaction transaction_closed transaction_too_old would_deadlock different_database schema_missing
    schema_outdated schema_too_new job_not_found illegal_move key_taken stale_update lost_claim claim_busy
    connection_lost database_busy database_error closed corrupt_payload schema_mismatch invalid_policy leadership_lost
    not_initialized init_failed task_not_found task_exists execution_failed code_failed http_failed save_failed
    already_running not_running compile_failed hook_failed log_persist_failed lock_taken lock_lost
    """,
)


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(dbqueue.__path__, "dbqueue."):
        if not re.search(
            r"__main__|\.(kombu_transport|celery_\w+|testing)\b", module.name
        ):  # these need more than we do
            yield module.name


def tree(root: type[QueueError] = QueueError) -> Iterator[type[QueueError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


for _module in modules():
    importlib.import_module(_module)
ERRORS = sorted(
    {error for error in tree() if error.__module__.startswith("dbqueue.")}, key=lambda error: error.__name__
)


# -- codes and docstrings ----------------------------------------------------------------------------------------------


@pytest.mark.req("H17")
@pytest.mark.parametrize("code", PROMISED)
def test_a_promised_code_is_never_taken_back(code: str) -> None:
    assert str(Code(code)) == code


@pytest.mark.req("H17")
def test_codes_are_words_that_a_program_can_compare() -> None:
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", code.value) for code in Code)
    assert len(set(Code)) == len(Code.__members__), "an alias is one code for two kinds"
    assert {name.lower() for name in Code.__members__} == {code.value for code in Code}


@pytest.mark.req("H17")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_class_has_a_code_of_its_own_and_says_what_to_do(error: type[QueueError]) -> None:
    assert isinstance(vars(error).get("code"), Code), "inherited"
    assert [other for other in ERRORS if other.code is error.code] == [error]
    assert (vars(error).get("__doc__") or "").strip().endswith("."), "a docstring of its own, in sentences"
    if error.code is not Code.FOREIGN_DISTRIBUTION:  # raised by the command only
        assert getattr(dbqueue, error.__name__, None) is error, "who is to catch it must be able to import it"


# -- messages: what the source puts into them --------------------------------------------------------------------------

# Names that hold what somebody gave us. ``describe(value)``, ``type(value)``, ``len(value)``, ``mask_url(url)`` say
# what it is without telling it.
DATA = {"value", "payload", "data", "body", "secret", "password", "url", "text", "args", "kwargs", "key", "environ"}
SAFE_CALLS = {"describe", "type", "len", "mask_url", "_shown"}


@dataclass
class Scan(ast.NodeVisitor):
    """Finds errors whose message interpolates data, or the text of an error that is not ours."""

    found: list[tuple[int, str]]
    foreign: list[str]

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        named = re.findall(r"[A-Za-z_.]+", ast.unparse(node.type)) if node.type else []
        ours = all(name in OWN_NAMES or name.startswith("_") for name in named)
        self.foreign.append(node.name if node.name and not ours else "")
        self.generic_visit(node)
        self.foreign.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        for part in ast.walk(node.exc) if node.exc else ():
            if isinstance(part, ast.FormattedValue):
                self._check(part.value, node.lineno)
            elif isinstance(part, ast.Call) and ast.unparse(part.func) == "str":
                self._check(part.args[0], node.lineno)
        self.generic_visit(node)

    def _check(self, value: ast.expr, line: int) -> None:
        if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in SAFE_CALLS:
            return
        if isinstance(value, (ast.Name, ast.Attribute)):
            name = ast.unparse(value)
            if name.rpartition(".")[2] in DATA or name.partition(".")[0] in self.foreign:
                self.found.append((line, name))
            if isinstance(value, ast.Name):
                return
        for child in ast.iter_child_nodes(value):
            if isinstance(child, ast.expr):
                self._check(child, line)


OWN_NAMES = {error.__name__ for error in ERRORS}

# Where something of such a name is told on purpose, and what it is.
TOLD = {
    ("settings.py", "value"): "a name (of a queue, a target ...): names are no secrets, and a wrong one must be seen",
    ("settings.py", "maximum.value"): "milliseconds",
    ("settings.py", "base.value"): "milliseconds",
    ("payload.py", "text"): "put together from the names of a declaration",
    ("engine.py", "url"): "its scheme",
    ("sqlite.py", "url"): "the names of its options",
    (
        "chords.py",
        "error",
    ): "Celery's own words: they become the result of the chord's body, and are the app's as the error is",
    ("chords.py", "value"): "the same",
    ("scheduler.py", "error"): "what Celery says of the keys of an entry, which stand in the app's own code",
}


@pytest.mark.req("D10")
def test_no_message_is_made_of_data_or_of_foreign_errors() -> None:
    root = Path(dbqueue.__file__).parent
    wrong = []
    for path in root.rglob("*.py"):
        scan = Scan([], [])
        scan.visit(ast.parse(path.read_text("utf-8")))
        wrong += [
            f"{path.relative_to(root)}:{line} tells {name}"
            for line, name in scan.found
            if (path.name, name) not in TOLD
        ]
    assert not wrong


def test_the_scan_sees_what_it_is_for() -> None:
    source = """
try: ...
except ValueError as error:
    raise ConfigError(f"no: {error}, {type(error).__name__}, {error.args}")
except QueueError as error:
    raise ConfigError(f"no: {error}")
raise ConfigError(f"{payload!r} {describe(payload)} {self.url} {len(data)} {names[key]} {str(body)}")
raise ConfigError(str(value))
"""
    scan = Scan([], [])
    scan.visit(ast.parse(source))
    assert {name for _, name in scan.found} == {"error", "error.args", "payload", "self.url", "key", "body", "value"}


# -- messages: what the doors do with a secret -------------------------------------------------------------------------

URL = f"postgresql://app:{SECRET}@127.0.0.1:1/shop"


class Unfit:
    """No JSON, no dataclass, and with a repr that tells."""

    def __repr__(self) -> str:
        return SECRET


CALLS: dict[str, Callable[[DBQueue], Any]] = {
    "url of an unknown database": lambda _: DBQueue(f"mysql://app:{SECRET}@h/d"),
    "url without a port number": lambda _: DBQueue(f"postgresql://app:{SECRET}@h:x/d"),
    "no url": lambda _: DBQueue(SECRET),
    "option of the wrong type": lambda _: DBQueue("sqlite:///a.db", lease=SECRET),
    "unknown option": lambda _: DBQueue("sqlite:///a.db", **{URL: 1}),
    "unknown option of SQLite": lambda _: DBQueue(f"sqlite:///a.db?x={SECRET}"),
    "unreachable": lambda _: DBQueue(URL).counts(),
    "payload that is no JSON": lambda queue: queue.send("mail", {SECRET: Unfit()}),
    "payload of the wrong type": lambda queue: queue.targets["mail"].enqueue({SECRET: SECRET}),
    "payload that is too large": lambda queue: queue.send("mail", SECRET * 200_000),
    "key": lambda queue: queue.send("mail", {}, key=SECRET * 100),
    "delay": lambda queue: queue.send("mail", {}, delay=SECRET),  # type: ignore[arg-type]
    "run_at": lambda queue: queue.send("mail", {}, run_at=SECRET),  # type: ignore[arg-type]
    "priority": lambda queue: queue.send("mail", {}, priority=SECRET),  # type: ignore[arg-type]
    "state": lambda queue: queue.jobs(state=SECRET),
    "id": lambda queue: queue.get_job(SECRET),  # type: ignore[arg-type]
    "outcome": lambda queue: queue.resolve(uuid.uuid4(), SECRET, None),  # type: ignore[arg-type]
    "time": lambda queue: queue.resolve(uuid.uuid4(), "discarded", SECRET),  # type: ignore[arg-type]
    "lease": lambda queue: queue.claim("mail", "worker", lease=SECRET),  # type: ignore[arg-type]
    "calling a target": lambda queue: queue.targets["mail"](SECRET),
    "retry policy": lambda queue: queue.job(max_attempts=1, timeout=1, retry=SECRET)(nothing),
    "on_crash": lambda queue: queue.job(max_attempts=1, timeout=1, on_crash=SECRET)(nothing),
}


def nothing() -> None: ...


@pytest.mark.req("D10")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_never_repeats_a_secret(call: Callable[[DBQueue], Any], tmp_path: Path) -> None:
    """Neither the message nor anything that a traceback prints below it."""
    queue = DBQueue(f"sqlite:///{tmp_path}/queue.db")
    queue.job(max_attempts=1, timeout=1, name="mail")(nothing)
    with pytest.raises(QueueError) as raised:
        call(queue)
    queue.close()
    assert SECRET not in str(raised.value)
    assert SECRET not in repr(raised.value)
    assert SECRET not in "".join(traceback.format_exception(raised.value))
