"""Settings, the bounds of a target's policy, and the rule for names: everything that is refused before anything starts.

One table drives it all: every field below carries its ``Rule`` (kind, default, bounds), and the TOML reader, the
environment reader, ``DBQueue(**options)``, the constructors and the tests derive from it. Nothing is guessed or
converted: ``"4"`` in a file is no int, ``true`` is no int, and a name that nobody knows stops the program (D17).

Three spellings of one field, and an error uses the one that the user wrote:

    dbqueue.toml [jobs] lease_ms = 60000        whole milliseconds
    environment variable DBQUEUE_LEASE_MS=60000 the same; it wins over the file
    DBQueue(url, lease=60)                      seconds, as Python's own functions take them

A message shows numbers, never strings: a string may be a password. For the same reason no error here has a cause or a
context: a TOML or Unicode error of Python carries the whole document with it.

Over 400 lines, because the table, its three readers and the checks that share its ``Rule`` are read side by side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from dbqueue.errors import ConfigError, InvalidArgument, InvalidName, InvalidTarget, QueueError, ReservedName

Mode = Literal["api", "worker", "all"]
NameKind = Literal["queue", "target", "schedule", "lock", "outbox", "worker"]
Dialect = Literal["sqlite", "postgresql", "mysql"]

DEFAULT_FILE = "dbqueue.toml"
CONFIG_VARIABLE = "DBQUEUE_CONFIG"
RESERVED_PREFIX = "dbqueue."
MAX_NAME = 200
"""Characters in a name or key. It keeps an index entry of (target, key) under PostgreSQL's 2,704 bytes, even where each
character takes four bytes, and under MySQL's 3,072."""

# in milliseconds
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000

# -- the rule of one value ---------------------------------------------------------------------------------------------


def describe(value: object) -> str:
    """The kind of ``value``, and the value itself only where it is a number."""
    kind = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return kind
    if isinstance(value, int) and abs(value) >= 10**18:
        # str() of an int with more than 4,300 digits raises, and TOML's 0x... may have them.
        return f"{kind} with more than 18 digits"
    return f"{kind} {value}"


def mask_url(url: str) -> str:
    """``postgresql://***``. Nothing behind the scheme is shown: a password may also stand in the query, and one with an
    unescaped ``/`` or ``@`` moves every border that a URL parser would find."""
    scheme, separator, _ = url.partition("://")
    return f"{scheme}://***" if separator and re.fullmatch("[a-z][a-z0-9+]{0,30}", scheme) else "***"


@dataclass(frozen=True)
class Rule:
    """What one value must be. ``low`` and ``high`` bound an int, ``pattern`` a str."""

    kind: type[object]
    expects: str
    default: Any = None
    low: int = 0
    high: int = 0
    pattern: str = ""
    optional: bool = False
    secret: bool = False

    def check(self, label: str, value: object, error: type[QueueError] = ConfigError) -> None:
        """Raise ``error`` unless ``value`` keeps the rule; ``label`` names it as the user wrote it."""
        if not (value is None and self.optional) and not self._holds(value):
            raise error(f"{label} must be {self.expects}; got {describe(value)}. {self._remedy(self.default)}")

    def check_seconds(self, label: str, value: object, error: type[QueueError] = ConfigError) -> int:
        """The whole milliseconds of a duration that is written in seconds (int or float)."""
        ms = _whole_ms(value)
        if ms is not None and self._holds(ms):
            return ms
        bounds = f"from {self.low / SECOND:.15g} to {self.high / SECOND:.15g} seconds, in whole milliseconds"
        default = None if self.default is None else self.default / SECOND
        raise error(f"{label} must be a number {bounds}; got {describe(value)}. {self._remedy(default)}")

    def read(self, text: str) -> object:
        """The value of an environment variable; text of another form stays text, which ``check`` then refuses."""
        if self.kind is bool:
            return {"true": True, "false": False}.get(text, text)
        # No sign +, blanks, underscores or leading zeros: TOML has none of them either. 18 digits exceed every bound.
        return int(text) if self.kind is int and re.fullmatch("0|-?[1-9][0-9]{0,17}", text) else text

    def _holds(self, value: object) -> bool:
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if isinstance(value, int):
            return self.kind is int and self.low <= value <= self.high
        return self.kind is str and isinstance(value, str) and re.fullmatch(self.pattern, value) is not None

    def _remedy(self, default: object) -> str:
        if isinstance(default, bool):
            default = str(default).lower()
        elif isinstance(default, float):
            default = f"{default:.15g}"
        return "Correct it." if default is None else f"Correct it, or leave it out for the default of {default}."


