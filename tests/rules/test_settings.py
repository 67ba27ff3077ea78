"""Settings refuse everything that is not exactly right, at every door, and never show a secret.

The cases are generated from the table of fields itself; ``test_documented_bounds`` pins that table to the requirements.
Long like the file that it tests, section by section; the sections after "seconds" stand on their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbqueue import settings as rules
from dbqueue.errors import ConfigError, InvalidArgument, InvalidName, InvalidTarget, QueueError, ReservedName
from dbqueue.settings import (
    CONFIG_VARIABLE,
    OPTIONS,
    OWNERS,
    POLICY,
    TABLES,
    VARIABLES,
    JobSettings,
    RuntimeSettings,
    Settings,
    check_key,
    check_lease_rule,
    check_name,
    check_target_policy,
    load,
    mask_url,
)
from dbqueue.states import OnCrash

SECRET = "p4ssw0rd"
URL = f"postgresql://app:{SECRET}@db.example/shop"
FIELDS = {name: rule for table in TABLES.values() for name, rule in table.items()}
INTS = [name for name, rule in FIELDS.items() if rule.kind is int]
FLAGS = [name for name, rule in FIELDS.items() if rule.kind is bool]
VARIABLE_OF = {name: variable for variable, name in VARIABLES.items()}
OPTION_OF = {name: option for option, name in OPTIONS.items()}

# The other of the two fields that are compared, at a value which leaves this one its full range.
COMPANIONS = {
    "retry_max_ms": {"retry_base_ms": FIELDS["retry_base_ms"].low},
    "retry_base_ms": {"retry_max_ms": FIELDS["retry_max_ms"].high},
}


# -- the four doors through which a value comes in ---------------------------------------------------------------------


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else str(value)


def write_toml(folder: Path, values: Mapping[str, object]) -> Path:
    lines = []
    for table, fields in TABLES.items():
        lines += [f"[{table}]", *(f"{name} = {toml(values[name])}" for name in fields if name in values)]
    path = folder / "some.toml"
    path.write_text("\n".join(lines), "utf-8")
    return path


def by_file(folder: Path, values: Mapping[str, object]) -> Settings:
    return load(write_toml(folder, values), {}, with_jobs=False)


def by_environment(folder: Path, values: Mapping[str, object]) -> Settings:
    environ = {VARIABLE_OF[name]: value if isinstance(value, str) else toml(value) for name, value in values.items()}
    return load(write_toml(folder, {}), environ, with_jobs=False)


def by_constructor(folder: Path, values: Mapping[str, Any]) -> Settings:
    runtime = {name: value for name, value in values.items() if OWNERS[name] == "runtime"}
    jobs = {name: value for name, value in values.items() if OWNERS[name] == "jobs"}
    return Settings(runtime=RuntimeSettings(**runtime), jobs=JobSettings(**jobs))


def by_options(folder: Path, values: Mapping[str, Any]) -> Settings:
    options = {OPTION_OF[n]: v / 1000 if n.endswith("_ms") else v for n, v in values.items()}
    return Settings(runtime=RuntimeSettings(), jobs=JobSettings.from_options(**options))


DOORS: dict[str, Callable[[Path, Mapping[str, Any]], Settings]] = {
    "file": by_file,
    "environment": by_environment,
    "constructor": by_constructor,
    "options": by_options,
}


def label(door: str, name: str, folder: Path) -> str:
    owner = {"runtime": "RuntimeSettings", "jobs": "JobSettings"}[OWNERS[name]]
    return {
        "file": f"{folder / 'some.toml'} [{OWNERS[name]}] {name}",
        "environment": f"environment variable {VARIABLE_OF[name]}",
        "constructor": f"{owner}({name}=...)",
        "options": f"DBQueue({OPTION_OF.get(name)}=...)",
    }[door]


def doors_of(name: str) -> Iterator[str]:
    """DBQueue's keywords are the jobs' settings only."""
    return (door for door in DOORS if door != "options" or name in OPTION_OF)


def get(settings: Settings, name: str) -> object:
    return getattr(getattr(settings, OWNERS[name]), name)


EACH_FIELD_AND_DOOR = [pytest.param(n, d, id=f"{n}-{d}") for n in FIELDS for d in doors_of(n)]
EACH_INT_AND_DOOR = [pytest.param(n, d, id=f"{n}-{d}") for n in INTS for d in doors_of(n)]


def sample(name: str) -> Any:
    """A right value that is not the default."""
    rule = FIELDS[name]
    if rule.kind is str:
        return {"mode": "worker", "url": "sqlite:///other.db", "listen_url": URL}.get(name, "other_")
    return not rule.default if rule.kind is bool else rule.high


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads a ./dbqueue.toml or a DBQUEUE_* variable of the developer."""
    monkeypatch.chdir(tmp_path)
    for variable in os.environ:
        if variable.startswith("DBQUEUE_"):
            monkeypatch.delenv(variable)


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("D17", "D20")
def test_documented_bounds() -> None:
    found = {name: (FIELDS[name].low, FIELDS[name].default, FIELDS[name].high) for name in INTS}
    assert found == {
        "shutdown_ms": (0, 30_000, 3_600_000),
        "workers": (1, 4, 1_000),
        "poll_ms": (10, 250, 60_000),
        "lease_ms": (100, 60_000, 7_200_000),
        "retry_base_ms": (1, 1_000, 3_600_000),
        "retry_max_ms": (1, 300_000, 604_800_000),
        "history_ms": (0, 3_600_000, 315_360_000_000),
    }
    assert {name: (POLICY[name].low, POLICY[name].high) for name in POLICY if POLICY[name].kind is int} == {
        "max_attempts": (1, 100),
        "timeout": (1, 3_600_000),
        "priority": (0, 9),
    }


