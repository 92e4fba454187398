// The views: each a function of the fleet that returns what is to be seen.

import { answered, conversations, evictions, happenings, headline, occupants, QUESTIONS, rings, share, speeds, workOf } from "./answers.js";
import { bytes, clock, count, h, joined, partOf, percent, seconds, speed, sum } from "./dom.js";

const MOST_ROUND = 9;
const DENSE = 20;
const WIDE_COLUMNS = 5; // a table of so many is shown as lines where there is little room
const MOST_REASONS = 10;
const nodeLink = (node) => h("a", { class: "whole", href: `#/node/${encodeURIComponent(node.id)}` }, node.name);
const requestLink = ({ id, ended_at }) => h("a", { href: `#/request/${encodeURIComponent(id)}`, class: "number", "data-key": id }, ended_at ? clock(ended_at) : id.slice(-8));
const badge = (tone, ...text) => h("span", { class: `badge ${tone}` }, ...text);
const HIDDEN = new Set(["node_id", "address", "request_id"]);
const panel = (title, ...inside) => h("section", { class: "panel" }, h("h2", {}, title), ...inside);
const empty = (text) => h("p", { class: "empty" }, text);

function table(heads, rows, none) {
  if (!rows.length) return empty(none);
  const isNumber = heads.map((head) => head.startsWith("#"));
  return h("div", { class: `scroll ${heads.length < WIDE_COLUMNS ? "" : "wide"}`, tabindex: "0", role: "group", "aria-label": "table" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { scope: "col", class: isNumber[i] && "number" }, head.replace("#", ""))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: isNumber[i] && "number", "data-label": heads[i].replace("#", "") }, cell)))))));
}

// The picture.

function toneOf(node) {
  if (node.problems.some(([tone]) => tone === "bad")) return "bad";
  if (node.problems.length) return "warn";
  return node.isWatched || node.card.models.length ? (node.running ? "busy" : "good") : "";
}
const SAID = { bad: "in trouble", warn: "needs a look", busy: "answering", good: "well", "": "known by its card" };

export function bar(node) {
  const all = occupants(node), whole = Math.max(node.memory?.budget_bytes ?? 0, sum(all.map((one) => one.bytes)), 1);
  let hue = 0;
  const parts = all.map((one) => {
    const color = one.what === "cache" || one.what === "another process" ? "" : `h${hue++ % 6}`;
    return h("i", { class: `${color} ${one.state === "ready" || !one.state ? "" : "leaving"}`, style: { width: `${(100 * one.bytes) / whole}%` }, title: `${one.name}: ${bytes(one.bytes)}` });
  });
  const said = all.length ? all.map((one) => `${one.name} ${bytes(one.bytes)}`).join(", ") : "nothing";
  return h("div", { class: "bar", role: "img", "aria-label": `Memory of ${node.name}: ${said}, of ${bytes(whole)}` }, parts);
}

function served(node) {
  const own = node.models.filter((one) => one.role !== "proposer" || one.model_id !== "ngram");
  const list = own.length ? own : node.card.models.filter((one) => one.model_id !== "ngram");
  if (!list.length) return "no model";
  const first = list.find((one) => one.state === "ready") ?? list[0];
  const more = list.length > 1 ? ` +${list.length - 1}` : "";
  const state = first.state && first.state !== "ready" ? `, ${first.state}` : "";
  return `${first.model_id}${more}${state}`;
}

function rateOf(fleet, node) {
  const rates = Object.values(speeds(fleet)).flat().filter((one) => one.node === node && one.rate);
  return rates.length ? speed(Math.max(...rates.map((one) => one.rate))) : "";
}

/** The share that is done, before a name that may be cut. */
const done = (part, whole) => whole ? `${percent(Math.min(1, part / whole))} of ` : "";
const rankOf = (node) => node.card.ring ? `rank ${node.card.ring.rank} of ${node.card.ring.model_id}` : "";

/** What a node does for speed: its rate, the share of its drafts that were right, warm conversations. */
function gains(fleet, node) {
  const drafted = fleet.recent.filter((one) => one.node === node.id && one.drafted), warm = node.told.precache?.conversations;
  return [rateOf(fleet, node), drafted.length && `${percent(sum(drafted.map((one) => one.accepted)) / sum(drafted.map((one) => one.drafted)))} of drafts`, warm && `${warm} warm`].filter(Boolean).map((one) => h("span", {}, one));
}