def _whole_ms(seconds: object) -> int | None:
    """None for anything but a number of whole milliseconds: a fraction of one is refused, not rounded.

    A computed float (0.1 + 0.2) is an ulp or two beside the number that was meant; a real fraction is thousands away.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        return None
    if isinstance(seconds, int):
        return seconds * SECOND
    if not abs(seconds) < 1e12:  # NaN and infinity too; far above every bound
        return None
    ms = round(seconds * SECOND)
    return ms if abs(ms / SECOND - seconds) <= 4 * math.ulp(seconds) else None


# -- the table of fields -----------------------------------------------------------------------------------------------


def _whole(default: int | None, low: int, high: int, unit: str = "") -> Rule:
    return Rule(int, f"an int from {low} to {high}{unit}", default, low, high)


def _ms(default: int | None, low: int, high: int) -> Rule:
    return _whole(default, low, high, " (milliseconds)")


def _identifier(default: str, reserved: str) -> Rule:
    # The reserved beginnings are the databases' own; CREATE would refuse them, but only after the start.
    expects = f"a str of 1 to 31 characters a-z, 0-9 and _ that does not begin with a digit or {reserved}"
    return Rule(str, expects, default, pattern=f"(?!{reserved})[a-z_][a-z0-9_]{{0,30}}")


def _choice(*choices: str, optional: bool = False) -> Rule:
    return Rule(str, f"one of {', '.join(choices)}", pattern="|".join(choices), optional=optional)


_FLAG_ON = Rule(bool, "true or false", True)
_FLAG_OFF = Rule(bool, "true or false", False)
# Lone surrogates: what Python makes of environment bytes that are not UTF-8. No driver can send them.
_URL = Rule(
    str,
    "a database URL of 1 to 4096 characters without control characters",
    pattern=r"[^\x00-\x1f\x7f\ud800-\udfff]{1,4096}",
    optional=True,
    secret=True,
)


def _field(rule: Rule) -> Any:
    return dataclasses.field(default=rule.default, metadata={"rule": rule})


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Which part of the program this process runs, and how long it may take to stop (D17, D19)."""

    mode: Mode | None = _field(_choice(*get_args(Mode), optional=True))
    """None = not stated; ``load`` never returns None."""
    shutdown_ms: int = _field(_ms(30 * SECOND, 0, HOUR))

    def __post_init__(self) -> None:
        _check_constructed(self)


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Where the jobs are and how they are worked on (D17, D20). Its repr hides the URLs."""

    url: str | None = _field(_URL)
    listen_url: str | None = _field(_URL)
    """A direct URL for LISTEN, where ``url`` leads to a pooler such as PgBouncer, which loses notifications."""
    schema: str = _field(_identifier("public", "pg_"))
    prefix: str = _field(_identifier("dbqueue_", "sqlite_"))
    workers: int = _field(_whole(4, 1, 1_000))
    poll_ms: int = _field(_ms(250, 10, MINUTE))
    lease_ms: int = _field(_ms(MINUTE, 100, 2 * HOUR))
    retry_base_ms: int = _field(_ms(SECOND, 1, HOUR))
    retry_max_ms: int = _field(_ms(5 * MINUTE, 1, 7 * DAY))
    """Not below ``retry_base_ms``."""
    history_ms: int = _field(_ms(HOUR, 0, 3_650 * DAY))
    """How long succeeded jobs stay in the history; 0 = they are not kept at all."""
    keep_payload: bool = _field(_FLAG_OFF)
    """The history of a succeeded job contains its payload."""
    auto_migrate: bool = _field(_FLAG_ON)
    notify: bool = _field(_FLAG_ON)

    def __post_init__(self) -> None:
        _check_constructed(self)

    @classmethod
    def from_options(cls, **options: object) -> JobSettings:
        """The keywords of ``DBQueue(url, **options)``: durations in seconds, named without ``_ms``."""
        given = {}
        for option, value in options.items():
            label = f"DBQueue({_shown(option)}=...)"
            if option not in OPTIONS:
                raise _unknown(f"{label} is no known option; durations are in seconds", option, OPTIONS)
            name = OPTIONS[option]
            given[name] = _Given(label, value if name == option else _rules(cls)[name].check_seconds(label, value))
        return _build(cls, given)

    def __repr__(self) -> str:
        shown = []
        for name, rule in _rules(type(self)).items():
            value = getattr(self, name)
            shown.append(f"{name}={mask_url(value) if rule.secret and value is not None else value!r}")
        return f"JobSettings({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a process: made once, by ``load``, before anything listens, migrates or claims."""

    runtime: RuntimeSettings
    jobs: JobSettings


