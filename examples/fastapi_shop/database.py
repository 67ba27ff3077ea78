"""The shop's tables, and the one URL that names their database."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import ForeignKey
from sqlalchemy.engine import make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

URL = os.environ.get("SHOP_DATABASE_URL", f"sqlite:///{Path('shop.db').absolute()}")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]


class Event(Base):
    """What happened to an order, or with no order to the shop."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int | None] = mapped_column(ForeignKey("orders.id"))
    what: Mapped[str]


def url_for(sqlite_driver: str, postgres_driver: str) -> str:
    """The same database for the web application, which is asynchronous, and for the tasks, which are not."""
    url = make_url(URL)
    sqlite = url.get_backend_name() == "sqlite"
    driver = f"sqlite+{sqlite_driver}" if sqlite else f"postgresql+{postgres_driver}"
    return url.set(drivername=driver).render_as_string(hide_password=False)