function badges(node) {
  const found = node.problems.slice(0, 1).map(([tone, , short]) => badge(tone, short));
  const { running } = workOf([node]);
  if (running) found.push(badge("good", `${running} answering`));
  if (node.waiting.length) found.push(badge("warn", `${node.waiting.length} waiting`));
  for (const one of node.pulls) found.push(badge("accent", `${one.phase} ${done(one.done_bytes, one.bytes)}${one.name}`));
  for (const one of node.loading) found.push(badge("accent", `loading ${done(one.load?.done_bytes, one.load?.total_bytes)}${one.model_id}`));
  if (node.card.ring) found.push(badge("ring", rankOf(node)));
  if (node.card.is_authority) found.push(badge("", "authority"));
  return found;
}

const milliseconds = (rtt) => `${rtt < 10 ? rtt.toFixed(1) : Math.round(rtt)} ms`;
const wireText = ({ said, rtt }) => rtt ? `${said} · ${milliseconds(rtt)}` : said;

function tile(fleet, node, at, isDense = false) {
  const tone = toneOf(node), memory = node.memory;
  return h("li", { "data-key": node.id }, h("a", {
    class: `tile ${node.isSelf ? "self" : ""} ${tone === "bad" || tone === "warn" ? tone : ""} ${node.card.ring ? "member" : ""}`,
    href: `#/node/${encodeURIComponent(node.id)}`, style: at,
  },
    h("span", { class: "name" }, h("i", { class: `state ${tone}` }), h("b", {}, node.name), h("span", { class: "unseen" }, `, ${SAID[tone]}`), h("span", { class: "soft" }, node.isSelf && "this node")),
    memory ? bar(node) : h("div", { class: "bar" }),
    h("span", { class: "row" }, h("span", {}, served(node)), h("span", { class: "number" }, memory ? isDense ? percent(share(node)) : partOf(memory.committed_bytes, memory.budget_bytes) : bytes(node.card.memory_bytes))),
    node.link && h("span", { class: `wire ${node.link.tone}` }, wireText(node.link)),
    h("span", { class: "gains" }, gains(fleet, node)),
    h("span", { class: "badges" }, badges(node))));
}

/** This node in the middle, its peers around it; in rows where there are many, or little room. */
export function picture(fleet) {
  const { nodes, own } = fleet;
  const peers = nodes.filter((node) => node !== own);
  const isRound = peers.length > 0 && peers.length <= MOST_ROUND;
  if (!isRound) return h("div", { class: `picture ${nodes.length > DENSE ? "dense" : ""}` }, h("ul", { class: "tiles", "aria-label": "Nodes" }, nodes.map((node) => tile(fleet, node, {}, nodes.length > DENSE))));
  const tall = peers.length <= 2 ? 150 : peers.length <= 4 ? 350 : 560;
  const spot = (i) => {
    if (peers.length === 3) return [[13, 50], [87, 19], [87, 81]][i];
    if (peers.length === 4) return [[13, 19], [13, 81], [87, 19], [87, 81]][i];
    const angle = Math.PI + (2 * Math.PI * i) / peers.length;
    return [50 + 37 * Math.cos(angle), 50 + (peers.length <= 2 ? 0 : 37) * Math.sin(angle)];
  };
  const place = ([x, y]) => ({ "--x": `${x}%`, "--y": `${y}%` });
  const spots = new Map(peers.map((node, i) => [node, spot(i)]));
  spots.set(own, [50, 50]);
  const wires = peers.map((node) => {
    const [x, y] = spots.get(node);
    return h("line", { x1: "50%", y1: "50%", x2: `${x}%`, y2: `${y}%`, class: `${node.link.kind} ${node.link.tone}` });
  });
  const tags = peers.map((node) => {
    const [x, y] = spots.get(node), near = 0.51;
    return h("span", { class: `tag ${node.link.tone}`, "aria-hidden": "true", style: place([50 + near * (x - 50), 50 + near * (y - 50)]) }, h("span", {}, node.link.said), node.link.rtt && h("span", {}, milliseconds(node.link.rtt)));
  });
  return h("div", { class: `picture round ${peers.length <= 2 ? "level" : ""}`, style: { "--tall": `${tall}px` } },
    h("svg", { class: "wires", "aria-hidden": "true" }, wires), tags,
    h("ul", { class: "tiles", "aria-label": "Nodes" }, nodes.map((node) => tile(fleet, node, place(spots.get(node))))));
}