_T = TypeVar("_T", RuntimeSettings, JobSettings)


def _rules(cls: type[RuntimeSettings] | type[JobSettings]) -> dict[str, Rule]:
    return {field.name: field.metadata["rule"] for field in dataclasses.fields(cls)}


TABLES: dict[str, dict[str, Rule]] = {"runtime": _rules(RuntimeSettings), "jobs": _rules(JobSettings)}
"""The tables of dbqueue.toml and their fields. A field name is in one table only: that is what names its variable."""
OWNERS = {name: table for table, rules in TABLES.items() for name in rules}
VARIABLES = {f"DBQUEUE_{name.upper()}": name for name in OWNERS}
OPTIONS = {name.removesuffix("_ms"): name for name in TABLES["jobs"]}


class _Given(NamedTuple):
    """A value that the user gave, and where: the words that an error about it begins with."""

    label: str
    value: Any


def _build(cls: type[_T], given: Mapping[str, _Given]) -> _T:
    """Check what was given, under the user's own names for it, before the constructor checks it under its names."""
    rules = _rules(cls)
    full = {name: given.get(name, _Given(f"the default of {name}", rule.default)) for name, rule in rules.items()}
    _check(rules, full)
    return cls(**{name: item.value for name, item in full.items()})


def _check_constructed(settings: RuntimeSettings | JobSettings) -> None:
    rules, owner = _rules(type(settings)), type(settings).__name__
    _check(rules, {name: _Given(f"{owner}({name}=...)", getattr(settings, name)) for name in rules})


def _check(rules: Mapping[str, Rule], full: Mapping[str, _Given]) -> None:
    for name, rule in rules.items():
        rule.check(full[name].label, full[name].value)
    if "retry_max_ms" in full:  # the only rule between two fields
        maximum, base = full["retry_max_ms"], full["retry_base_ms"]
        if maximum.value < base.value:
            raise ConfigError(
                f"{maximum.label} must not be below {base.label}; got {maximum.value} ms and {base.value} ms. "
                "Raise the first or lower the second."
            )


