"""The alert rules in Prometheus' own tool: they load, fire when they should, and else are silent.

Without promtool (Debian and Homebrew have it in `prometheus`) these tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scrapes import ALERTS, DOCS, rules_of

PROMTOOL = shutil.which("promtool")
FILE = DOCS / "alerts.json"
RULES = {rule["alert"]: rule for rule in rules_of(ALERTS)}
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
STEP_S = 30


@dataclass(frozen=True, eq=False)
class Case:
    """Series that fire an alert at `at`, and what it then says. `quiet` are series that do not."""

    alert: str
    series: dict[str, str]
    at: str
    labels: dict[str, str]
    says: tuple[str, str]
    quiet: dict[str, str]


ON = 'instance="mini"'
MEM = "kakeya_memory"
MODEL = f'{ON},model="m",capability="text"'
PAGES = {
    f'kakeya_page_pool_pages{{{ON},state="{state}"}}': "0x60"
    for state in ("free", "evictable", "pinned", "dirty")
}


def of_pages(**states: int) -> dict[str, str]:
    return PAGES | {
        f'kakeya_page_pool_pages{{{ON},state="{state}"}}': f"{count}x60"
        for state, count in states.items()
    }


CASES = (
    Case(
        "KakeyaNodeDown",
        {f'up{{{ON},job="kakeya"}}': "1x4 0x40"},
        "10m",
        {"severity": "critical", "job": "kakeya"},
        ("mini does not answer", "Prometheus has not read the node"),
        {f'up{{{ON},job="kakeya"}}': "1x60"},
    ),
    Case(
        "KakeyaNodeWarns",
        {f"kakeya_warnings{{{ON}}}": "2x60"},
        "15m",
        {"severity": "warning"},
        ("mini has a warning about itself", "2 of them stand"),
        {f"kakeya_warnings{{{ON}}}": "1x10 0x50"},
    ),
    Case(
        "KakeyaPeerSilent",
        {f"kakeya_fleet_suspects{{{ON}}}": "1x60"},
        "10m",
        {"severity": "warning"},
        ("A peer of mini does not answer", "1 nodes are silent"),
        {f"kakeya_fleet_suspects{{{ON}}}": "1x4 0x50"},
    ),
    Case(
        "KakeyaCardsRefused",
        {f'kakeya_gossip_cards_dropped_total{{{ON},fault="stale"}}': "0+1x60"},
        "25m",
        {"severity": "warning", "fault": "stale"},
        ("mini refuses cards of peers", "20 in 10 minutes, stale"),
        {f'kakeya_gossip_cards_dropped_total{{{ON},fault="expired"}}': "0+1x60"},
    ),
    Case(
        "KakeyaClockWrong",
        {f'kakeya_clock_skew_seconds{{{ON},peer="two"}}': "-60x60"},
        "15m",
        {"severity": "warning", "peer": "two"},
        ("The clock of two is off that of mini", "By 1m 0s"),
        {f'kakeya_clock_skew_seconds{{{ON},peer="two"}}': "3x60"},
    ),
    Case(
        "KakeyaLinkLost",
        {f"kakeya_route_downgrades_total{{{ON}}}": "0 1 2 3 4 5x55"},
        "25m",
        {"severity": "info"},
        ("mini loses better links", "5 times in 30 minutes"),
        {f"kakeya_route_downgrades_total{{{ON}}}": "0 1x58"},
    ),
    Case(
        "KakeyaTaskFaults",
        {f'kakeya_task_failures_total{{{ON},task="gossip"}}': "0x10 1x50"},
        "8m",
        {"severity": "warning", "task": "gossip"},
        ("A background task of mini failed", "gossip was restarted"),
        {f'kakeya_task_failures_total{{{ON},task="gossip"}}': "1x60"},
    ),
    Case(
        "KakeyaLoopStuck",
        {f"kakeya_loop_stalls_total{{{ON}}}": "0+1x60"},
        "10m",
        {"severity": "warning"},
        ("The agent of mini stalls", "20 times in 10 minutes"),
        {f"kakeya_loop_stalls_total{{{ON}}}": "0x10 1x50"},
    ),
    Case(
        "KakeyaNotSaved",
        {
            f"kakeya_state_failures_total{{{ON}}}": "0x10 1x50",
            f"kakeya_jobs_store_failures_total{{{ON}}}": "0x60",
        },
        "8m",
        {"severity": "warning"},
        ("mini cannot write its files", "Its disk is full"),
        {
            f"kakeya_state_failures_total{{{ON}}}": "1x60",
            f"kakeya_jobs_store_failures_total{{{ON}}}": "0x60",
        },
    ),
    Case(
        "KakeyaServerErrors",
        {
            f'kakeya_http_requests_total{{{ON},status="500"}}': "0+1x60",
            f'kakeya_http_requests_total{{{ON},status="200"}}': "0+9x60",
        },
        "25m",
        {"severity": "warning"},
        ("mini fails requests", "10% of the answers"),
        {
            f'kakeya_http_requests_total{{{ON},status="404"}}': "0+1x60",
            f'kakeya_http_requests_total{{{ON},status="200"}}': "0+9x60",
        },
    ),
    Case(
        "KakeyaFirstTokenSlow",
        {
            f'kakeya_http_first_token_seconds_bucket{{{ON},model="m",le="15"}}': "0x90",
            f'kakeya_http_first_token_seconds_bucket{{{ON},model="m",le="60"}}': "0+9x90",
            f'kakeya_http_first_token_seconds_bucket{{{ON},model="m",le="+Inf"}}': "0+9x90",
        },
        "35m",
        {"severity": "info", "model": "m"},
        ("m begins to answer late on mini", "The 95th percentile is 57"),
        {
            f'kakeya_http_first_token_seconds_bucket{{{ON},model="m",le="15"}}': "0+9x90",
            f'kakeya_http_first_token_seconds_bucket{{{ON},model="m",le="+Inf"}}': "0+9x90",
        },
    ),
    Case(
        "KakeyaRequestsWait",
        {f'kakeya_requests{{{ON},state="waiting"}}': "30x60"},
        "15m",
        {"severity": "warning", "state": "waiting"},
        ("Requests queue on mini", "30 wait"),
        {f'kakeya_requests{{{ON},state="answering"}}': "30x60"},
    ),
    Case(
        "KakeyaEngineRestarts",
        {f'kakeya_engine_restarts_total{{{ON},model="m"}}': "0+1x60"},
        "10m",
        {"severity": "warning", "model": "m"},
        ("The engine of m dies again and again on mini", "restarts in 15 minutes"),
        {f'kakeya_engine_restarts_total{{{ON},model="m"}}': "0x10 1x50"},
    ),
    Case(
        "KakeyaRingGroupDown",
        {f'kakeya_ring_groups{{{ON},phase="waiting"}}': "1x60"},
        "15m",
        {"severity": "warning", "phase": "waiting"},
        ("A ring group that mini leads is not up", "1 groups wait"),
        {f'kakeya_ring_groups{{{ON},phase="up"}}': "1x60"},
    ),
    Case(
        "KakeyaBackendDown",
        {f'kakeya_backend_up{{{ON},backend="cloud"}}': "0x60"},
        "10m",
        {"severity": "warning", "backend": "cloud"},
        ("The backend cloud of mini has a problem", "Requests to it fail"),
        {f'kakeya_backend_up{{{ON},backend="cloud"}}': "1x60"},
    ),
    Case(
        "KakeyaPullsFail",
        {f'kakeya_pulls_ended_total{{{ON},end="failed"}}': "0x10 1x50"},
        "20m",
        {"severity": "info", "end": "failed"},
        ("A model could not be fetched to mini", "fetches failed in an hour"),
        {f'kakeya_pulls_ended_total{{{ON},end="done"}}': "0+1x60"},
    ),
    Case(
        "KakeyaMemoryOverBudget",
        {f'{MEM}_bytes{{{ON},state="committed"}}': "2147483648x60"}
        | {f'{MEM}_bytes{{{ON},state="budget"}}': "1073741824x60"},
        "2m",
        {"severity": "critical"},
        ("mini holds more memory than its budget", "The ledger counts 2GiB, more than the budget"),
        {f'{MEM}_bytes{{{ON},state="committed"}}': "1073741824x60"}
        | {f'{MEM}_bytes{{{ON},state="budget"}}': "1073741824x60"},
    ),
    Case(
        "KakeyaMemoryCritical",
        {f"{MEM}_pressure_level{{{ON}}}": "2x60"},
        "2m",
        {"severity": "critical"},
        ("mini is critically short of memory", "All that idled has been evicted"),
        {f"{MEM}_pressure_level{{{ON}}}": "1x60"},
    ),
    Case(
        "KakeyaMemoryLow",
        {f"{MEM}_pressure_level{{{ON}}}": "1x60"},
        "20m",
        {"severity": "warning"},
        ("mini is short of memory", "Pressure lasts for 15 minutes"),
        {f"{MEM}_pressure_level{{{ON}}}": "1x20 0x40"},
    ),
    Case(
        "KakeyaMemoryExhausted",
        {f"{MEM}_exhausted_total{{{ON}}}": "0x10 1x50"},
        "8m",
        {"severity": "warning"},
        ("mini finds nothing more to evict", "What is left is in use"),
        {f"{MEM}_exhausted_total{{{ON}}}": "3x60"},
    ),
    Case(
        "KakeyaMemoryRefusals",
        {f'{MEM}_refusals_total{{{ON},code="memory_refused"}}': "0+1x60"},
        "20m",
        {"severity": "warning", "code": "memory_refused"},
        ("mini refuses requests for want of memory", "20 requests in 10 minutes got memory_ref"),
        {f'{MEM}_refusals_total{{{ON},code="queue_full"}}': "0+1x60"},
    ),
    Case(
        "KakeyaMemoryLoadsFail",
        {f'{MEM}_loads_total{{{MODEL},outcome="failed"}}': "0+1x60"},
        "10m",
        {"severity": "warning", "model": "m"},
        ("m does not load on mini", "loads failed in 15 minutes"),
        {f'{MEM}_loads_total{{{MODEL},outcome="loaded"}}': "0+1x60"},
    ),
    Case(
        "KakeyaMemoryThrash",
        {f'{MEM}_loads_total{{{MODEL},outcome="loaded"}}': "0+2x60"},
        "25m",
        {"severity": "warning"},
        ("Models of mini take each other's room", "60 loads in 15 minutes"),
        {f'{MEM}_loads_total{{{MODEL},outcome="loaded"}}': "0 1 2 3 4x56"},
    ),
    Case(
        "KakeyaMemoryEstimateLow",
        {f'{MEM}_resident_bytes{{{MODEL},role="r",kind="counted"}}': "2147483648x60"}
        | {f'{MEM}_resident_bytes{{{MODEL},role="r",kind="estimate"}}': "1073741824x60"},
        "20m",
        {"severity": "info", "model": "m", "capability": "text"},
        ("m takes far more than estimated on mini", "It takes 2GiB"),
        {f'{MEM}_resident_bytes{{{MODEL},role="r",kind="counted"}}': "1200x60"}
        | {f'{MEM}_resident_bytes{{{MODEL},role="r",kind="estimate"}}': "1000x60"},
    ),
    Case(
        "KakeyaAdaptersCold",
        {f'kakeya_adapter_acquires_total{{{ON},tier="hot"}}': "0+50x130"}
        | {f'kakeya_adapter_acquires_total{{{ON},tier="cold"}}': "0+50x130"},
        "65m",
        {"severity": "info"},
        ("Adapters of mini are often not where they are used", "50% of the leases"),
        {f'kakeya_adapter_acquires_total{{{ON},tier="hot"}}': "0+95x130"}
        | {f'kakeya_adapter_acquires_total{{{ON},tier="cold"}}': "0+5x130"},
    ),
    Case(
        "KakeyaAdapterAcquireSlow",
        {f'kakeya_adapter_acquire_seconds_bucket{{{ON},tier="hot",le="0.01"}}': "0x60"}
        | {f'kakeya_adapter_acquire_seconds_bucket{{{ON},tier="hot",le="0.1"}}': "0+9x60"}
        | {f'kakeya_adapter_acquire_seconds_bucket{{{ON},tier="hot",le="+Inf"}}': "0+9x60"},
        "25m",
        {"severity": "warning"},
        ("Adapters that are ready are had slowly on mini", "The 99th percentile is 99.1ms"),
        {f'kakeya_adapter_acquire_seconds_bucket{{{ON},tier="hot",le="0.01"}}': "0+9x60"}
        | {f'kakeya_adapter_acquire_seconds_bucket{{{ON},tier="hot",le="+Inf"}}': "0+9x60"}
        | {f'kakeya_adapter_acquire_seconds_bucket{{{ON},tier="cold",le="0.1"}}': "0x60"}
        | {f'kakeya_adapter_acquire_seconds_bucket{{{ON},tier="cold",le="+Inf"}}': "0+9x60"},
    ),
    Case(
        "KakeyaMemoryCareful",
        {f"{MEM}_careful{{{ON}}}": "1x60"},
        "1m",
        {"severity": "info"},
        ("mini is careful after panics", "fewer sequences run at once"),
        {f"{MEM}_careful{{{ON}}}": "0x60"},
    ),
    Case(
        "KakeyaPagesHeld",
        of_pages(pinned=95, free=5),
        "10m",
        {"severity": "warning"},
        ("Pages of mini are nearly all in use", "95% of the pages"),
        of_pages(pinned=80, dirty=15, free=5),
    ),
    Case(
        "KakeyaPagesFragmented",
        {f"kakeya_page_pool_fragmentation_ratio{{{ON}}}": "0.5x60"} | of_pages(free=40),
        "20m",
        {"severity": "info"},
        ("Free pages of mini are scattered", "The longest free range is 50%"),
        {f"kakeya_page_pool_fragmentation_ratio{{{ON}}}": "0.5x60"} | of_pages(free=4),
    ),
    Case(
        "KakeyaPagePinContention",
        {f'kakeya_page_holds_total{{{ON},outcome="stale"}}': "0+1x60"}
        | {f'kakeya_page_holds_total{{{ON},outcome="opened"}}': "0+99x60"},
        "25m",
        {"severity": "info"},
        ("Blocks of mini go before they are pinned", "1% of the holds"),
        {f'kakeya_page_holds_total{{{ON},outcome="stale"}}': "7x60"}
        | {f'kakeya_page_holds_total{{{ON},outcome="opened"}}': "0+99x60"},
    ),
    Case(
        "KakeyaPageAllocationSlow",
        {f'kakeya_page_allocation_latency_seconds_bucket{{{ON},le="0.0001"}}': "0x60"}
        | {f'kakeya_page_allocation_latency_seconds_bucket{{{ON},le="0.001"}}': "0+10x60"}
        | {f'kakeya_page_allocation_latency_seconds_bucket{{{ON},le="+Inf"}}': "0+10x60"},
        "25m",
        {"severity": "warning"},
        ("Allocating pages on mini is slow", "The 99th percentile is 0.00099"),
        {f'kakeya_page_allocation_latency_seconds_bucket{{{ON},le="0.0001"}}': "0+10x60"}
        | {f'kakeya_page_allocation_latency_seconds_bucket{{{ON},le="+Inf"}}': "0+10x60"},
    ),
    Case(
        "KakeyaPageEvictionStorm",
        {f"kakeya_pages_evicted_total{{{ON}}}": "0+100x60"} | of_pages(evictable=100),
        "20m",
        {"severity": "warning"},
        ("Pages of mini are evicted as fast", "More pages than there are"),
        {f"kakeya_pages_evicted_total{{{ON}}}": "0+10x60"} | of_pages(evictable=100),
    ),
    Case(
        "KakeyaPagePinsOverdue",
        {f"kakeya_page_pool_overdue_pins{{{ON}}}": "3x60"},
        "10m",
        {"severity": "warning"},
        ("Pins on mini outlive their work", "3 pins should have ended"),
        {f"kakeya_page_pool_overdue_pins{{{ON}}}": "0x60"},
    ),
)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)


def outcome(folder: Path, series: Mapping[Case, dict[str, str]], *, fires: bool) -> str:
    """What promtool prints of alerts, each over its own series; "" when all is as expected.

    It says what an alert became only where that is not what was expected: not the raw templates.
    """
    tests = {
        "rule_files": [str(FILE)],
        "evaluation_interval": f"{STEP_S}s",
        "tests": [
            {
                "interval": f"{STEP_S}s",
                "input_series": [{"series": s, "values": v} for s, v in own.items()],
                "alert_rule_test": [
                    {
                        "eval_time": case.at,
                        "alertname": case.alert,
                        "exp_alerts": [
                            {
                                "exp_labels": {"instance": "mini", **case.labels},
                                "exp_annotations": RULES[case.alert]["annotations"],
                            }
                        ]
                        if fires
                        else [],
                    }
                ],
            }
            for case, own in series.items()
        ],
    }
    path = folder / "tests.json"
    path.write_text(json.dumps(tests))
    ran = promtool("test", "rules", str(path))
    return ran.stdout + ran.stderr if ran.returncode else ""


@pytest.fixture(scope="module")
def fired(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What promtool says of all alerts over the series that fire them."""
    series = {case: case.series for case in CASES}
    return outcome(tmp_path_factory.mktemp("alerts"), series, fires=True)


def test_prometheus_loads_the_rules() -> None:
    ran = promtool("check", "rules", str(FILE))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(RULES)} rules found" in ran.stdout


def test_every_alert_is_tried() -> None:
    assert {case.alert for case in CASES} == RULES.keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_with_words_that_people_understand(case: Case, fired: str) -> None:
    """Its texts are templates: what they became is in what promtool got in place of them."""
    _, _, said = fired.partition(f"alertname: {case.alert},")
    got = said[said.index("got:") :].partition("alertname: ")[0]
    found = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', got))
    assert found.pop("alertname") == case.alert, said
    texts = [found.pop(name).replace('\\"', '"') for name in ("summary", "description")]
    assert found == {"instance": "mini", **case.labels}
    for text, part in zip(texts, case.says, strict=True):
        assert part in text
        assert "{{" not in text
        assert "<no value>" not in text


def test_alerts_are_silent_where_they_should_be(tmp_path: Path) -> None:
    assert outcome(tmp_path, {case: case.quiet for case in CASES}, fires=False) == ""