@pytest.mark.req("D17")
def test_documented_names() -> None:
    assert set(VARIABLES) | {CONFIG_VARIABLE} == {
        *("DBQUEUE_URL", "DBQUEUE_SCHEMA", "DBQUEUE_PREFIX", "DBQUEUE_WORKERS", "DBQUEUE_POLL_MS", "DBQUEUE_LEASE_MS"),
        *("DBQUEUE_RETRY_BASE_MS", "DBQUEUE_RETRY_MAX_MS", "DBQUEUE_HISTORY_MS", "DBQUEUE_KEEP_PAYLOAD"),
        *("DBQUEUE_AUTO_MIGRATE", "DBQUEUE_LISTEN_URL", "DBQUEUE_NOTIFY", "DBQUEUE_MODE", "DBQUEUE_SHUTDOWN_MS"),
        "DBQUEUE_CONFIG",
    }
    assert set(OPTIONS) == {
        *("url", "listen_url", "schema", "prefix", "workers", "poll", "lease", "retry_base", "retry_max", "history"),
        *("keep_payload", "auto_migrate", "notify"),
    }
    assert len(OWNERS) == sum(len(table) for table in TABLES.values()), "a field name is in one table only"


@pytest.mark.req("D17")
def test_defaults() -> None:
    assert load(None, {}, with_jobs=False) == Settings(
        runtime=RuntimeSettings(mode="api", shutdown_ms=30_000), jobs=JobSettings()
    )
    assert JobSettings.from_options() == JobSettings()
    assert RuntimeSettings().mode is None
    jobs = JobSettings()
    assert (jobs.url, jobs.listen_url, jobs.schema, jobs.prefix) == (None, None, "public", "dbqueue_")
    assert (jobs.keep_payload, jobs.auto_migrate, jobs.notify) == (False, True, True)


# -- right values ------------------------------------------------------------------------------------------------------


@pytest.mark.req("D17")
@pytest.mark.parametrize(("name", "door"), EACH_FIELD_AND_DOOR)
def test_every_field_comes_through_every_door(name: str, door: str, tmp_path: Path) -> None:
    value = sample(name)
    assert value != FIELDS[name].default
    assert get(DOORS[door](tmp_path, {**COMPANIONS.get(name, {}), name: value}), name) == value


@pytest.mark.req("D17", "D20")
@pytest.mark.parametrize(("name", "door"), EACH_INT_AND_DOOR)
def test_bounds_are_inside(name: str, door: str, tmp_path: Path) -> None:
    for value in (FIELDS[name].low, FIELDS[name].high):
        assert get(DOORS[door](tmp_path, {**COMPANIONS.get(name, {}), name: value}), name) == value


@pytest.mark.req("D17")
@pytest.mark.parametrize("name", FIELDS)
def test_environment_wins_over_file(name: str, tmp_path: Path) -> None:
    value = sample(name)
    default = FIELDS[name].default
    path = write_toml(tmp_path, COMPANIONS.get(name, {}) | ({} if default is None else {name: default}))
    text = value if isinstance(value, str) else toml(value)
    assert get(load(path, {VARIABLE_OF[name]: text}, with_jobs=False), name) == value


@pytest.mark.req("D17")
@pytest.mark.parametrize("door", ["environment", "constructor", "options", "file"])
@pytest.mark.parametrize("name", ["schema", "prefix"])
@pytest.mark.parametrize("value", ["a", "_", "a" * 31, "a_1", "_9"])
def test_identifiers(name: str, value: str, door: str, tmp_path: Path) -> None:
    assert get(DOORS[door](tmp_path, {name: value}), name) == value


@pytest.mark.req("D17")
def test_default_environment_is_the_process_and_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBQUEUE_WORKERS", "7")
    assert load(with_jobs=False).jobs.workers == 7


@pytest.mark.req("D17")
def test_foreign_variables_are_nobodys_business() -> None:
    assert load(None, {"PATH": "/bin", "DBQUEUEX": "1", "dbqueue_workers": "0"}, with_jobs=False).jobs.workers == 4


# -- wrong values ------------------------------------------------------------------------------------------------------