def _unknown(problem: str, name: str, known: Iterable[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.0)[0]
    return ConfigError(f"{problem}. The nearest known name is {nearest}. Correct it or take it out.")


def _misplaced(label: str, name: str, known: Iterable[str]) -> ConfigError:
    """A name that dbqueue.toml does not know in this place."""
    if name in OWNERS:
        return ConfigError(f"{label} stands in the wrong place. Move it under [{OWNERS[name]}].")
    return _unknown(f"{label} is not known", name, known)


def _shown(name: str) -> str:
    """A name that is no plain word is not repeated: who mixes up key and value writes a URL here."""
    return name if re.fullmatch("[A-Za-z0-9_-]{1,60}", name) else "(a name that is not shown)"


# -- file and environment ----------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ, *, with_jobs: bool
) -> Settings:
    """Read ``dbqueue.toml``, then the environment, which wins. Call it once.

    The file is ``path``, else the one of ``DBQUEUE_CONFIG``: these must exist; else ``./dbqueue.toml`` if there is one.
    A program without jobs may leave the mode out and gets ``api``; one ``with_jobs`` states it. Raises ``ConfigError``.
    """
    for variable in environ:
        if variable.startswith("DBQUEUE_") and variable not in VARIABLES and variable != CONFIG_VARIABLE:
            raise _unknown_variable(variable)
    given = _read_file(path, environ)
    for variable, name in VARIABLES.items():
        if variable in environ:
            value = TABLES[OWNERS[name]][name].read(environ[variable])
            given[name] = _Given(f"environment variable {variable}", value)
    runtime = _build(RuntimeSettings, given)
    if runtime.mode is None:
        if with_jobs:
            raise ConfigError(
                "the runtime mode is not stated, and a program with jobs states it. "
                f"Set mode under [runtime] in {DEFAULT_FILE}, or DBQUEUE_MODE, to one of {', '.join(get_args(Mode))}."
            )
        runtime = dataclasses.replace(runtime, mode="api")
    return Settings(runtime=runtime, jobs=_build(JobSettings, given))


def _unknown_variable(variable: str) -> ConfigError:
    problem = f"environment variable {_shown(variable)} is no known setting"
    if re.search(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_[A-Z]+.*)?$", variable):
        # Kubernetes gives every container DBQUEUE_SERVICE_HOST, DBQUEUE_PORT ... as soon as a Service is named dbqueue.
        problem += " (if Kubernetes made it for a Service: enableServiceLinks: false in the pod's spec)"
    return _unknown(problem, variable, [*VARIABLES, CONFIG_VARIABLE])


def _read_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> dict[str, _Given]:
    if path is not None:
        file = os.fspath(path)
    elif CONFIG_VARIABLE in environ:
        file = environ[CONFIG_VARIABLE]
    elif os.path.lexists(DEFAULT_FILE):  # a dangling link is a mistake, not an absent file
        file = DEFAULT_FILE
    else:
        return {}
    shown = mask_url(file) if "://" in file else file  # who swaps DBQUEUE_CONFIG and DBQUEUE_URL
    given = {}
    for table, content in _parse(shown, _read_text(file, shown)).items():
        label = f"{shown} [{_shown(table)}]"
        if table not in TABLES:
            raise _misplaced(label, table, TABLES)
        if not isinstance(content, dict):
            raise ConfigError(f"{label} must be a table; got {describe(content)}. Write the line [{table}].")
        for key, value in content.items():
            if key not in TABLES[table]:
                raise _misplaced(f"{label} {_shown(key)}", key, TABLES[table])
            given[key] = _Given(f"{label} {key}", value)
    return given


def _read_text(file: str, shown: str) -> str:
    data, text, problem = b"", None, ""
    try:
        data = Path(file).read_bytes()
    except FileNotFoundError:
        problem = "does not exist. Correct the path, or create the file"
    except IsADirectoryError:
        problem = "is a directory. Name the file in it"
    except PermissionError:
        problem = "may not be read by this user. Change its mode or owner"
    except (OSError, ValueError):  # ValueError: a path with a NUL character
        problem = "cannot be read. Correct the path"
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode("utf-8")
    if text is None or text.startswith("\ufeff"):
        problem = "is not UTF-8 without a byte order mark. Save it as that"
    if text is None or problem:
        raise ConfigError(f"settings file {shown or '(an empty path)'} {problem}.")
    return text


def _parse(shown: str, text: str) -> dict[str, Any]:
    # tomllib names the end of the document by words; a person looks for a line there too.
    line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
    problem = f"{shown} is not valid TOML"
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)$", str(error))
        if place is not None:
            line, column = int(place[1]), int(place[2])
        problem += f" at line {line}, column {column}"
    except (ValueError, RecursionError):
        problem += ": a number has too many digits, or a value is nested too deeply"
    raise ConfigError(f"{problem}. Correct the file; a str stands in quotes.")


# -- targets -----------------------------------------------------------------------------------------------------------

