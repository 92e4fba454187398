"""Tables of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import TypeGuard

from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kakeya.cli.show.labels import labels_in
from kakeya.cli.show.memory_tables import show_memory
from kakeya.cli.show.tables import WIDE, fitting_table, stdout_console
from kakeya.core.units import format_bytes, printable
from kakeya.fleet.cards.names import short_id

Json = Mapping[str, object]
_SILENCE = {
    "asymmetric": ", answers other nodes but not this one",
    "fleet_wide": ", answers no node",
}


def show_status(status: Json) -> None:
    """Print the node, its models, and the fleet as the node sees it."""
    _write_status(status, stdout_console())


@contextmanager
def watched_status(console: Console) -> Iterator[Callable[[Json], None]]:
    """Keep a status on a screen of its own, which goes at the end; yields a function to show it.

    A picture that is longer than the window is cut, and its last line says by how much. Without a
    terminal, each picture follows the one before.
    """
    if not console.is_terminal:
        yield lambda status: _write_status(status, console)
        return
    with console.screen():
        yield lambda status: console.update_screen(_picture(status, console.size))


def _picture(status: Json, size: ConsoleDimensions) -> Text:
    """The status as it fits a window."""
    drawn = Console(
        width=size.width, height=size.height, file=StringIO(), force_terminal=True, record=True
    )
    _write_status(status, drawn)
    lines = list(Text.from_ansi(drawn.export_text(styles=True)).split("\n"))
    if len(lines) > size.height:
        hidden = len(lines) - size.height + 1
        lines = [*lines[: size.height - 1], Text(f"+{hidden} lines", style="dim")]
    return Text("\n").join(lines)


def _write_status(status: Json, console: Console) -> None:
    """Write the parts of a status, those that an owner looks for first at the top."""
    status = _printable(status)
    node, fleet = _object(status, "node"), _object(status, "fleet")
    console.print(
        f"[bold]{escape(_name(node))}[/bold]  grpc {node.get('grpc')}  http {node.get('http')}  "
        f"pid {node.get('pid')}  up {_seconds(node.get('uptime_s'))}",
        highlight=False,
    )
    identity = fleet.get("identity")
    if is_object(identity):
        console.print(
            f"fleet {identity.get('fleet')}, {identity.get('role')}"
            f"{' and authority' if identity.get('is_authority') else ''}; certificate valid for "
            f"{identity.get('certificate_days')} days",
            highlight=False,
            markup=False,
        )
    warnings, labels = fleet.get("warnings"), labels_in(_objects(fleet, "nodes"))
    for warning in map(str, warnings if isinstance(warnings, list) else ()):
        said = escape(labels.within(warning))
        console.print(f"[yellow]warning[/yellow]  {said}", highlight=False)
    console.print(_models(_objects(status, "models"), console))
    _show_requests(_objects(status, "requests"), console)
    for backend in _objects(status, "backends"):
        place = backend.get("url") or backend.get("program") or ""
        console.print(
            f"{backend.get('kind')} {backend.get('name')}  {place}  {backend.get('requests')} "
            f"requests; {backend.get('problem') or 'ready'}",
            highlight=False,
            markup=False,
        )
    nodes = _objects(fleet, "nodes")
    console.print((_nodes if console.width >= WIDE else _short_nodes)(nodes, console))
    led = _objects(_object(status, "rings"), "led")
    _show_rings(_objects(fleet, "rings"), led, console)
    show_memory(_object(status, "memory"), console)
    _show_adapters(_object(status, "adapters"), console)
    _show_prefixes(_object(status, "prefixes"), console)
    _show_precache(_object(status, "precache"), console)
    weights = _object(status, "weights")
    for pull in _objects(weights, "pulls"):
        said = f"pull  {pull.get('name')}: {pull.get('note') or pull.get('phase')}"
        if rate := _bytes(pull.get("bytes_per_second")):
            said += f", {_bytes(pull.get('done_bytes'))} of {_bytes(pull.get('bytes'))}, {rate}/s"
        console.print(said, highlight=False, markup=False)
    for name, why in _object(weights, "failed").items():
        console.print(f"pull  {name} failed: {why}", highlight=False, markup=False)


def _show_rings(groups: Iterable[Json], led: Iterable[Json], console: Console) -> None:
    """Print one line a ring group of the fleet, and one of each that should be and is not up."""
    for group in groups:
        nodes = group.get("nodes")
        named = ", ".join(str(one or "?") for one in nodes) if isinstance(nodes, list) else ""
        line = f"ring group  {group.get('model_id')}: {group.get('split')} over {named}"
        console.print(line, highlight=False, markup=False)
    for group in led:
        if group.get("state") != "up":
            line = f"ring group  {group.get('name')} is {group.get('state')}: {group.get('reason')}"
            console.print(line, highlight=False, markup=False)


def _show_requests(requests: Sequence[Json], console: Console) -> None:
    """Print the requests that wait, those of one reason and model in one line."""
    waits: dict[tuple[object, object], list[Json]] = {}
    for one in requests:
        wait = _object(one, "waits_for")
        waits.setdefault((wait.get("reason"), one.get("model")), []).append(wait)
    for (reason, _), alike in waits.items():
        if reason is None:
            continue
        more = f", and {len(alike) - 1} more" if len(alike) > 1 else ""
        console.print(f"waits  {alike[0].get('says')}{more}", highlight=False, markup=False)


def _show_adapters(adapters: Json, console: Console) -> None:
    """Print one line for adapters and one for pages, if there are any."""
    pages = _object(adapters, "pages")
    if pages.get("total"):
        console.print(
            f"pages  {pages['total']}: {pages.get('pinned')} pinned, {pages.get('evictable')} "
            f"evictable, {pages.get('free')} free; fragmentation {pages.get('fragmentation')}",
            highlight=False,
            markup=False,
        )
    if not adapters.get("registered"):
        return
    parts = [f"{adapters['registered']} registered", f"{adapters.get('warm')} in pages"]
    models = _object(adapters, "models")
    for base in models:
        found = _object(models, base)
        hot = found.get("hot")
        held = len(hot) if isinstance(hot, list) else 0
        parts.append(
            f"{base}: {held} in {found.get('slots')} slots, {found.get('waiting')} waiting"
        )
    console.print(f"adapters  {'; '.join(parts)}", highlight=False, markup=False)


def _show_prefixes(prefixes: Json, console: Console) -> None:
    """Print one line if KV of prompts was kept or found."""
    pages, disk = _object(prefixes, "pages"), _object(prefixes, "disk")
    hit, computed = prefixes.get("hit_tokens"), prefixes.get("computed_tokens")
    if not (pages.get("blocks") or disk.get("blocks") or hit or computed):
        return
    parts = [f"{pages.get('blocks')} blocks in pages ({_bytes(pages.get('bytes')) or '0 B'})"]
    if disk:
        parts.append(f"{disk.get('blocks')} on disk ({_bytes(disk.get('bytes')) or '0 B'})")
    parts.append(f"{hit} prompt tokens found, {computed} computed")
    if prefixes.get("waiting"):
        parts.append(f"{prefixes['waiting']} requests wait for a prompt that another one computes")
    if disk.get("problem"):
        parts.append(f"disk: {disk['problem']}")
    console.print(f"prefixes  {'; '.join(parts)}", highlight=False, markup=False)


def _show_precache(precache: Json, console: Console) -> None:
    """Print one line if a prefix is kept warm or a conversation is open; then the warnings."""
    prewarms = _object(precache, "prewarms")
    if not (precache.get("conversations") or precache.get("kept") or prewarms.get("failed")):
        return
    parts = [f"{precache.get('conversations')} conversations", f"{precache.get('kept')} kept warm"]
    parts.append(f"{prewarms.get('warm')} prefixes warmed, {prewarms.get('failed')} failed")
    console.print(f"precache  {'; '.join(parts)}", highlight=False, markup=False)
    for copy in _objects(precache, "copies"):
        found = copy.get("nodes")
        nodes = ", ".join(map(str, found if isinstance(found, list) else ()))
        text = f"{copy.get('tokens')} declared tokens of {copy.get('model')}"
        console.print(f"          {text} are warm on {nodes}", highlight=False, markup=False)
        for node, reason in _object(copy, "passed_over").items():
            console.print(f"            not on {node}: {reason}", highlight=False, markup=False)
    for slots in _objects(precache, "slots"):
        if slots.get("warning"):
            line = f"[yellow]warning[/yellow]  {escape(str(slots.get('model_id')))}: "
            console.print(f"{line}{escape(str(slots['warning']))}", highlight=False)


def show_plan(plan: Json) -> None:
    """Print which node verifies, which node drafts, and which sources each policy would ask."""
    plan, console = _printable(plan), stdout_console()
    placed = plan.get("placement")
    if is_object(placed):
        where = "on the same node" if placed.get("colocated") else "on another node"
        console.print(
            f"verify  {placed.get('verifier_model')} on {placed.get('verifier_node')} "
            f"({placed.get('verifier_address')})\n"
            f"draft   {placed.get('proposer_model')} on {placed.get('proposer_node')} "
            f"({placed.get('proposer_address')}), {where}",
            highlight=False,
            markup=False,
        )
    else:
        console.print(f"no plan: {plan.get('reason')}", highlight=False, markup=False)
    for model, policies in _object(plan, "drafts").items():
        if is_object(policies):
            for policy, sources in policies.items():
                names = ", ".join(sources) if isinstance(sources, list) else ""
                line = f"{model}, policy {policy}: {names or 'none'}"
                console.print(line, highlight=False, markup=False)
    _show_rings(_objects(plan, "rings"), (), console)


def _models(models: Iterable[Json], console: Console) -> Table:
    headings = ("model", "role", "state", "tokens/s", "weights", "restarts")
    table = fitting_table(console, *headings, title="models")
    for model in models:
        state, load = str(model.get("state")), _object(model, "load")
        if load:
            state += f", {load.get('at')}, {_seconds(load.get('seconds'))}"
        elif (state, model.get("role"), model.get("tokens_per_second")) == ("ready", "verifier", 0):
            state += ", speed not measured yet"
        error = model.get("error")
        table.add_row(
            escape(str(model.get("model_id"))),
            escape(str(model.get("role"))),
            escape(f"{state}: {error}" if error else state),
            _speed(model.get("tokens_per_second")),
            _bytes(model.get("weight_bytes")),
            str(model.get("restarts", "")),
        )
    return table


def _nodes(nodes: Iterable[Json], console: Console) -> Table:
    headings = ("node", "address", "heard", "platform", "memory", "offers")
    table = fitting_table(console, *headings, title="fleet")
    for node in nodes:
        offers = "\n".join(
            f"{model.get('model_id')} ({model.get('role')})" for model in _objects(node, "models")
        )
        table.add_row(
            escape(_name(node)),
            escape(_way(node)),
            _heard(node),
            escape(str(node.get("platform"))),
            _bytes(node.get("memory_bytes")),
            escape(offers),
        )
    return table


def _short_nodes(nodes: Iterable[Json], console: Console) -> Table:
    """The fleet in a narrow window, where addresses would break."""
    table = fitting_table(console, "node", "heard", "offers", title="fleet")
    for node in nodes:
        offers = ", ".join(str(model.get("model_id")) for model in _objects(node, "models"))
        table.add_row(escape(_name(node)), _heard(node), escape(offers))
    return table


def _heard(node: Json) -> str:
    heard = "this node" if node.get("is_self") else f"{_seconds(node.get('age_s'))} ago"
    if node.get("is_suspect"):
        heard += _SILENCE.get(str(node.get("doubt")), ", does not answer")
    return heard


def _name(node: Json) -> str:
    """Write the label with the start of an id made from a key; write any other id in full."""
    node_id, label = str(node.get("node_id")), str(node.get("label") or "")
    return f"{label} ({short_id(node_id)})" if label else short_id(node_id)


def _way(node: Json) -> str:
    route = node.get("route")
    if not is_object(route):
        return str(node.get("grpc_address"))
    downgraded = ", downgraded" if route.get("is_downgraded") else ""
    return f"{route.get('address')} ({route.get('network') or 'unnamed'}{downgraded})"


def is_object(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether a JSON value is an object."""
    return isinstance(value, dict)


