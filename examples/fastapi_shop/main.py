"""A FastAPI shop whose Celery broker is its own database.

`python -m examples.fastapi_shop.migrate`, `uvicorn examples.fastapi_shop.main:app`, `celery -A examples.fastapi_shop.tasks worker`,
`celery -A examples.fastapi_shop.tasks beat`. An order and all messages about it are one transaction: a declined card leaves neither.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from celery import chain, group
from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import dbqueue
from examples.fastapi_shop.database import Event, Order, url_for
from examples.fastapi_shop.tasks import ask_for_review, pack, print_label, reserve, send_receipt

REVIEW_AFTER = float(os.environ.get("SHOP_REVIEW_AFTER", "86400"))
"""Seconds after an order at which its customer is asked for a review."""
BANK_SECONDS = float(os.environ.get("SHOP_BANK_SECONDS", "0"))
"""How long the bank takes to charge a card."""

engine = create_async_engine(url_for("aiosqlite", "asyncpg"))
sessions = async_sessionmaker(engine)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
    await engine.dispose()


async def get_session() -> AsyncIterator[AsyncSession]:
    async with sessions() as session:
        yield session


SessionOfRequest = Annotated[AsyncSession, Depends(get_session)]
app = FastAPI(lifespan=lifespan)


class NewOrder(BaseModel):
    customer: str
    cents: int
    card: str


@app.post("/orders", status_code=201)
async def create_order(new: NewOrder, session: SessionOfRequest) -> dict[str, int]:
    with dbqueue.using(session):  # the messages wait in memory and are written by the session's own commit
        order = Order(customer=new.customer, cents=new.cents)
        session.add(order)
        await session.flush()
        send_receipt.delay(order.id)
        ask_for_review.apply_async((order.id,), countdown=REVIEW_AFTER)
        chain(reserve.si(order.id), group(pack.si(order.id), print_label.si(order.id))).apply_async()
    await asyncio.sleep(BANK_SECONDS)  # the bank's answer comes last
    if new.card == "declined":  # the session is closed without a commit
        raise HTTPException(402, "declined")
    number = order.id
    await session.commit()
    return {"order": number}


@app.get("/orders/{number}")
async def show_order(number: int, session: SessionOfRequest) -> dict[str, object]:
    order = await session.get(Order, number)
    if order is None:
        raise HTTPException(404, "no such order")
    events = await session.scalars(select(Event.what).filter_by(order_id=number).order_by(Event.id))
    return {"customer": order.customer, "cents": order.cents, "events": list(events)}