@pytest.mark.req("D17", "D20")
@pytest.mark.parametrize(("name", "door"), EACH_INT_AND_DOOR)
def test_out_of_bounds(name: str, door: str, tmp_path: Path) -> None:
    rule = FIELDS[name]
    for value in (rule.low - 1, rule.high + 1):
        with pytest.raises(ConfigError) as caught:
            DOORS[door](tmp_path, {**COMPANIONS.get(name, {}), name: value})
        in_seconds = door == "options" and name.endswith("_ms")
        low, high, shown = (x / 1000 if in_seconds else x for x in (rule.low, rule.high, value))
        message = str(caught.value)
        assert message.startswith(f"{label(door, name, tmp_path)} must be ")
        assert f"from {low:.15g} to {high:.15g} " in f"{message.replace(';', ' ')}"
        assert f"got {type(shown).__name__} {shown}. Correct it, or leave it out for the default of " in message


NAN, INF, HUGE = float("nan"), float("inf"), 10**5000
WRONG: dict[object, list[Any]] = {
    int: [True, 4.0, NAN, INF, "4", b"4", None, [4], {"a": 4}, 4j],
    bool: [1, 0, 1.0, "true", b"true", None, [True]],
    str: [True, 4, 4.0, HUGE, "", "a\0b", "x" * 5_000, "\ud800", b"public", ["public"], JobSettings()],
    "seconds": [True, NAN, INF, -INF, 1e308, HUGE, 1.00005, "60", b"60", None, [60], 4j],
}


@pytest.mark.req("D17")
@pytest.mark.parametrize("name", FIELDS)
def test_wrong_type_in_python(name: str, tmp_path: Path) -> None:
    rule = FIELDS[name]
    for value in [*WRONG[rule.kind], *([] if rule.optional or rule.kind is not str else [None])]:
        with pytest.raises(ConfigError) as caught:
            by_constructor(tmp_path, {name: value})
        assert str(caught.value).startswith(f"{label('constructor', name, tmp_path)} must be {rule.expects}; got ")


@pytest.mark.req("D17")
@pytest.mark.parametrize("option", OPTIONS)
def test_wrong_type_of_an_option(option: str) -> None:
    rule = FIELDS[OPTIONS[option]]
    for value in WRONG["seconds" if option != OPTIONS[option] else rule.kind]:
        with pytest.raises(ConfigError, match=rf"^DBQueue\({option}=\.\.\.\) must be .*; got \w+"):
            JobSettings.from_options(**{option: value})


TOML_VALUES: dict[str, object] = {
    "true": bool,
    "4": int,
    "4.0": float,
    "nan": float,
    "'4'": str,
    "[4]": list,
    "{a = 4}": dict,
    "2020-01-01": None,
    "07:32:00": None,
}


@pytest.mark.req("D17")
@pytest.mark.parametrize(
    ("name", "text"), [(n, text) for n in FIELDS for text, kind in TOML_VALUES.items() if kind is not FIELDS[n].kind]
)
def test_wrong_type_in_the_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "dbqueue.toml").write_text(f"[{OWNERS[name]}]\n{name} = {text}\n")
    with pytest.raises(ConfigError, match=rf"^dbqueue\.toml \[{OWNERS[name]}\] {name} must be .*; got \w+"):
        load(None, {}, with_jobs=False)


@pytest.mark.req("D17")
@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize(
    "text", ["", " 4", "4 ", "4\n", "+4", "04", "-0", "4_0", "4.0", "1e3", "0x10", "٤", "true", "9" * 19, "9" * 5000]
)
def test_numbers_in_the_environment(name: str, text: str) -> None:
    variable = VARIABLE_OF[name]
    with pytest.raises(ConfigError, match=f"^environment variable {variable} must be an int from .*; got str. ") as e:
        load(None, {variable: text}, with_jobs=False)
    assert e.value.__context__ is None


