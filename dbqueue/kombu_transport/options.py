"""What the broker URL and ``broker_transport_options`` say.

Options of ours may stand in the URL's query or in the transport options, which win; everything else of the query goes to the
driver. What other transports know is ignored without a word, so that a changed broker URL is enough; an unknown name is told
once; a wrong value is refused, naming the option.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from dbqueue import settings as config
from dbqueue.errors import ConfigError
from dbqueue.settings import JobSettings, describe

log = logging.getLogger("dbqueue.kombu")

MOST_LEASE = 60.0
"""An inherited visibility_timeout is hours, as nothing renews it there; here it is only how long a killed worker's messages wait."""

_SETTINGS = frozenset({"lease", "poll", "history", "schema", "prefix", "notify", "listen_url", "auto_migrate"})
_OWN = _SETTINGS | {"eta_lead", "priority_order", "join", "delivery_limit"}
_KOMBU = frozenset(
    {
        "max_retries", "interval_start", "interval_step", "interval_max", "connect_retries_timeout", "errback", "callback",
        "polling_interval", "body_encoding", "visibility_timeout",
    }
)  # fmt: skip
# Of the transports that people come from: Redis, RabbitMQ, SQS, SQLAlchemy.
_FOREIGN = frozenset(
    {
        "sep", "ack_emulation", "unacked_key", "unacked_index_key", "unacked_mutex_key", "unacked_mutex_expire",
        "unacked_restore_limit", "unacked_restore_interval", "unacked_restore_throttle", "fanout_prefix", "fanout_patterns",
        "global_keyprefix", "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options",
        "queue_order_strategy", "max_connections", "health_check_interval", "retry_on_timeout", "retry_on_error", "priority_steps",
        "client_name", "master_name", "min_other_sentinels", "sentinel_kwargs", "sentinel_fanout_compat", "credential_provider",
        "confirm_publish", "read_timeout", "write_timeout", "heartbeat", "login_method", "client_properties", "frame_max",
        "channel_max", "native_delayed_delivery", "confirm_timeout", "max_retries_on_connect", "region", "queue_name_prefix",
        "predefined_queues", "wait_time_seconds", "echo", "pool_size", "pool_recycle", "pool_pre_ping", "max_overflow",
        "isolation_level", "connect_args", "queue_tablename", "message_tablename",
    }
)  # fmt: skip
# What a queue may be declared with and does not get here.
_UNMET = frozenset(
    {"x-max-length", "x-max-length-bytes", "x-overflow", "x-dead-letter-exchange", "x-dead-letter-routing-key"}
)
_told: set[str] = set()


@dataclass(frozen=True)
class Options:
    """Everything that makes one station differ from another."""

    settings: JobSettings
    eta_lead: float = 15.0
    """Seconds before its ETA at which a message is handed to a worker, whose timer does the rest."""
    redis_priorities: bool = False
    """0 is the best priority, not 9."""
    join: str | None = None
    """``"django:default"``: what is published in a transaction of that alias joins it, as inside of ``using``."""
    delivery_limit: int = 0
    """A message that is put back after so many deliveries is dead; 0: it may be put back for ever."""


def read(url: str, given: Mapping[str, Any], ssl_options: Any = None) -> Options:
    """``url`` is a database URL without ``dbqueue+``. Raises ConfigError, naming the option."""
    base, _, query = url.partition("?")
    own: dict[str, Any] = {}
    rest = []
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in _OWN or name == "visibility_timeout":
            own[name] = _from_text(name, text)
        else:
            rest.append((name, text))
    for name, value in given.items():
        if name in _OWN:
            own[name] = value
        elif name not in _KOMBU and name not in _FOREIGN:
            _tell(f"unknown:{name}", "transport option %r is not known and has no effect", name)
    lease = _lease(own, given)
    if lease is not None:
        own["lease"] = lease
    rest += list(_tls(base, ssl_options).items())
    chosen = {name: value for name, value in own.items() if name in _SETTINGS}
    # Blanks and quotes in values: the driver's own syntax, so no plus signs.
    text = base + ("?" + urlencode(rest, quote_via=quote) if rest else "")
    return Options(
        JobSettings.from_options(url=text, **chosen),
        _seconds("eta_lead", own.get("eta_lead", Options.eta_lead)),
        _order(own.get("priority_order", "amqp")),
        _join(own.get("join")),
        _limit(own.get("delivery_limit", 0)),
    )


def tell_unmet(queue: str, arguments: Mapping[str, Any]) -> None:
    """Once for each queue and argument: it was declared with something that has no effect, and somebody may count on it."""
    for name in sorted(_UNMET & arguments.keys()):
        _tell(f"unmet:{queue}:{name}", "the queue %r is declared with %s, which has no effect here", queue, name)