// The views.

export function fleetView(fleet, actions) {
  actions.wantWarmth(conversations(fleet).slice(0, 1).map((one) => one.last));
  const told = headline(fleet);
  return [
    h("h1", { class: "lead" }, told.lead),
    h("p", { class: "soft" }, told.rest),
    warnings(fleet.fleet.warnings ?? []),
    picture(fleet),
    ringPanel(fleet),
    downloads(fleet),
    h("h2", { class: "group" }, "Questions"),
    h("ul", { class: "asks" }, Object.keys(QUESTIONS).map((key) => {
      const { question, answer, tone } = answered(fleet, key, actions.warmth);
      return h("li", {}, h("a", { class: `ask ${tone === "good" ? "" : tone}`, href: `#/ask/${key}` }, h("span", { class: "q" }, question), h("span", { class: "a" }, answer)));
    })),
    h("div", { class: "two wide" }, panel("Last requests", requestTable(fleet, fleet.recent.slice(0, 6))), panel("Last events", timeline(happenings(fleet).slice(0, 6), fleet.nodes.length > 1, fleet.nameOf))),
  ];
}

function ringPanel(fleet) {
  const all = rings(fleet);
  if (!all.length) return null;
  const rank = ({ node, memory_mb, load, state }) => [node, memory_mb && bytes(memory_mb * 2 ** 20), load || (state !== "up" && state)].filter(Boolean).join(", ");
  return panel("Ring groups", table(["group", "state", "ranks", "split", "model"], all.map((one) => [
    one.name, badge({ up: "good", waiting: "warn" }[one.state] ?? "accent", one.state === "waiting" ? "not up" : one.state), [h("ol", { class: "ranks" }, one.ranks.map((of) => h("li", {}, rank(of)))), one.state !== "up" && one.reason && h("p", { class: "soft small" }, one.reason)],
    `${one.split}, over ${one.backend}`, [one.model.split("/").at(-1), one.answers && h("span", { class: "soft small" }, ` answers ${one.answers}`), one.restarts ? h("span", { class: "soft small" }, `, ${count(one.restarts, "restart")}`) : null],
  ]), ""));
}

/** The pulls under way; `act` makes a button of those of this node. */
function downloads(fleet, act) {
  const all = fleet.nodes.flatMap((node) => node.pulls.map((one) => ({ ...one, node })));
  return all.length > 0 && panel("Downloads", all.map((one) => h("div", { class: "pull", "data-key": `${one.node.id} ${one.name}` },
    h("p", {}, h("b", {}, one.name), ` to ${one.node.name}: ${one.phase}${one.bytes ? `, ${percent(one.done_bytes / one.bytes)}` : ""}`),
    h("progress", { max: one.bytes || 1, value: one.done_bytes, "aria-label": `Download of ${one.name}` }),
    h("p", { class: "soft small" }, [one.bytes ? partOf(one.done_bytes, one.bytes) : bytes(one.done_bytes), `${bytes(one.bytes_per_second)}/s`, one.sources.length && `from ${joined(one.sources.map((id) => fleet.nameOf(id)))}`, one.note].filter(Boolean).join(" · ")),
    act && one.node.isSelf && act("Stop", "models/stop", { model: one.name }))));
}

const warnings = (list) => list.length ? h("ul", { class: "warnings" }, list.map((one) => h("li", {}, one))) : null;

function requestTable(fleet, rows) {
  return table(["ended", "model", "node", "#first token", "#tokens/s", "#cached", "#drafts"], rows.map((one) => [
    requestLink(one), one.model, fleet.nameOf(one.backend || one.node), seconds(one.first_token_s), one.tokens_per_second ? Math.round(one.tokens_per_second) : "",
    one.prompt_tokens ? percent(one.cached_tokens / one.prompt_tokens) : "", one.drafted ? percent(one.accepted / one.drafted) : "",
  ]), "No request has ended here yet. Ask something in the chat.");
}