@pytest.mark.req("D17")
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("text", ["", "True", "TRUE", "1", "0", "yes", "on", " true", "false\n"])
def test_flags_in_the_environment(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^environment variable {VARIABLE_OF[name]} must be true or false; got str"):
        load(None, {VARIABLE_OF[name]: text}, with_jobs=False)


@pytest.mark.req("D17")
@pytest.mark.parametrize("name", ["schema", "prefix"])
@pytest.mark.parametrize("value", ["", "A", "1a", "a" * 32, "a-b", "a.b", 'a"b', "a\n", "ä", "a b", "RESERVED"])
def test_wrong_identifiers(name: str, value: str, tmp_path: Path) -> None:
    value = {"schema": "pg_x", "prefix": "sqlite_x"}[name] if value == "RESERVED" else value
    for door in ("constructor", "options", "environment"):
        with pytest.raises(ConfigError) as caught:
            DOORS[door](tmp_path, {name: value})
        assert str(caught.value).startswith(f"{label(door, name, tmp_path)} must be a str of 1 to 31 characters a-z, ")
        assert "; got str." in str(caught.value)


@pytest.mark.req("D14", "D17")
@pytest.mark.parametrize("door", DOORS)
def test_the_cap_is_not_below_the_base(door: str, tmp_path: Path) -> None:
    DOORS[door](tmp_path, {"retry_base_ms": 2_000, "retry_max_ms": 2_000})
    with pytest.raises(ConfigError) as caught:
        DOORS[door](tmp_path, {"retry_base_ms": 2_000, "retry_max_ms": 1_999})
    first, second = label(door, "retry_max_ms", tmp_path), label(door, "retry_base_ms", tmp_path)
    assert str(caught.value).startswith(f"{first} must not be below {second}; got 1999 ms and 2000 ms. ")


@pytest.mark.req("D17")
def test_the_cap_is_compared_with_defaults_and_across_sources(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^the default of retry_max_ms must not be below DBQueue\(retry_base=\.\.\.\)"
    ):
        JobSettings.from_options(retry_base=301)
    with pytest.raises(ConfigError, match=r"^DBQueue\(retry_max=\.\.\.\) .* below the default of retry_base_ms;"):
        JobSettings.from_options(retry_max=0.999)
    path = write_toml(tmp_path, {"retry_base_ms": 5_000})
    with pytest.raises(
        ConfigError, match=r"^environment variable DBQUEUE_RETRY_MAX_MS .* below .*\[jobs\] retry_base_ms"
    ):
        load(path, {"DBQUEUE_RETRY_MAX_MS": "4999"}, with_jobs=False)


@pytest.mark.req("D17")
def test_huge_numbers_are_refused_and_not_printed(tmp_path: Path) -> None:
    (tmp_path / "dbqueue.toml").write_text("[jobs]\nworkers = 0x" + "f" * 5_000)
    with pytest.raises(ConfigError, match=r"\[jobs\] workers must be .*; got int with more than 18 digits\."):
        load(None, {}, with_jobs=False)
    (tmp_path / "dbqueue.toml").write_text("[jobs]\nworkers = " + "9" * 5_000)
    with pytest.raises(ConfigError) as caught:  # more digits than Python's int() takes, which some versions let pass
        load(None, {}, with_jobs=False)
    assert len(str(caught.value)) < 300


# -- unknown names -----------------------------------------------------------------------------------------------------


def misspell(name: str) -> str:
    return name[:-1] + ("y" if name[-1] == "x" else "x")


@pytest.mark.req("D17")
@pytest.mark.parametrize("name", FIELDS)
def test_unknown_key_in_the_file(name: str, tmp_path: Path) -> None:
    table = OWNERS[name]
    wrong = misspell(name)
    (tmp_path / "dbqueue.toml").write_text(f"[{table}]\n{wrong} = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(None, {}, with_jobs=False)
    assert str(caught.value).startswith(
        f"dbqueue.toml [{table}] {wrong} is not known. The nearest known name is {name}. "
    )


@pytest.mark.req("D17")
@pytest.mark.parametrize("name", FIELDS)
def test_known_key_in_the_wrong_place(name: str, tmp_path: Path) -> None:
    other = next(table for table in TABLES if table != OWNERS[name])
    for text in (f"{name} = 1\n", f"[{other}]\n{name} = 1\n"):
        (tmp_path / "dbqueue.toml").write_text(text)
        with pytest.raises(
            ConfigError, match=rf" \[?{name}\]? stands in the wrong place\. Move it under \[{OWNERS[name]}"
        ):
            load(None, {}, with_jobs=False)


@pytest.mark.req("D17")
@pytest.mark.parametrize("variable", [*VARIABLES, CONFIG_VARIABLE])
def test_unknown_variable(variable: str) -> None:
    wrong = misspell(variable)
    with pytest.raises(ConfigError) as caught:
        load(None, {wrong: "1"}, with_jobs=False)
    expected = f"environment variable {wrong} is no known setting. The nearest known name is {variable}. "
    assert str(caught.value).startswith(expected)


@pytest.mark.req("D17")
@pytest.mark.parametrize("option", OPTIONS)
def test_unknown_option(option: str) -> None:
    wrong = misspell(option)
    with pytest.raises(ConfigError) as caught:
        JobSettings.from_options(**{wrong: 1})
    assert str(caught.value).startswith(f"DBQueue({wrong}=...) is no known option;")
    assert f"The nearest known name is {option}." in str(caught.value)


@pytest.mark.req("D17")
@pytest.mark.parametrize("name", [name for name in INTS if name in OPTION_OF and name.endswith("_ms")])
def test_milliseconds_are_no_option(name: str) -> None:
    with pytest.raises(ConfigError, match=f"durations are in seconds. The nearest known name is {OPTION_OF[name]}[.]"):
        JobSettings.from_options(**{name: 1_000})


@pytest.mark.req("D17")
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("text", "kind"), [("5", "int 5"), ("'x'", "str"), ("true", "bool"), ("[{}]", "list")])
def test_tables_are_tables(table: str, text: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "dbqueue.toml").write_text(f"{table} = {text}")
    with pytest.raises(ConfigError, match=rf"^dbqueue\.toml \[{table}\] must be a table; got {kind}\."):
        load(None, {}, with_jobs=False)


@pytest.mark.req("D17")
@pytest.mark.parametrize(("wrong", "nearest"), [("job", "jobs"), ("Jobs", "jobs"), ("run_time", "runtime")])
def test_unknown_table(wrong: str, nearest: str, tmp_path: Path) -> None:
    (tmp_path / "dbqueue.toml").write_text(f"[{wrong}]")
    with pytest.raises(ConfigError, match=rf"^dbqueue\.toml \[{wrong}\] is not known\. .* name is {nearest}\."):
        load(None, {}, with_jobs=False)


@pytest.mark.req("D17")
@pytest.mark.parametrize(
    "variable", ["DBQUEUE_SERVICE_HOST", "DBQUEUE_PORT", "DBQUEUE_WORKER_SERVICE_PORT_WEB", "DBQUEUE_PORT_80_TCP_ADDR"]
)
def test_kubernetes_variables_are_refused_with_their_own_remedy(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is no known setting .*enableServiceLinks"):
        load(None, {variable: "10.0.0.1"}, with_jobs=False)


# -- the mode ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D17")
@pytest.mark.parametrize("mode", ["api", "worker", "all"])
@pytest.mark.parametrize("with_jobs", [True, False])
def test_stated_mode(mode: str, with_jobs: bool, tmp_path: Path) -> None:
    assert load(None, {"DBQUEUE_MODE": mode}, with_jobs=with_jobs).runtime.mode == mode
    assert load(write_toml(tmp_path, {"mode": mode}), {}, with_jobs=with_jobs).runtime.mode == mode


@pytest.mark.req("D17")
def test_unstated_mode(tmp_path: Path) -> None:
    path = write_toml(tmp_path, {"shutdown_ms": 5, "workers": 2})
    assert load(path, {}, with_jobs=False).runtime == RuntimeSettings(mode="api", shutdown_ms=5)
    with pytest.raises(
        ConfigError, match=r"mode is not stated.* \[runtime\] in dbqueue\.toml, or DBQUEUE_MODE, to one"
    ):
        load(path, {}, with_jobs=True)


@pytest.mark.req("D17")
@pytest.mark.parametrize("mode", ["", "API", "api ", "workers", "all\n", "api|worker"])
def test_wrong_mode(mode: str) -> None:
    with pytest.raises(
        ConfigError, match=r"variable DBQUEUE_MODE must be one of api, worker, all; got str. Correct it."
    ):
        load(None, {"DBQUEUE_MODE": mode}, with_jobs=False)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D17")
def test_which_file(tmp_path: Path) -> None:
    for name, workers in (("dbqueue.toml", 1), ("named.toml", 2), ("given.toml", 3)):
        (tmp_path / name).write_text(f"[jobs]\nworkers = {workers}\n")
    environ = {CONFIG_VARIABLE: "named.toml"}
    assert load(None, {}, with_jobs=False).jobs.workers == 1
    assert load(None, environ, with_jobs=False).jobs.workers == 2
    assert load("given.toml", environ, with_jobs=False).jobs.workers == 3
    assert load(tmp_path / "given.toml", environ, with_jobs=False).jobs.workers == 3


@pytest.mark.req("D17")
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent.toml", "does not exist"),
        ("folder", "is a directory"),
        ("file/x.toml", "cannot be read"),
        ("loop", "cannot be read"),
        ("dangling", "does not exist"),
        ("a\0b", "cannot be read"),
    ],
)
def test_unreadable_files(name: str, says: str, explicit: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=rf"^settings file {name} {says}\. [A-Z]") as caught:
        load(name if explicit else None, {} if explicit else {CONFIG_VARIABLE: name}, with_jobs=False)
    assert caught.value.__context__ is None


