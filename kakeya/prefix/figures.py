"""Figures of prefixes: blocks and tokens of this node, blocks of peers, prefixes warmed ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from kakeya.core.figures import Figure, Json, as_json, counter, gauge
from kakeya.prefix.disk.stats import DiskStats
from kakeya.prefix.pages.counts import PrefixCounts, Source
from kakeya.prefix.pages.pages import PrefixPages
from kakeya.prefix.peers.fetch import FetchStats
from kakeya.prefix.peers.service import PeerServiceStats
from kakeya.prefix.request.endings import PrefixEndings
from kakeya.prefix.request.turns import Turns
from kakeya.prefix.warm.slots import SlotStatus
from kakeya.prefix.warm.warming import PrewarmStats


def prefix_figures(
    pages: PrefixPages,
    turns: Turns,
    counts: PrefixCounts,
    disk: DiskStats | None,
    endings: PrefixEndings,
) -> Iterator[Figure]:
    """Blocks by where they lie, and tokens by where they came from."""
    blocks = {"pages": sum(shelf.tree.stats().ram_blocks for shelf in pages.shelves())}
    sizes = {"pages": pages.used_bytes}
    if disk is not None:
        blocks["disk"], sizes["disk"] = disk.blocks, disk.used_bytes
    yield gauge(
        "kakeya_prefix_blocks{place}", "Blocks of KV by where they lie", blocks, "{}.blocks"
    )
    yield gauge(
        "kakeya_prefix_bytes{place}", "Bytes of blocks of KV by where they lie", sizes, "{}.bytes"
    )
    yield gauge(
        "kakeya_prefix_logits_bytes",
        "Logits behind whole prompts, in the agent's memory",
        endings.held_bytes,
        "logits.bytes",
    )
    yield gauge(
        "kakeya_prefix_waiting",
        "Requests that wait for what another one computes",
        turns.waiting,
        "waiting",
    )
    yield counter(
        "kakeya_prefix_tokens{source}",
        "Tokens of prompts by where their KV came from",
        counts.tokens,
        "tokens.{}",
    )
    events = ("committed", "rolled_back", "evicted", "expired")
    yield counter(
        "kakeya_prefix_block_events{event}",
        "Blocks of KV by what became of them",
        {name: getattr(counts, name) for name in (*events, "written")},
        {name: name for name in events},
    )
    yield counter(
        "kakeya_prefix_waits",
        "Requests that waited for blocks which another one computed",
        counts.waits,
        "waits",
    )
    yield counter(
        "kakeya_prefix_wait_seconds",
        "Time that requests waited for blocks which another one computed",
        counts.waited_s,
    )
    yield counter(
        "kakeya_prefix_logits_reused",
        "Prompts whose first token was chosen from logits that were kept",
        counts.logits_reused,
        "logits.reused",
    )


def prefix_status(
    pages: PrefixPages,
    turns: Turns,
    counts: PrefixCounts,
    disk: DiskStats | None,
    endings: PrefixEndings,
) -> Json:
    """The figures as JSON, with budgets, problems and the blocks of each model."""
    trees = [(shelf.fingerprint.model_id, shelf.tree.stats()) for shelf in pages.shelves()]
    facts: Json = {
        "pages.budget_bytes": pages.budget_bytes,
        "pages.problem": pages.problem,
        "logits.prompts": endings.count,
        "models": [
            {"model_id": model_id, "blocks": stats.ram_blocks, "on_disk": stats.disk_blocks}
            for model_id, stats in trees
        ],
        "hit_tokens": counts.hit_tokens,
        "computed_tokens": counts.tokens[Source.COMPUTED],
        "takeovers": turns.flights.takeovers,
        "supersedings": turns.flights.supersedings,
    }
    if disk is None:
        facts["disk"] = {}
    else:
        facts |= {
            "disk.budget_bytes": disk.cap_bytes,
            "disk.queued": disk.queued,
            "disk.problem": disk.trouble,
        }
    return as_json(prefix_figures(pages, turns, counts, disk, endings), facts)


def peer_figures(
    fetched: FetchStats, served: PeerServiceStats, leased_bytes: int
) -> Iterator[Figure]:
    """Blocks asked of peers and by them; `leased_bytes` is kept from eviction by their leases."""
    yield counter(
        "kakeya_prefix_peer_events{event}",
        "What was asked of peers and by them",
        {
            "asked": fetched.asked,
            "hit": fetched.hits,
            "failed": fetched.failures,
            "late": fetched.late,
            "met": fetched.met,
            "looked_up": served.lookups,
            "leased": served.hits,
            "gone": served.blocks_gone,
            "declined": served.declined,
        },
        {"asked": "asked", "hit": "hits", "met": "met", "looked_up": "lookups"},
    )
    yield counter(
        "kakeya_prefix_peer_bytes{direction}",
        "Blocks that came and went, in bytes",
        {"fetched": fetched.bytes, "served": served.bytes_served},
        "{}_bytes",
    )
    yield counter(
        "kakeya_prefix_peer_wait_seconds",
        "Time that requests waited for blocks of peers",
        fetched.wait_s,
    )
    yield gauge(
        "kakeya_prefix_peer_leased_bytes",
        "Blocks that leases of peers keep from eviction",
        leased_bytes,
        "leased_bytes",
    )


def warm_figures(slots: Mapping[str, SlotStatus], warmed: PrewarmStats) -> Iterator[Figure]:
    """Slots by model, and prefixes by outcome."""
    yield gauge(
        "kakeya_conversations{model}",
        "Open conversations that have a slot",
        {one.model_id: sum(one.loads) for one in slots.values()},
    )
    yield gauge(
        "kakeya_conversation_slots{model}",
        "Slots for conversations",
        {one.model_id: one.parallel for one in slots.values()},
    )
    yield gauge(
        "kakeya_conversation_slots_recommended{model}",
        "Slots that the most conversations so far would need",
        {one.model_id: one.recommended for one in slots.values()},
    )
    yield counter(
        "kakeya_prewarms{outcome}",
        "Prefixes to be warmed, by what became of them",
        warmed.outcomes,
        "prewarms.{}",
    )
    yield counter(
        "kakeya_prewarm_tokens{kind}",
        "Tokens of warmed prefixes",
        {"cached": warmed.cached_tokens, "computed": warmed.computed_tokens},
        "{}_tokens",
    )
    yield gauge(
        "kakeya_prewarms_queued", "Prefixes that wait to be warmed", warmed.queued, "queued"
    )
    yield gauge("kakeya_prefixes_kept_warm", "Prefixes that are looked after", warmed.kept, "kept")


def warm_status(
    slots: Mapping[str, SlotStatus],
    conversations: int,
    warmed: PrewarmStats,
    *,
    prompts: int,
    for_peers: int,
) -> Json:
    """The figures as JSON, with the slots of each model."""
    return as_json(warm_figures(slots, warmed)) | {
        "conversations": conversations,
        "slots": [
            {**asdict(one), "loads": list(one.loads), "warning": _crowded(one)}
            for one in slots.values()
        ],
        "refreshed": warmed.refreshed,
        "running": warmed.running,
        "kept_tokens": warmed.kept_tokens,
        "declared": prompts,
        "for_peers": for_peers,
    }


def _crowded(one: SlotStatus) -> str:
    if not one.is_crowded:
        return ""
    seen = f"{one.high_water} conversations were open at once on {one.parallel} slots; "
    if one.recommended >= one.high_water:
        return f"{seen}precache.parallel = {one.recommended} would give each its own"
    if one.recommended > one.parallel:
        return f"{seen}memory holds precache.parallel = {one.recommended}, the others use blocks"
    return f"{seen}memory holds no more, the others use blocks"