function timeline(events, named, nameOf = (id) => id) {
  if (!events.length) return empty("Nothing happened.");
  return h("ol", { class: "timeline" }, events.map((one) => h("li", {},
    h("time", {}, clock(one.at)),
    h("span", { class: one.level === "info" ? "" : "warn" }, named && [h("b", {}, one.node.name), " "], one.what, one.times > 1 && ` (${one.times} times)`),
    h("span", { class: "more" }, Object.entries(one.fields).filter(([key, value]) => !HIDDEN.has(key) && value !== "" && value !== "-").map(([key, value]) => `${key.replaceAll("_", " ")} ${typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(3)) : nameOf(value)}`).join(" · ")))));
}

const reasonList = (reasons) => reasons.length ? h("ul", { class: "reasons" }, reasons.slice(0, MOST_REASONS).map(([tone, text]) => h("li", { class: tone }, text)), reasons.length > MOST_REASONS && h("li", {}, `and ${reasons.length - MOST_REASONS} more`)) : null;
const crumb = (href, text) => h("p", { class: "crumb" }, h("a", { href }, text));

export function askView(fleet, key, actions) {
  const told = answered(fleet, key, actions?.warmth);
  const evidence = {
    slow: () => panel("Speeds", table(["model", "node", "#speed", "#of the fastest"], told.rows.map((one) => [one.model, nodeLink(one.node), one.rate ? speed(one.rate) : "not measured", one.share ? percent(one.share) : ""]), "No node serves a model.")),
    wait: () => [panel("Waiting now", waitTable(fleet, told.waiting)), panel("The last waits", requestTable(fleet, fleet.recent.slice(0, 8)))],
    warm: () => panel("Conversations", warmTable(fleet, actions)),
    evicted: () => panel("Evictions", table(["model", "node", "when", "why"], evictions(fleet).map((one) => [one.model, nodeLink(one.node), one.age_s ? `over ${seconds(one.age_s)} ago` : "just now", one.why]), "No model was evicted since its node started.")),
    link: () => panel("Links of this node", table(["node", "link", "#round trip", "address", "state"], told.peers.map((node) => [nodeLink(node), node.link.said, node.link.rtt ? `${node.link.rtt.toFixed(1)} ms` : "", h("span", { class: "mono" }, node.link.address), node.link.tone ? badge(node.link.tone, node.link.reasons[0][1]) : badge("good", "well")]), "This node has no peers.")),
    memory: () => memoryPanels(fleet),
    speculation: () => panel("Last answers", table(["ended", "model", "node", "#tokens", "#steps", "#tokens a step", "#accepted"], fleet.recent.filter((one) => one.forwards).slice(0, 12).map((one) => [requestLink(one), one.model, fleet.nameOf(one.node), one.completion_tokens, one.forwards, (1 + one.accepted / one.forwards).toFixed(2), one.drafted ? percent(one.accepted / one.drafted) : "no drafts"]), "No answer yet.")),
    news: () => panel("Events", timeline(told.events, fleet.nodes.length > 1, fleet.nameOf)),
  };
  return [
    crumb("#/", "Fleet"),
    h("p", { class: "soft" }, told.question),
    h("h1", { class: "lead", id: "answer" }, told.answer),
    reasonList(told.reasons),
    h("div", { style: { "margin-top": "18px" } }, evidence[key]()),
  ];
}

function waitTable(fleet, rows) {
  return table(["request", "client", "model", "at", "#so far", "#left", "waits for"], rows.map((one) => [requestLink(one), one.client, one.model, nodeLink(one.at), seconds(one.seconds), one.waits_for?.seconds ? `about ${seconds(one.waits_for.seconds)}` : "", one.waits_for?.says ?? "being prepared"]), "No request waits now.");
}