@pytest.mark.req("D17")
def test_forbidden_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:  # root may read every file, so no mode bits can show this
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "dbqueue.toml").touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"^settings file dbqueue\.toml may not be read by this user\."):
        load(None, {}, with_jobs=False)


@pytest.mark.req("D17")
def test_default_file_counts_as_soon_as_something_is_there(tmp_path: Path) -> None:
    (tmp_path / "dbqueue.toml").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"dbqueue\.toml does not exist"):
        load(None, {}, with_jobs=False)
    with pytest.raises(ConfigError, match=r"settings file \(an empty path\) "):
        load(None, {CONFIG_VARIABLE: ""}, with_jobs=False)


@pytest.mark.req("D17")
@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        (f'[jobs]\nurl = "{URL}\n', 2, None),
        (f"[jobs]\nurl = {URL}\n", 2, 7),
        (f"[jobs]\nurl = '{URL}'\nworkers = \n", 3, 11),
        (f"[jobs]\nurl = '{URL}'\nworkers = 4\nworkers = 5", 4, None),
        (f"[jobs]\nurl = '{URL}'\n\nx = [1,", 4, 8),  # the end of the document
        (f"[jobs]\nurl = '''{URL}\n", 3, 1),
        (f"[jobs]\nurl = '{URL}'\n[jobs]", 3, None),
        (f"[jobs]\nurl = '{URL}'\nx = 2020-13-01", 3, None),
    ],
)
def test_malformed_toml(text: str, line: int, column: int | None, tmp_path: Path) -> None:
    (tmp_path / "dbqueue.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(None, {}, with_jobs=False)
    message = str(caught.value)
    assert message.startswith(f"dbqueue.toml is not valid TOML at line {line}, column ")
    assert column is None or f", column {column}. " in message
    assert_no_secret(caught.value)


@pytest.mark.req("D17")
def test_deeply_nested_toml(tmp_path: Path) -> None:
    (tmp_path / "dbqueue.toml").write_text("x = " + "[" * 200_000)
    with pytest.raises(ConfigError, match=r"^dbqueue\.toml is not valid TOML"):
        load(None, {}, with_jobs=False)


@pytest.mark.req("D17")
@pytest.mark.parametrize(
    "data", [b"\xff", URL.encode() + b"\xe4", "[jobs]".encode("utf-16"), b"\xef\xbb\xbf[jobs]", b"\xed\xa0\x80"]
)
def test_other_encodings(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "dbqueue.toml").write_bytes(data)
    with pytest.raises(ConfigError, match=r"^settings file dbqueue\.toml is not UTF-8 without a byte order") as caught:
        load(None, {}, with_jobs=False)
    assert_no_secret(caught.value)


@pytest.mark.req("D17")
def test_empty_file_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "dbqueue.toml"
    path.write_bytes(b"")
    assert load(None, {}, with_jobs=False).jobs == JobSettings()
    path.write_bytes(b"[jobs]\r\nworkers = 9\r\n")
    assert load(None, {}, with_jobs=False).jobs.workers == 9


# -- secrets -----------------------------------------------------------------------------------------------------------


def assert_no_secret(error: BaseException) -> None:
    """Nothing that a log or an error reporter reaches from the exception contains the password."""
    assert error.__cause__ is None
    assert error.__context__ is None
    assert SECRET not in f"{error} {error!r} {vars(error)}"


@pytest.mark.req("D17", "D10")
@pytest.mark.parametrize("name", FIELDS)
def test_a_password_in_any_field_is_not_shown(name: str, tmp_path: Path) -> None:
    wrong = URL + "\x01" if FIELDS[name].secret else URL
    attempts: list[Callable[[], object]] = [
        lambda: by_environment(tmp_path, {name: wrong}),
        lambda: by_constructor(tmp_path, {name: wrong}),
    ]
    if not FIELDS[name].secret:  # TOML has no control characters
        attempts.append(lambda: by_file(tmp_path, {name: wrong}))
    if name in OPTION_OF:
        attempts.append(lambda: JobSettings.from_options(**{OPTION_OF[name]: wrong}))
    for attempt in attempts:
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert_no_secret(caught.value)
        assert "got str" in str(caught.value)


@pytest.mark.req("D17", "D10")
def test_a_password_in_the_wrong_place_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key.toml").write_text(f'[jobs]\n"{URL}" = 1')
    (tmp_path / "table.toml").write_text(f'["{URL}"]')
    attempts: list[Callable[[], object]] = [
        lambda: load("key.toml", {}, with_jobs=False),
        lambda: load("table.toml", {}, with_jobs=False),
        lambda: load(None, {f"DBQUEUE_{URL}": ""}, with_jobs=False),
        lambda: load(None, {CONFIG_VARIABLE: URL}, with_jobs=False),
        lambda: load(URL, {}, with_jobs=False),
        lambda: JobSettings.from_options(**{URL: 1}),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert_no_secret(caught.value)


@pytest.mark.req("D17", "D10")
@pytest.mark.parametrize(
    "url",
    [
        URL,
        f"postgresql+psycopg://app:{SECRET}@/db",
        f"postgresql://app:x/{SECRET}@db/shop",
        f"postgresql://app:x@{SECRET}@db/shop",
        f"postgresql://db/shop?user=app&password={SECRET}",
        f"host=db password={SECRET}",
        f"postgresql:/app:{SECRET}@db",
        f"app:{SECRET}://",
        SECRET,
    ],
)
def test_repr_masks_urls(url: str) -> None:
    jobs = JobSettings(url=url, listen_url=url)
    everything = Settings(runtime=RuntimeSettings(), jobs=jobs)
    for text in (repr(jobs), str(jobs), f"{jobs}", repr(everything), f"{everything}", mask_url(url)):
        assert SECRET not in text
        assert "***" in text
    assert jobs.url == jobs.listen_url == url


@pytest.mark.req("D17")
def test_repr_shows_the_rest() -> None:
    text = repr(JobSettings(url=URL, workers=3))
    assert text.startswith("JobSettings(url='postgresql://***', listen_url=None, schema='public', ")
    assert "workers=3," in text


@pytest.mark.req("D17")
def test_settings_are_frozen_values() -> None:
    for value in (JobSettings(), RuntimeSettings(), load(None, {}, with_jobs=False)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)
        assert pickle.loads(pickle.dumps(value)) == value
        assert hash(value) == hash(dataclasses.replace(value))
    with pytest.raises(ConfigError):
        dataclasses.replace(JobSettings(), workers=0)


# -- seconds -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("D17")
@given(ms=st.integers(FIELDS["history_ms"].low, FIELDS["history_ms"].high))
def test_every_whole_millisecond_is_exact(ms: int) -> None:
    assert JobSettings.from_options(history=ms / 1000).history_ms == ms


@pytest.mark.req("D17")
@given(ms=st.integers(100, 7_199_999), share=st.floats(0.001, 0.999))
def test_every_fraction_of_a_millisecond_is_refused(ms: int, share: float) -> None:
    with pytest.raises(ConfigError, match=r"^DBQueue\(lease=\.\.\.\) must be .* in whole milliseconds; got float "):
        JobSettings.from_options(lease=(ms + share) / 1000)


@pytest.mark.req("D17")
def test_computed_floats_are_taken_for_what_they_mean() -> None:
    assert JobSettings.from_options(lease=0.1 + 0.2).lease_ms == 300
    assert JobSettings.from_options(lease=1.001 * 3).lease_ms == 3_003
    assert JobSettings.from_options(lease=60, poll=0.25, history=0.0) == JobSettings(history_ms=0)
    assert all(type(JobSettings.from_options(lease=v).lease_ms) is int for v in (1, 1.0))


# -- targets -----------------------------------------------------------------------------------------------------------


def policy(**changes: Any) -> int:
    values: dict[str, Any] = {"max_attempts": 5, "timeout": 30, "priority": 0, "on_crash": "retry", **changes}
    return check_target_policy("mail.send", **values)


@pytest.mark.req("D1", "D20")
@pytest.mark.parametrize(
    ("seconds", "ms"),
    [(0.001, 1), (0.0015 + 0.0005, 2), (1, 1_000), (2.5, 2_500), (3600, 3_600_000), (3600.0, 3_600_000)],
)
def test_timeout(seconds: float, ms: int) -> None:
    assert policy(timeout=seconds) == ms
    assert type(policy(timeout=seconds)) is int


@pytest.mark.req("D1", "D20")
@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        *(("max_attempts", value) for value in (0, 101, -1, True, 1.0, "1", None, [1])),
        *(("timeout", value) for value in (0, -1, 0.0, -0.0, 0.0005, 0.0015, 3600.001, 3601, 1e308)),
        *(("timeout", value) for value in (NAN, INF, -INF, True, "30", None, [30], 1j)),
        *(("priority", value) for value in (-1, 10, True, 1.0, "1", None)),
        *(("on_crash", value) for value in ("", "Retry", "retry ", "dead", 0, OnCrash.RETRY, True, None)),
        *(pytest.param(parameter, HUGE, id=f"{parameter}-huge") for parameter in POLICY),
    ],
)
def test_policy_refuses(parameter: str, value: object) -> None:
    with pytest.raises(InvalidTarget, match=f"^target 'mail.send': {parameter} must be .*; got .*[.] Correct it[.]$"):
        policy(**{parameter: value})