def _lease(own: dict[str, Any], given: Mapping[str, Any]) -> Any:
    inherited = own.pop("visibility_timeout", None)
    inherited = given.get("visibility_timeout", inherited)
    if "lease" in own or inherited is None:
        return own.get("lease")
    seconds = _seconds("visibility_timeout", inherited)
    if seconds > MOST_LEASE:
        _tell(
            "visibility_timeout",
            "visibility_timeout is taken as %g s: claims are renewed while their process lives, so a short one only brings the "
            "messages of a killed worker back sooner (option lease)",
            MOST_LEASE,
        )
    return max(1.0, min(seconds, MOST_LEASE))


def _order(value: Any) -> bool:
    if value not in ("amqp", "redis"):
        raise ConfigError(f"transport option priority_order must be 'amqp' or 'redis'; got {describe(value)}")
    return bool(value == "redis")


def _join(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value.startswith("django:") and value != "django:"):
        return value
    raise ConfigError(f"transport option join must be 'django:' and an alias of DATABASES; got {describe(value)}")


def _limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1_000_000:
        raise ConfigError(f"transport option delivery_limit must be a whole number from 0; got {describe(value)}")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 31_536_000:
        raise ConfigError(f"transport option {name} must be a number of seconds from 0; got {describe(value)}")
    return float(value)


def _from_text(name: str, text: str) -> Any:
    """A URL has only text: what looks like a number or a flag is meant as one; another form is refused by the option's own check."""
    if name in ("notify", "auto_migrate"):
        return {"true": True, "false": False}.get(text, text)
    if name in ("schema", "prefix", "listen_url", "priority_order", "join"):
        return text
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _tell(key: str, message: str, *arguments: Any) -> None:
    if key not in _told:
        _told.add(key)
        log.warning(message, *arguments)


_TLS = {
    "ssl_ca_certs": "sslrootcert", "ca_certs": "sslrootcert", "ssl_certfile": "sslcert", "certfile": "sslcert",
    "ssl_keyfile": "sslkey", "keyfile": "sslkey",
}  # fmt: skip
_REQUIREMENTS = {
    ssl.CERT_NONE: "require", ssl.CERT_OPTIONAL: "verify-ca", ssl.CERT_REQUIRED: "verify-full",
    "none": "require", "optional": "verify-ca", "required": "verify-full", "CERT_NONE": "require", "CERT_OPTIONAL": "verify-ca",
    "CERT_REQUIRED": "verify-full",
}  # fmt: skip


def _tls(base: str, given: Any) -> dict[str, str]:
    """``broker_use_ssl`` in libpq's words. What cannot be kept is refused: silence would mean an open connection."""
    if not given:
        return {}
    if base.startswith("sqlite"):
        raise ConfigError("broker_use_ssl is set, but a SQLite file has no connection to encrypt. Take it out.")
    found = {"sslmode": "require"}
    if given is True:
        return found
    if not isinstance(given, Mapping):
        raise ConfigError(f"broker_use_ssl must be true or a dict; got {describe(given)}")
    for name, value in given.items():
        if name in ("ssl_cert_reqs", "cert_reqs"):
            if value not in _REQUIREMENTS:
                raise ConfigError(f"broker_use_ssl: {name} must be one of ssl.CERT_NONE, CERT_OPTIONAL, CERT_REQUIRED")
            found["sslmode"] = _REQUIREMENTS[value]
        elif name in _TLS:
            found[_TLS[name]] = str(value)
        else:
            raise ConfigError(f"broker_use_ssl: {name!r} has no counterpart in PostgreSQL; say it in the broker URL")
    return found


# -- the URL -----------------------------------------------------------------------------------------------------------


def database_url(client: Any) -> str:
    """The database URL of a kombu Connection: whole, as it was first given, or put together from the pieces into which a failover
    takes an alternate apart."""
    hostname = client.hostname or ""
    if "://" in hostname:
        return str(hostname).removeprefix("dbqueue+")
    scheme = str(client.transport_cls).removeprefix("dbqueue+")
    if scheme in ("dbqueue", ""):
        raise ConfigError("the broker URL must name the database: dbqueue+postgresql://... or dbqueue+sqlite:///...")
    path = client.virtual_host or ""
    if scheme.startswith("sqlite"):
        return f"{scheme}:///{path}"
    password = client.password() if callable(client.password) else client.password
    user = quote(client.userid or "", safe="") + (f":{quote(password, safe='')}" if password else "")
    port = f":{client.port}" if client.port else ""
    return f"{scheme}://{user + '@' if user else ''}{hostname}{port}/{quote(path.lstrip('/'), safe='')}"


def shown(url: str, *, include_password: bool, mask: str) -> str:
    """``dbqueue+...`` for people: without the password, and without a query that could hold one."""
    if include_password:
        return f"dbqueue+{url}"
    scheme, separator, rest = url.partition("?")[0].partition("://")
    if not separator:
        return f"dbqueue+{config.mask_url(url)}"
    credentials, at, place = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    return f"dbqueue+{scheme}://{user}{':' + mask if colon else ''}{at}{place}"