function warmTable(fleet, actions) {
  const rows = conversations(fleet).slice(0, 12);
  actions.wantWarmth(rows.map((one) => one.last));
  return table(["conversation", "model", "last turn at", "#tokens", "warm now", "#cached then"], rows.map(({ key, turns, last }) => {
    const told = actions.warmth.get(last.id);
    const warm = told?.map((one) => `${fleet.nameOf(one.node)}: ${percent(Math.min(1, one.tokens / Math.max(1, one.of)))}`);
    return [
      h("span", {}, h("span", { class: "mono" }, key.slice(-14)), h("span", { class: "soft small" }, ` ${count(turns, "turn")}`)), last.model,
      `${clock(last.ended_at)} on ${fleet.nameOf(last.node)}`, last.prompt_tokens + last.completion_tokens,
      warm ? (warm.length ? joined(warm) : "nowhere") : "…", percent(last.cached_tokens / Math.max(1, last.prompt_tokens)),
    ];
  }), "No conversation was held lately.");
}

function memoryPanels(fleet) {
  const watched = fleet.nodes.filter((node) => node.memory);
  return h("div", { class: "two", style: { "margin-top": "0" } }, watched.map((node) => {
    const all = occupants(node);
    let hue = 0;
    return h("section", { class: "panel", "data-key": node.id },
      h("div", { class: "head" }, h("h2", {}, nodeLink(node)), h("span", { class: "soft small" }, `${bytes(node.memory.committed_bytes)} of ${bytes(node.memory.budget_bytes)} · pressure ${node.memory.level}`)),
      bar(node),
      table(["what", "#size", "state"], all.map((one) => {
        const isModel = one.what !== "cache" && one.what !== "another process";
        return [h("span", {}, h("i", { class: `dot ${isModel ? `h${hue++ % 6}` : ""}` }), one.name), bytes(one.bytes), one.what === "job" ? "leased" : one.state ? `${one.state}${one.uses ? `, ${count(one.uses, "use")}` : one.idle_s ? `, idle over ${seconds(one.idle_s)}` : ""}` : one.spare ? `${bytes(one.spare)} can be had back` : one.what];
      }), "Nothing is in memory."));
  }));
}

/** The address of a peer's own page, if this browser can reach it. */
function pageOf(node) {
  if (node.isSelf || !node.told.node) return null;
  const [, host, port] = /^(.*):(\d+)$/.exec(node.told.node.http) ?? [];
  const isLocal = /^(127\.|localhost|\[::1\])/.test(host);
  if (isLocal) return node.link.kind === "loopback" ? `http://${host}:${port}/` : null;
  const named = /^(0\.0\.0\.0|\[::\])$/.test(host) ? node.link.address.replace(/:\d+$/, "") : host;
  return `${location.protocol}//${named}:${port}/`;
}