@pytest.mark.req("D1")
@pytest.mark.parametrize(
    ("parameter", "values"),
    [("max_attempts", (1, 100)), ("priority", (0, 9)), ("on_crash", [member.label for member in OnCrash])],
)
def test_policy_accepts(parameter: str, values: tuple[object, ...]) -> None:
    assert [policy(**{parameter: value}) for value in values] == [30_000] * len(values)


@pytest.mark.req("D1")
def test_policy_defaults() -> None:
    assert check_target_policy("t", max_attempts=1, timeout=1) == 1_000
    with pytest.raises(TypeError):
        check_target_policy("t", timeout=1)  # type: ignore[call-arg]


@pytest.mark.req("D18")
def test_lease_must_exceed_timeouts_on_sqlite() -> None:
    check_lease_rule("sqlite", 60_000, {})
    check_lease_rule("sqlite", 60_000, {"a": 59_999})
    for timeout in (60_000, 60_001):
        with pytest.raises(ConfigError) as caught:
            check_lease_rule("sqlite", 60_000, {"fine": 59_999, "a": timeout})
        message = str(caught.value)
        assert message.startswith("lease_ms is 60000, but on SQLite it must exceed every target's timeout; ")
        assert f"does not for 'a' ({timeout} ms). Set lease_ms " in message
        assert f"above {timeout} ms" in message


