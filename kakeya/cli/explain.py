"""`kakeya explain`: why so much, or so little, of a request's prompt was found in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_WAITS = ("load", "render", "queue", "prefill", "decode", "total")


def explanation(found: Mapping[str, object]) -> Iterator[str]:
    """The lines for a person, of an answer of /api/v1/requests/{id}."""
    if "state" in found:
        yield f"{found['id']} to {found['model']} is {found['state']}, for {found['seconds']} s now"
        wait = found.get("waits_for")
        if isinstance(wait, dict):
            yield f"  waits    {wait['says']}"
        return
    yield f"{found['id']} of {found['model']}"
    yield (
        f"  prompt   {found['prompt_tokens']} tokens: {found['cached_tokens']} cached, "
        f"{found['computed_tokens']} computed"
    )
    task = found.get("task")
    if isinstance(task, dict):
        yield f"  task     {task['name']}: {task['reason']}"
        for one in task["candidates"]:
            is_loaded = "failed" if one["failed"] else "loaded" if one["loaded"] else "not loaded"
            speed = f"{one['tokens_per_second']:g} tokens/s" if one["tokens_per_second"] else "-"
            yield f"           {one['model']}  step {one['step']}, {is_loaded}, {speed}"
    defaults = found.get("defaults")
    if isinstance(defaults, dict) and defaults:
        listed = (f"{name} {one['value']} ({one['from']})" for name, one in defaults.items())
        yield f"  defaults {', '.join(listed)}"
    if found.get("conversation"):
        yield f"  key      {found['conversation']}"
    yield f"  why      {found['reason']}"
    text = found.get("text")
    if isinstance(text, dict) and text:
        yield f"  token    {found['parted_at_token']} is the first that was not cached:"
        yield f"           {text['before']!r}"
        yield f"        -> {text['behind']!r}"
        if "earlier_behind" in text:
            yield f"    before {text['earlier_behind']!r}"
    moved = found.get("moved")
    if isinstance(moved, list) and moved:
        yield f"  moved    {', '.join(map(str, moved))}: lines that change with every request"
    routes = found.get("routes")
    for index, route in enumerate(routes if isinstance(routes, list) else ()):
        yield from _route(route, "then" if index else "node")
    waits = found.get("waits_s")
    if isinstance(waits, dict):
        said = [f"{name} {waits[name]:.3f} s" for name in _WAITS if waits.get(name) is not None]
        yield f"  waits    {', '.join(said)}"


def _route(route: Mapping[str, Any], name: str) -> Iterator[str]:
    yield f"  {name}     {route['node']}: {route['reason']}"
    for one in route["candidates"]:
        terms = (f"{term} {seconds:g}" for term, seconds in one["terms_s"].items() if seconds)
        yield (
            f"           {one['node']}  first {one['first_s']:.2f} s, end {one['end_s']:.2f} s "
            f"({', '.join(terms) or 'nothing to do'}; {one['warm_tokens']} tokens warm"
            f"{_fetched(one)})"
        )
    for node, why in route["unfit"].items():
        yield f"           {node}  cannot: {why}"


def _fetched(candidate: Mapping[str, Any]) -> str:
    fetch = candidate.get("fetch")
    if not fetch:
        return ""
    speed = f"{fetch['bytes_per_second'] / 1e6:.0f} MB/s"
    tokens = candidate["fetched_tokens"]
    return f", {tokens} from {fetch['node']} in {fetch['seconds']:.2f} s at {speed}"
