"""Loads for requests that had no time for them, see `tickets.Tickets.wish`."""

from __future__ import annotations

from dataclasses import replace

from kakeya.memory.arbiter import queue
from kakeya.memory.arbiter.planning import DraftOutcome, Planner
from kakeya.memory.arbiter.tickets import Tickets


def grant_wishes(
    tickets: Tickets, planner: Planner, answer: DraftOutcome, view: queue.QueueView
) -> None:
    """Plan the loads that were wished for, the oldest wish first, while no request waits."""
    if tickets or view.is_stopping:
        return
    for ticket in sorted(tickets.wished.values(), key=lambda one: one.place_mono):
        match queue.consider(ticket, queue.EarlierClaims(), view):
            case queue.LoadNow() as load:
                plan = planner.load(ticket.ask, load, view.now)
                answer.plans.append(replace(plan, is_preload=True))
                del tickets.wished[ticket.ask.key]
            case queue.Lend() | queue.Refuse():
                del tickets.wished[ticket.ask.key]
            case queue.NotYet():
                pass