@pytest.mark.req("D18")
@pytest.mark.parametrize("dialect", ["postgresql", "mysql"])
def test_other_databases_may_have_a_shorter_lease(dialect: Any) -> None:
    check_lease_rule(dialect, 100, {"a": 3_600_000})


@pytest.mark.req("D18")
def test_lease_rule_names_the_five_longest() -> None:
    targets = {f"t{number}": 1_000 + number for number in range(8)}
    with pytest.raises(ConfigError) as caught:
        check_lease_rule("sqlite", 1_000, targets)
    message = str(caught.value)
    assert [name for name in targets if repr(name) in message] == ["t3", "t4", "t5", "t6", "t7"]
    assert "and 3 more" in message
    assert "above 1007 ms" in message
    with pytest.raises(ConfigError) as caught:
        check_lease_rule("sqlite", 1_000, dict(list(targets.items())[:5]))
    assert "more" not in str(caught.value)


@pytest.mark.req("D18")
def test_lease_rule_knows_its_dialects() -> None:
    with pytest.raises(InvalidArgument, match="dialect must be one of sqlite, postgresql, mysql; got str"):
        check_lease_rule("sqlite3", 1_000, {})  # type: ignore[arg-type]


@pytest.mark.req("D18", "D20")
def test_the_greatest_lease_holds_every_legal_timeout() -> None:
    check_lease_rule("sqlite", FIELDS["lease_ms"].high, {"a": POLICY["timeout"].high})


