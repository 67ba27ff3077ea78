"""Tests of the tasks with the testing kit: a real queue of their own, and a clock to move."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from dbqueue.testing import Case, CaseFactory
from examples.bridge.shop import mailer, place_order, queue, remind, send_receipt


class FakeMailer:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.down = False

    def send(self, to: str, subject: str) -> None:
        if self.down:
            raise ConnectionRefusedError
        self.sent.append((to, subject))


@pytest.fixture
def case(dbqueue_case: CaseFactory) -> Case:
    return dbqueue_case(queue)


@pytest.fixture
def mails(case: Case) -> FakeMailer:
    fake = FakeMailer()
    case.fake(mailer, fake)
    return fake


@pytest.fixture
def shop(case: Case) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(case.path)
    connection.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, email TEXT)")
    yield connection
    connection.close()


def test_an_order_and_its_receipts(case: Case, mails: FakeMailer, shop: sqlite3.Connection) -> None:
    place_order(shop, 7, "ann@example.org")
    assert case.drain().succeeded == 1
    case.advance(600)
    assert case.drain().succeeded == 1
    assert mails.sent == [("ann@example.org", "Your order 7"), ("archive@example.org", "Your order 7 (copy)")]


def test_no_order_no_receipt(case: Case, mails: FakeMailer, shop: sqlite3.Connection) -> None:
    shop.execute("INSERT INTO orders VALUES (7, NULL)")
    shop.commit()
    with pytest.raises(sqlite3.IntegrityError):
        place_order(shop, 7, "ann@example.org")
    case.advance(600)
    assert len(case.drain()) == 0


def test_a_mail_server_that_is_down(case: Case, mails: FakeMailer) -> None:
    receipt = send_receipt.delay(7, "ann@example.org")
    mails.down = True
    for retry in range(5):
        assert case.drain().failed == 1
        assert receipt.state == "RETRY"
        case.advance(60 * 2**retry)
    mails.down = False
    assert case.drain().succeeded == 1
    assert receipt.state == "SUCCESS"


def test_a_reminder_that_is_too_late(case: Case, mails: FakeMailer) -> None:
    reminder = remind.apply_async(("ann@example.org",))
    case.advance(3601)
    case.drain()
    assert (reminder.state, mails.sent) == ("REVOKED", [])