def _printable(source: Json) -> Json:
    """Replace control characters of a terminal: nodes choose most of the texts themselves."""
    return {printable(key): _plain_value(value) for key, value in source.items()}


def _plain_value(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_plain_value(item) for item in value]
    return _printable(value) if is_object(value) else value


def _object(source: Json, key: str) -> Json:
    value = source.get(key)
    return value if is_object(value) else {}


def _objects(source: Json, key: str) -> list[Json]:
    value = source.get(key)
    return [item for item in value if is_object(item)] if isinstance(value, list) else []


def _speed(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) and value else ""


def _bytes(value: object) -> str:
    return format_bytes(value) if isinstance(value, int | float) and value else ""


def _seconds(value: object) -> str:
    return f"{value:.0f} s" if isinstance(value, int | float) else "?"


def show_demo(rows: Sequence[DemoRow]) -> None:
    """Print the table of the ways to draft."""
    table = Table(title="one generation, four ways to draft (greedy; median of the runs)")
    for heading in ("text", "way"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "x plain", "accepted/ verified", "tokens/ step"):
        table.add_column(heading, justify="right")
    table.add_column("identical")
    for row in rows:
        table.add_row(
            row.text,
            row.way,
            f"{row.tokens_per_second:.0f}",
            f"{row.speedup:.2f}",
            _acceptance(row),
            f"{row.tokens_per_step:.2f}",
            "yes" if row.identical else "[bold red]NO[/bold red]",
        )
    stdout_console().print(table)


def _acceptance(row: DemoRow) -> str:
    if row.acceptance is not None:
        return f"{row.accepted}/{row.verified} ({row.acceptance:.0%})"
    if row.shadowed:
        rate = row.shadow_hits / row.shadowed
        return f"not used: {row.shadow_hits}/{row.shadowed} ({rate:.0%})"
    return "-"


@contextmanager
def demo_progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """Show progress on stderr; yields a function of a text and the part that is done."""
    if quiet:
        yield lambda text, part: None
        return
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda text, part: progress.update(task, description=text, completed=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """All runs of one way on one text: `speedup` is over plain, `acceptance` 0..1.

    Drafts of a source that does not pay are not verified, only compared with the generated tokens:
    of the `shadowed` ones `shadow_hits` were right.
    """

    text: str
    way: str
    tokens_per_second: float
    speedup: float
    drafted: int
    verified: int
    accepted: int
    acceptance: float | None
    shadowed: int
    shadow_hits: int
    tokens_per_step: float
    identical: bool