# -- names and keys ----------------------------------------------------------------------------------------------------

GOOD_NAMES = [
    *("celery", "high-priority", "celery@host.dq", "c.q@abc", "celery@host.celery.pidbox", "a.b", "a_b", "A_B", "a b"),
    *("x" * 200, "x", "очередь", "q';--", 'q"x', "%", "a/b", "tasks:high", "a+b", "#", "*", "dbqueue", "dbqueue_x"),
    *("Dbqueue.x", "\U0001f600", "add every 30 seconds", "amq.gen-JzTY20BRgKO", "bcast.0d3e"),
]


@pytest.mark.req("A1")
@pytest.mark.parametrize("name", GOOD_NAMES)
@pytest.mark.parametrize("kind", ["queue", "target", "schedule", "lock", "worker"])
def test_names(kind: Any, name: str) -> None:
    assert check_name(kind, name) == name


@pytest.mark.req("A1")
@pytest.mark.parametrize(
    "name",
    [
        *("", "x" * 201, " a", "a ", "\ta", "a\n", "\xa0a", "\u3000", " ", "a\0b", "a\nb", "a\x7fb", "a\x85b"),
        *("a\u2028b", "a\u2029b", "a\ud800b", None, 1, True, b"celery", ["celery"]),
    ],
)
def test_wrong_names(name: object) -> None:
    with pytest.raises(InvalidName, match=r"^queue name ") as caught:
        check_name("queue", name, allow_reserved=True)
    message = str(caught.value)
    assert message.isprintable(), "the message breaks no log and can be encoded"
    assert len(message) < 200


@pytest.mark.req("A1")
def test_reserved_names() -> None:
    with pytest.raises(ReservedName, match=r"^lock name 'dbqueue.beat' begins with 'dbqueue.'"):
        check_name("lock", "dbqueue.beat")
    assert check_name("lock", "dbqueue.beat", allow_reserved=True) == "dbqueue.beat"
    with pytest.raises(ReservedName):
        check_name("queue", "dbqueue.")


@pytest.mark.req("A1")
@given(st.text(max_size=210))
def test_any_text_is_a_name_or_refused(name: str) -> None:
    legal = name.strip() == name != "" and len(name) <= 200 and not name.startswith("dbqueue.")
    if legal and all(unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp") for character in name):
        assert check_name("queue", name) == name
        name.encode()
    else:
        with pytest.raises(InvalidName) as caught:
            check_name("queue", name)
        assert str(caught.value).isprintable()


@pytest.mark.req("D7")
@pytest.mark.parametrize("key", ["a", "x" * 200, " a ", "\n", "\U0001f600" * 200, "article:7", "\x01", "dbqueue.x"])
def test_keys(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.req("D7")
@pytest.mark.parametrize(
    "key", ["", "s3cr3t" * 34, "s3cr3t\0", "\ud800s3cr3t", "s3cr3t\udfff", None, 4711, True, b"s3cr3t"]
)
def test_wrong_keys(key: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^key must ") as caught:
        check_key(key)
    assert not isinstance(caught.value, InvalidName)
    assert "s3cr3t" not in str(caught.value)
    assert "4711" not in str(caught.value)


@pytest.mark.req("D17")
def test_every_error_is_a_queue_error() -> None:
    for error in (ConfigError, InvalidTarget, InvalidArgument):
        assert issubclass(error, QueueError)
    assert rules.MAX_NAME * 4 * 2 < 2_704, "an index entry of (target, key) fits PostgreSQL's limit"