POLICY: dict[str, Rule] = {
    "max_attempts": _whole(None, 1, 100),
    "timeout": _ms(None, 1, HOUR),
    "priority": _whole(None, 0, 9),
    "on_crash": _choice("retry", "unknown", "fail"),
}
"""The parameters of ``@queue.job`` (D1, D20)."""


def check_target_policy(
    target: str, *, max_attempts: object, timeout: object, priority: object = 0, on_crash: object = "retry"
) -> int:
    """The timeout in whole milliseconds (it is declared in seconds), or ``InvalidTarget`` with target and parameter."""
    values = {"max_attempts": max_attempts, "priority": priority, "on_crash": on_crash}
    for parameter, value in values.items():
        POLICY[parameter].check(f"target {target!r}: {parameter}", value, InvalidTarget)
    return POLICY["timeout"].check_seconds(f"target {target!r}: timeout", timeout, InvalidTarget)


def check_lease_rule(dialect: Dialect, lease_ms: int, targets: Mapping[str, int]) -> None:
    """D18: on SQLite the lease must exceed the timeout (ms) of every native target.

    SQLite has one writer: a renewal may wait behind other writers for as long as they like, so a job must be able to
    end within the lease of its claim. PostgreSQL and MySQL renew beside other writers and may have a shorter lease.
    """
    if dialect not in get_args(Dialect):
        raise InvalidArgument(f"dialect must be one of {', '.join(get_args(Dialect))}; got {describe(dialect)}.")
    late = sorted((-timeout, target) for target, timeout in targets.items() if timeout >= lease_ms)
    if dialect != "sqlite" or not late:
        return
    named = ", ".join(f"{target!r} ({-timeout} ms)" for timeout, target in late[:5])
    more = f" and {len(late) - 5} more" if len(late) > 5 else ""
    raise ConfigError(
        f"lease_ms is {lease_ms}, but on SQLite it must exceed every target's timeout; it does not for {named}{more}. "
        f"Set lease_ms (or DBQueue(lease=...), in seconds) above {-late[0][0]} ms, or lower these timeouts."
    )


# -- names and keys ----------------------------------------------------------------------------------------------------

# Control characters and line separators, which break every listing, and lone surrogates, which no driver can send.
_BARRED = frozenset({"Cc", "Cs", "Zl", "Zp"})


def check_name(kind: NameKind, value: object, *, allow_reserved: bool = False) -> str:
    """A1's one rule for all names: 1 to 200 characters, no control characters, no blank at an end, no reserved prefix.

    A name is data (bound parameters, a row each), so Celery's users keep every name they have: ``celery``,
    ``high-priority``, ``celery@host.celery.pidbox``, ``a b``, ``очередь``, ``q';--``.
    """
    if not isinstance(value, str):
        raise InvalidName(f"{kind} name must be a str; got {describe(value)}.")
    if not 1 <= len(value) <= MAX_NAME:
        raise InvalidName(f"{kind} name must have 1 to {MAX_NAME} characters; it has {len(value)}. Shorten or fill it.")
    if value != value.strip() or any(unicodedata.category(character) in _BARRED for character in value):
        raise InvalidName(
            f"{kind} name {value!r} must not begin or end with a blank or contain control characters. Take them out."
        )
    if value.startswith(RESERVED_PREFIX) and not allow_reserved:
        raise ReservedName(
            f"{kind} name {value!r} begins with {RESERVED_PREFIX!r}, which dbqueue keeps for itself. Choose another."
        )
    return value


def check_key(value: object) -> str:
    """A dedupe key: a str of 1 to 200 characters that every database can store.

    It may be personal data, so no error shows it; not even ``describe`` does, as a number may be a telephone's.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"key must be a str; got {type(value).__name__}.")
    if not 1 <= len(value) <= MAX_NAME:
        raise InvalidArgument(f"key must have 1 to {MAX_NAME} characters; it has {len(value)}. Hash a longer one.")
    if re.search("[\x00\ud800-\udfff]", value):
        raise InvalidArgument("key must not contain NUL characters or lone surrogates. Encode it, as hex for instance.")
    return value