export function nodeView(fleet, id) {
  const node = fleet.byId.get(id);
  if (!node) return [crumb("#/", "Fleet"), h("h1", { class: "lead" }, "No such node is here now.")];
  const told = node.told, facts = [];
  const fact = (name, value) => value !== null && value !== undefined && value !== "" && facts.push(h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  fact("Platform", node.card.platform);
  fact("Memory of the machine", bytes(node.card.memory_bytes));
  fact("Link", node.link && wireText(node.link));
  fact("Up for over", told.node && seconds(told.node.uptime_s));
  fact("Pressure", node.memory && `${node.memory.level}${node.memory.source !== "none" ? `, by ${node.memory.source}` : ""}`);
  fact("Answers now", node.isWatched ? node.running : null);
  fact("Requests waiting", node.isWatched ? node.waiting.length : null);
  fact("Speed", rateOf(fleet, node));
  const drafted = fleet.recent.filter((one) => one.node === node.id && one.drafted);
  fact("Ring group", rankOf(node));
  fact("Drafts accepted", drafted.length ? percent(sum(drafted.map((one) => one.accepted)) / sum(drafted.map((one) => one.drafted))) : null);
  fact("Prompts kept in memory", told.prefixes && bytes(told.prefixes.pages.bytes));
  fact("Prompts kept on disk", told.prefixes && bytes(told.prefixes.disk.bytes));
  fact("Warm conversations", told.precache?.conversations);
  fact("Cached tokens", told.prefixes && told.prefixes.hit_tokens + told.prefixes.computed_tokens ? percent(told.prefixes.hit_tokens / (told.prefixes.hit_tokens + told.prefixes.computed_tokens)) : null);
  fact("Answers for peers", told.routes?.for_peers);
  fact("Id", h("span", { class: "mono small" }, node.id));
  fact("gRPC", h("span", { class: "mono small" }, node.card.grpc_address));
  const own = pageOf(node), ownPage = own && h("a", { href: own }, "Its own page");
  return [
    crumb("#/", "Fleet"),
    h("h1", { class: "lead" }, node.name),
    h("p", { class: "soft" }, node.isSelf ? "This node. " : `${SAID[toneOf(node)][0].toUpperCase()}${SAID[toneOf(node)].slice(1)}. `, ownPage),
    reasonList(node.problems),
    h("section", { class: "panel", style: { "margin-top": "18px" } }, h("dl", { class: "facts" }, facts)),
    node.memory && h("div", { style: { "margin-top": "18px" } }, memoryPanels({ nodes: [node] })),
    h("div", { class: "two" }, panel("Models", modelTable(node)), panel("Last events", timeline((told.events ?? []).slice(0, 12).map((one) => ({ ...one, node })), false, fleet.nameOf))),
  ];
}

function modelTable(node) {
  const list = node.models.length ? node.models : node.card.models;
  return table(["model", "role", "state", "#speed"], list.map((one) => [one.model_id, one.role, one.state ? stateOf(one) : "", one.tokens_per_second ? speed(one.tokens_per_second) : ""]), "It serves no model.");
}
const stateOf = (one) => badge({ ready: "good", failed: "bad", loading: "accent" }[one.state] ?? "", one.state, one.load && `: ${one.load.at}`, one.restarts ? `, ${count(one.restarts, "restart")}` : "", one.error ? `: ${one.error}` : "");

export function requestsView(fleet) {
  const { running, waiting } = workOf(fleet.nodes);
  const clients = fleet.nodes.flatMap((node) => (node.told.clients ?? []).map((one) => ({ ...one, node })));
  return [
    h("h1", { class: "lead" }, running || waiting.length ? `${count(running, "answer")} being made, ${count(waiting.length, "request")} waiting.` : "No request runs or waits."),
    h("div", { style: { "margin-top": "18px" } }, panel("Waiting", waitTable(fleet, waiting))),
    panel("Last requests", requestTable(fleet, fleet.recent.slice(0, 40))),
    panel("Clients", table(["client", "at", "#requests", "#running", "#waiting", "#refused"], clients.map((one) => [joined([one.client, one.user].filter(Boolean)), nodeLink(one.node), one.requests, one.running, one.waiting, one.refused]), "No client has asked yet.")),
  ];
}

export function requestView(fleet, id, explained) {
  const back = crumb("#/requests", "Requests");
  if (!explained) return [back, h("h1", { class: "lead mono" }, id), empty("Reading…")];
  if (explained.error) {
    const brief = fleet.recent.find((one) => one.id === id);
    return [back, h("h1", { class: "lead" }, brief ? `${fleet.nameOf(brief.via)} took this request.` : "This request is not remembered here."), h("p", { class: "soft" }, brief ? "The page of that node tells more of it." : explained.error), brief && h("div", { style: { "margin-top": "18px" } }, panel("In brief", requestTable(fleet, [brief])))];
  }
  const facts = [], fact = (name, value) => value !== null && value !== undefined && value !== "" && facts.push(h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  if (explained.state) {
    fact("State", explained.state);
    fact("Model", explained.model);
    fact("For", seconds(explained.seconds));
    return [back, h("h1", { class: "lead" }, explained.waits_for ? `It waits: ${explained.waits_for.says}.` : "It is being answered."), h("section", { class: "panel", style: { "margin-top": "18px" } }, h("dl", { class: "facts" }, facts))];
  }
  const waits = explained.waits_s;
  fact("Model", explained.model);
  fact("Prompt", count(explained.prompt_tokens, "token"));
  fact("Cached", count(explained.cached_tokens, "token"));
  fact("Answer", count(explained.completion_tokens, "token"));
  for (const [name, word] of [["load", "Waited for the model"], ["queue", "Waited in line"], ["prefill", "Prompt computed in"], ["decode", "Answer made in"], ["total", "In all"]]) fact(word, seconds(waits[name]));
  return [
    back, h("h1", { class: "lead" }, `Request ${id.slice(-8)}`), h("p", { class: "soft" }, `${explained.reason}.`),
    h("section", { class: "panel", style: { "margin-top": "18px" } }, h("dl", { class: "facts" }, facts)),
    panel("Choice of the node", explained.routes.length ? explained.routes.map((one) => h("p", {}, h("b", {}, fleet.nameOf(one.node)), `: ${one.reason}`)) : empty("No other node has the model.")),
  ];
}

export const memoryView = (fleet) => askView(fleet, "memory").slice(2);

export function eventsView(fleet) {
  return [h("h1", { class: "lead" }, answered(fleet, "news").answer), h("div", { style: { "margin-top": "18px" } }, panel("The last hour", timeline(happenings(fleet), fleet.nodes.length > 1, fleet.nameOf)))];
}

export function settingsView(config) {
  const rows = [];
  const walk = (value, path) => {
    if (value && typeof value === "object" && Object.keys(value).length) for (const [key, one] of Object.entries(value)) walk(one, path ? `${path}.${key}` : key);
    else rows.push([h("span", { class: "mono" }, path), h("span", { class: "mono" }, JSON.stringify(value))]);
  };
  if (config) walk(config, "");
  return [h("h1", { class: "lead" }, "Settings of this node"), h("p", { class: "soft" }, "Read only: they come from flags, variables and the file of --config; see kakeya-node --help."), h("section", { class: "panel", style: { "margin-top": "18px" } }, config ? table(["setting", "value"], rows, "All is as shipped.") : empty("Reading…"))];
}

export function modelsView(fleet, actions) {
  const { files, names, adapters, doing } = actions;
  const own = fleet.own, inMemory = new Map((own.memory?.residents ?? []).map((one) => [one.model, one.state]));
  const act = (text, path, body, tone = "") => h("button", { type: "button", class: `small ${tone}`, disabled: doing.has(body.model), "data-key": `${path} ${body.model}`, "aria-label": `${text} ${body.model}`, onclick: () => (!tone || confirm(`${text} ${body.model} of ${own.name}?`)) && actions.act(path, body) }, text);
  const led = new Set((own.told.rings?.led ?? []).map((one) => one.name));
  const bases = own.models.filter((one) => one.role === "verifier" && !led.has(one.model_id)).map((one) => one.model_id);
  const memoryAction = ({ model_id, manifest }) => {
    const state = inMemory.get(model_id);
    if (!manifest) return "";
    if (led.has(model_id)) return h("span", { class: "soft small" }, "ring group");
    if (!state) return act("Load", "models/load", { model: model_id });
    return state === "ready" ? act("Unload", "models/unload", { model: model_id }) : h("span", { class: "soft small" }, state);
  };
  const pull = (event) => {
    event.preventDefault();
    const field = event.target.elements.model;
    actions.act("models/pull", { model: field.value.trim() });
    field.value = "";
  };
  // A pull may fail after the answer to its request.
  const failed = new Set([actions.failed, ...Object.values(own.told.weights?.failed ?? {})].filter(Boolean));
  const add = async (event) => {
    event.preventDefault();
    const form = event.target, told = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
    if (await actions.act("adapters/add", told, told.name)) form.reset();
  };
  return [
    h("h1", { class: "lead" }, `Models of ${own.name}`),
    h("p", { class: "soft" }, "A model is loaded by its first request and leaves memory when others need the room; that is seldom a thing to do by hand."),
    h("div", { role: "alert" }, warnings([...failed])),
    h("div", { style: { "margin-top": "18px" } }, panel("Served", table(["model", "action", "role", "state", "#running", "#waiting", "#context"], own.models.map((one) => [
      one.model_id, memoryAction(one), one.role, stateOf(one), one.running ?? "", one.waiting ?? "", one.context_tokens?.toLocaleString("en") ?? "",
    ]), "It serves no model."))),
    downloads(fleet, act),
    panel("On the disks of the fleet",
      h("form", { class: "line", style: { "margin-bottom": "10px" }, onsubmit: pull }, h("label", { class: "unseen", for: "pull" }, "Model to pull"), h("input", { id: "pull", name: "model", required: true, placeholder: "Name in the list, or ORG/NAME of the hub" }), h("button", {}, "Pull")),
      files ? table(["model", "action", "#size", "here", "at peers"], files.data.map((one) => [
        one.id, !one.path ? act("Pull", "models/pull", { model: one.id }) : one.is_pulled ? act("Remove", "models/remove", { model: one.id }, "danger") : "", bytes(one.bytes), one.path ? [one.is_pulled ? "pulled" : "yes", one.is_kept && "kept", one.loaded_as ? "loaded" : one.configured_as && "configured"].filter(Boolean).join(", ") : "no", joined([...one.peers, ...one.fetching.map((name) => `${name} (comes)`)]),
      ]), "No model lies on the disks of this node and its peers.") : empty("Reading…")),
    panel("Adapters",
      bases.length > 0 && h("form", { class: "line", style: { "margin-bottom": "10px" }, onsubmit: add },
        field("adapter-name", "Name", { name: "name", size: "12" }),
        h("label", { class: "unseen", for: "adapter-base" }, "Base of the adapter"), h("select", { id: "adapter-base", name: "base" }, bases.map((name) => h("option", { value: name }, name))),
        field("adapter-folder", `Folder on ${own.name}`, { name: "folder" }), h("button", {}, "Add")),
      table(["adapter", "action", "state", "#size", "#rank", "in a slot on", "#in use", "#uses a minute"], adapterRows(fleet, adapters ?? [], names ?? [], act), adapters ? "No adapter is registered." : "Reading…")),
  ];
}

const field = (id, said, more) => [h("label", { class: "unseen", for: id }, said), h("input", { id, required: true, placeholder: said, ...more })];

/** Those of this node, and those that only peers have. */
function adapterRows(fleet, own, names, act) {
  const hot = fleet.nodes.flatMap((node) => Object.entries(node.told.adapters?.models ?? {}).flatMap(([base, told]) => told.hot.map((one) => ({ ...one, base, node, slots: told.slots }))));
  const others = names.filter((one) => one.parent && !own.some((other) => other.id === one.id));
  return [...own, ...others].map((one) => {
    const uses = hot.filter((other) => other.adapter.split("@")[0] === one.id), tone = { hot: "good", warm: "accent" }[one.tier] ?? "";
    return [
      one.id, one.tier ? act("Remove", "adapters/remove", { model: one.id }, "danger") : "", one.problem ? badge("bad", one.problem) : one.tier ? [badge(tone, one.tier), ` ${one.precision}`] : "at peers", one.bytes ? bytes(one.bytes) : "", one.rank ?? "",
      joined(uses.map((other) => other.node.name)), sum(uses.map((other) => other.leases)), Math.round(sum(uses.map((other) => other.uses))),
    ];
  });
}

export function leasesView(fleet) {
  const rows = fleet.nodes.flatMap((node) => (node.memory?.leases?.leases ?? []).map((one) => ({ ...one, node })));
  const held = rows.filter((one) => one.state === "granted");
  const problems = fleet.nodes.map((node) => node.memory?.leases?.problem).filter(Boolean);
  return [
    h("h1", { class: "lead" }, held.length ? `${bytes(sum(held.map((one) => one.bytes)))} leased to ${count(held.length, "other process", "other processes")}.` : "No other process leases memory."),
    h("p", { class: "soft" }, "A job beside the models, such as training, leases its memory with kakeya lease run."),
    warnings(problems),
    h("div", { style: { "margin-top": "18px" } }, panel("Leases", table(["name", "at", "state", "priority", "#leased", "#used", "#for over", "note"], rows.map((one) => [one.name, nodeLink(one.node), badge(one.is_over ? "warn" : { granted: "good", waiting: "accent" }[one.state] ?? "", one.state), one.priority, bytes(one.bytes), bytes(one.used_bytes ?? 0), seconds(one.for_s), [...one.resources, one.is_over && "uses more than it leased", one.note].filter(Boolean).join(", ")]), "None now."))),
  ];
}
