"""Which slots a round fires, whatever instants it happens at: pure arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbqueue import cron
from dbqueue.clock import SECOND
from dbqueue.schedules import CRON_SLOTS, EVERY_SLOTS, ON_TIME, next_round

START = 1_772_445_600 * SECOND  # a Monday, ten o'clock
specs = st.sampled_from(
    ["* * * * *", "*/7 * * * *", "0 3 * * 1", "30 2 * * *", "@every 13s", "@every 90m", "@every 1d"]
)
zones = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"])
pauses = st.lists(
    st.one_of(st.integers(1, 2 * SECOND), st.integers(1, 7200 * SECOND), st.integers(-3600 * SECOND, 0)), max_size=30
)


def spec_of(text: str, zone: str) -> cron.Spec:
    return cron.parse(text, "UTC" if text.startswith("@") else zone).anchored(START)


@pytest.mark.req("D16", "A3")
@settings(deadline=None)
@given(text=specs, zone=zones, pauses=pauses)
def test_every_slot_once_and_in_order_whenever_one_looks(text: str, zone: str, pauses: list[int]) -> None:
    spec = spec_of(text, zone)
    cursor, now, latest, fired = START, START, START, list[int]()
    for pause in pauses:
        now += pause
        while True:
            found = next_round(spec, cursor, now)
            assert found.last_slot >= cursor
            assert all(cursor < slot <= now for slot in found.slots)
            assert found.next_at == spec.next_after(found.last_slot)
            fired += found.slots
            cursor = found.last_slot
            if not found.slots:
                break
        latest = max(latest, now)
        assert found.next_at is not None
        assert found.next_at > now
    assert fired == sorted(set(fired))
    if isinstance(spec, cron.Cron):
        assert fired == spec.slots(START, latest, 1_000_000)


@pytest.mark.req("A3")
@settings(deadline=None)
@given(text=specs, zone=zones, late=st.integers(0, 3 * 86_400 * SECOND), age=st.integers(SECOND, 86_400 * SECOND))
def test_what_the_policies_say_about_missed_slots(text: str, zone: str, late: int, age: int) -> None:
    spec, now = spec_of(text, zone), START + late
    missed = spec.slots(START, now, 100_000)
    most = EVERY_SLOTS if isinstance(spec, cron.Every) else CRON_SLOTS

    def slots(**more: object) -> list[int]:
        return next_round(spec, START, now, **more).slots  # type: ignore[arg-type]

    assert slots() == missed[:most]
    assert slots(max_age=age) == [slot for slot in missed if slot >= now - age][:most]
    assert slots(catch_up="latest") == missed[-1:]
    assert slots(catch_up="latest", max_age=age) == [slot for slot in missed[-1:] if slot >= now - age]
    assert slots(catch_up="skip") == [slot for slot in missed if slot >= now - ON_TIME][:most]
    for policy in ("latest", "skip"):
        found = next_round(spec, START, now, catch_up=policy)
        assert found.last_slot == (missed[-1] if missed else START)
