"""The state machine of a job: everything that decides whether a move is allowed lives in this file.

``MOVES`` maps (verb, state) to the states that the verb may lead to. The SQL of the verbs, the contract tests (every pair
that is missing here must change nothing) and the diagram in the README all derive from it.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class State(IntEnum):
    """Where a job is. The numbers are stored; they never change. Up to UNKNOWN a job is unfinished (D8)."""

    PENDING = 0
    RUNNING = 1
    BLOCKED = 2
    UNKNOWN = 3
    SUCCEEDED = 4
    ACKED = 5
    DEAD = 6
    CANCELLED = 7
    DISCARDED = 8

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def finished(self) -> bool:
        return self > State.UNKNOWN


KEY_HOLDERS = (State.PENDING, State.RUNNING, State.UNKNOWN)
"""(target, key) is unique over these states and free in all others (D8)."""


class OnCrash(IntEnum):
    """What becomes of a job whose lease ends while it runs. The numbers are stored."""

    RETRY = 0
    UNKNOWN = 1
    FAIL = 2

    @property
    def label(self) -> str:
        return self.name.lower()


class Kind(str, Enum):
    """The fixed kinds of error that a job row may carry (D10)."""

    FAILED = "failed"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    UNKNOWN_TARGET = "unknown_target"
    SCHEMA_MISMATCH = "schema_mismatch"
    CORRUPT_PAYLOAD = "corrupt_payload"
    INVALID_POLICY = "invalid_policy"
    REJECTED = "rejected"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"

    def __str__(self) -> str:
        return self.value


P, R, B, U = State.PENDING, State.RUNNING, State.BLOCKED, State.UNKNOWN

MOVES: dict[tuple[str, State], tuple[State, ...]] = {
    ("claim", P): (R,),
    # by the owner of the claim, fenced by id + token + running + live lease (D13)
    ("renew", R): (R,),
    ("succeed", R): (State.SUCCEEDED,),
    ("ack", R): (State.ACKED,),
    ("retry_later", R): (P,),
    ("release", R): (P,),
    ("block", R): (B,),
    ("bury", R): (State.DEAD,),
    ("crash", R): (P, U, State.DEAD),
    # by the sweep, once the lease has ended by the database's clock
    ("expire", R): (P, U, State.DEAD),
    # by an operator or the application
    ("cancel", P): (State.CANCELLED,),
    ("cancel", R): (State.CANCELLED,),
    ("cancel", B): (State.CANCELLED,),
    ("retry", B): (P,),
    ("retry", State.DEAD): (P,),
    ("retry", State.CANCELLED): (P,),
    ("retry", State.SUCCEEDED): (P,),
    ("retry", State.ACKED): (P,),
    ("resolve", U): (State.SUCCEEDED, State.DISCARDED),
}

VERBS: tuple[str, ...] = tuple(dict.fromkeys(verb for verb, _ in MOVES))


def allowed(verb: str, state: State) -> bool:
    return (verb, state) in MOVES


def sources(verb: str) -> tuple[State, ...]:
    """The states that the verb may start from."""
    return tuple(state for (name, state) in MOVES if name == verb)


def diagram() -> str:
    """The MOVES table as a Mermaid state diagram; the README holds this text, and a test compares."""
    lines = ["stateDiagram-v2", "    [*] --> pending: enqueue"]
    arrows: dict[tuple[State, State], list[str]] = {}
    for (verb, source), ends in MOVES.items():
        for end in ends:
            if end is not source:
                arrows.setdefault((source, end), []).append(verb.replace("_later", ""))
    for (source, end), verbs in arrows.items():
        lines.append(f"    {source.label} --> {end.label}: {', '.join(dict.fromkeys(verbs))}")
    return "\n".join(lines)
