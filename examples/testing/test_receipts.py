from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from dbqueue.testing import Case, CaseFactory
from examples.testing.receipts import Receipt, mailer, place_order, queue, send_receipt


class FakeMailer:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.down = False

    def send(self, to: str, subject: str) -> None:
        if self.down:
            raise ConnectionRefusedError("no mail today")
        self.sent.append((to, subject))


@pytest.fixture
def case(dbqueue_case: CaseFactory) -> Case:
    return dbqueue_case(queue)


@pytest.fixture
def mails(case: Case) -> FakeMailer:
    fake = FakeMailer()
    case.fake(mailer, fake)  # until the case ends
    return fake


@pytest.fixture
def shop(case: Case) -> Iterator[sqlite3.Connection]:
    """The application's tables stand in the case's database, so that its transactions can be joined."""
    connection = sqlite3.connect(case.path)
    connection.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, email TEXT)")
    yield connection
    connection.close()


def test_a_receipt_is_sent_five_minutes_after_the_order(
    case: Case, mails: FakeMailer, shop: sqlite3.Connection
) -> None:
    place_order(shop, 7, "ann@example.org")
    assert case.drain().succeeded == 0
    case.advance(300)
    assert case.drain().succeeded == 1
    assert mails.sent == [("ann@example.org", "Your order 7")]


def test_no_receipt_without_an_order(case: Case, mails: FakeMailer, shop: sqlite3.Connection) -> None:
    place_order(shop, 7, "ann@example.org")
    with pytest.raises(sqlite3.IntegrityError):
        place_order(shop, 7, "ben@example.org")
    assert len(case.jobs(target=send_receipt)) == 1


def test_a_mail_server_that_is_down_costs_an_attempt(case: Case, mails: FakeMailer) -> None:
    job = send_receipt.enqueue(Receipt(7, "ann@example.org"))
    mails.down = True
    drained = case.drain()
    assert drained.failed == 1
    assert isinstance(drained.errors[0], ConnectionRefusedError)
    mails.down = False
    case.advance(60)
    assert case.drain().succeeded == 1
    assert case.job(job).attempt == 2


def test_a_real_worker_sends_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIL_FOLDER", str(case.folder))  # the process inherits it; fakes do not reach into it
    job = send_receipt.enqueue(Receipt(7, "ann@example.org"))
    worker = case.process("examples.testing.receipts:queue", "-c", "2")
    case.wait_for(job, "succeeded")
    assert (case.folder / "ann@example.org.txt").read_text() == "Your order 7"
    worker.terminate()
    assert worker.wait() == 0
