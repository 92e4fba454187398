// What the facts mean: the fleet as one value, and the answers to the eight questions of its owner.
// Pure: facts in, words and figures out. Each answer has a short text, a tone ("", "good", "warn",
// "bad"), and the reasons it rests on.

import { bytes, clock, count, joined, median, percent, seconds, speed, sum } from "./dom.js";

const SLOW = 0.7;
const UNTOLD_S = 1; // a request that waits for nothing it could name is told of from then on
export const WARM = 0.5; // the share of a conversation from which on it counts as warm
const USUAL_RTT_MS = { loopback: 5, thunderbolt: 3, lan: 10, tailscale: 60, public: 150 };
const KINDS = { loopback: "local", thunderbolt: "Thunderbolt", lan: "LAN", tailscale: "Tailscale", public: "internet" };

/** The fleet, from the sections of all nodes by node id; this node first, the others by name. Of `odd` nodes only the card counts, which this node made. */
export function fleetOf(sections, odd = new Set()) {
  const nodes = Object.entries(sections).map(([id, told]) => nodeOf(id, odd.has(id) ? { card: told.card } : told)).filter((node) => node.card);
  nodes.sort((a, b) => b.isSelf - a.isSelf || a.name.localeCompare(b.name, undefined, { numeric: true }));
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const own = nodes.find((node) => node.isSelf) ?? null;
  for (const node of nodes) node.problems = problemsOf(node);
  for (const node of nodes) if (odd.has(node.id)) node.problems.push(["warn", "what it tells of itself cannot be read here: is it of another version?", "unreadable"]);
  const nameOf = (id) => byId.get(id)?.name ?? id;
  return { nodes, own, byId, nameOf, fleet: own?.told.fleet ?? {}, recent: recentOf(nodes) };
}

function nodeOf(id, told) {
  const card = told.card, memory = told.memory ?? null;
  const models = (told.models ?? []).filter((one) => one.state);
  return {
    id, card, told, memory, models,
    isSelf: Boolean(card?.is_self),
    isWatched: Boolean(told.node),
    name: card?.label || id,
    link: card && !card.is_self ? linkOf(card) : null,
    running: sum(models.map((one) => one.running ?? 0)),
    waiting: (told.requests ?? []).filter((one) => one.waits_for || one.seconds >= UNTOLD_S),
    pulls: told.weights?.pulls ?? [],
    loading: models.filter((one) => one.state === "loading"),
  };
}

function linkOf(card) {
  const way = card.endpoints.find((one) => one.address === (card.route?.address ?? card.grpc_address));
  const isHere = /^(127\.|localhost|\[::1\])/.test(card.grpc_address);
  const kind = card.route?.network || way?.network || (isHere ? "loopback" : "");
  const rtt = card.route?.rtt_ms || card.rtt_ms || way?.rtt_ms || null;
  const usual = USUAL_RTT_MS[kind];
  const reasons = [];
  if (card.is_suspect) reasons.push(["bad", "it does not answer this node now", "no answer"]);
  if (card.doubt === "asymmetric") reasons.push(["warn", "others reach it, and this node does not", "not reached"]);
  if (card.route?.is_downgraded) reasons.push(["warn", `its better link, ${KINDS[card.route.best] ?? card.route.best}, does not answer`, "worse link"]);
  if (usual && rtt > 3 * usual) reasons.push(["warn", `a round trip takes ${rtt.toFixed(1)} ms, and over ${KINDS[kind]} usually less than ${usual} ms`, "slow link"]);
  const tone = reasons.some(([one]) => one === "bad") ? "bad" : reasons.length ? "warn" : "";
  return { kind, said: KINDS[kind] ?? (kind || "unknown link"), rtt, reasons, tone, address: card.route?.address ?? card.grpc_address };
}

function problemsOf(node) {
  const found = [];
  if (node.link?.tone) found.push(...node.link.reasons);
  if (node.told.node?.not_serving) found.push(["bad", node.told.node.not_serving, "not serving"]);
  const level = node.memory?.level;
  if (level && level !== "nominal") found.push([level === "critical" ? "bad" : "warn", `memory pressure is ${level} (${node.memory.source})`, `pressure ${level}`]);
  for (const one of node.told.rings?.led ?? []) if (one.state === "waiting") found.push(["warn", `ring group ${one.name} is not up: ${one.reason}`, `ring ${one.name} not up`]);
  for (const one of node.models) if (one.state === "failed") found.push(["bad", `${one.model_id} is not served: ${one.error}`, `${one.model_id} failed`]);
  return found;
}

/** The last requests that all watched nodes took, the newest first, with the node that served each. */
function recentOf(nodes) {
  const all = nodes.flatMap((node) => (node.told.recent ?? []).map((one) => ({ ...one, via: node.id, node: one.node || node.id })));
  return all.sort((a, b) => b.ended_at - a.ended_at);
}

const named = (nodes) => joined([...nodes.slice(0, 3).map((node) => node.name), ...(nodes.length > 3 ? [count(nodes.length - 3, "other")] : [])]);

export function headline(fleet) {
  const { nodes, own } = fleet;
  if (!own) return { lead: "Reading the fleet…", rest: "", tone: "" };
  const troubled = nodes.filter((node) => node.problems.length);
  const silent = troubled.filter((node) => node.card.is_suspect);
  const { running, waiting } = workOf(nodes);
  const work = running || waiting.length ? `${count(running, "answer")} being made${waiting.length ? `, ${count(waiting.length, "request")} waiting` : ""}` : "idle";
  const rest = `${count(nodes.length, "node")}, ${work}.`;
  if (silent.length) return { lead: `${named(silent)} ${silent.length > 1 ? "do" : "does"} not answer.`, rest, tone: "bad" };
  if (troubled.length) return { lead: `${named(troubled)} ${troubled.length > 1 ? "need" : "needs"} a look.`, rest, tone: "warn" };
  const loading = nodes.flatMap((node) => node.loading.map((one) => `${one.model_id} on ${node.name}`));
  if (loading.length) return { lead: `Loading ${joined(loading.slice(0, 2))}.`, rest, tone: "" };
  return { lead: "All is well.", rest, tone: "good" };
}

/** The speeds of each model by node: tokens per second of its last answers, else as it measured. */
export function speeds(fleet) {
  if (fleet.speeds) return fleet.speeds;
  const found = fleet.speeds = {};
  for (const node of fleet.nodes) for (const one of node.models) {
    if (one.role !== "verifier") continue;
    const rates = fleet.recent.filter((r) => r.node === node.id && r.model.split(":")[0] === one.model_id && r.tokens_per_second).slice(0, 8).map((r) => r.tokens_per_second);
    const rate = median(rates) ?? (one.tokens_per_second || null);
    (found[one.model_id] ??= []).push({ node, model: one, rate, answers: rates.length });
  }
  return found;
}

function whySlow(fleet, { node, model }) {
  const reasons = node.problems.map(([tone, text]) => [tone, text]);
  if (node.card.is_careful) reasons.push(["warn", "it runs on a battery or is in use, and keeps to a part of its power"]);
  if (node.running > 1) reasons.push(["", `${node.running} answers share its model now`]);
  if (node.waiting.length) reasons.push(["", `${count(node.waiting.length, "request")} wait there`]);
  if (node.loading.length) reasons.push(["", `it loads ${joined(node.loading.map((one) => one.model_id))}`]);
  if (node.pulls.length) reasons.push(["", `it fetches ${joined(node.pulls.map((one) => one.name))}`]);
  if (model.restarts) reasons.push(["warn", `the engine of ${model.model_id} was restarted ${count(model.restarts, "time")}`]);
  const of = fleet.recent.filter((one) => one.node === node.id && one.drafted);
  if (of.length && sum(of.map((one) => one.accepted)) < 0.1 * sum(of.map((one) => one.drafted))) reasons.push(["", "hardly any draft is accepted there"]);
  if (node.memory?.profile?.name && node.memory.profile.name !== "normal") reasons.push(["warn", `it saves memory: ${node.memory.profile.reason}`]);
  return reasons.length ? reasons : [["", `the ${model.device || "machine"} itself: ${bytes(node.card.memory_bytes)} of memory, ${node.card.platform}; nothing else holds it up`]];
}

function slow(fleet) {
  const rows = [], late = [];
  for (const [model, list] of Object.entries(speeds(fleet))) {
    const best = Math.max(...list.map((one) => one.rate ?? 0));
    for (const one of list) {
      const isSlow = one.rate && list.length > 1 && one.answers !== 1 && one.rate < SLOW * best;
      rows.push({ model, node: one.node, rate: one.rate, share: best && one.rate ? one.rate / best : null, isSlow });
      if (isSlow) late.push({ ...one, best });
    }
  }
  for (const node of fleet.nodes.filter((one) => one.problems.length && !late.some((other) => other.node === one))) late.push({ node, model: node.models[0] ?? { model_id: "" }, rate: null });
  late.sort((a, b) => (a.rate ?? 0) / (a.best ?? 1) - (b.rate ?? 0) / (b.best ?? 1));
  const reasons = late.flatMap((one) => whySlow(fleet, one).map(([tone, text]) => [tone || "warn", `${one.node.name}: ${text}`]));
  const measured = rows.filter((one) => one.rate).length;
  let answer = "None is: nothing holds a node up.";
  if (late.length) {
    const [first] = late;
    answer = first.rate ? `${first.node.name}: ${speed(first.rate)}, the fastest ${speed(first.best)}.` : `${first.node.name}: ${whySlow(fleet, first)[0][1]}.`;
  } else if (fleet.nodes.length > 1 && measured < 2) answer = "None seems so: too few speeds to compare.";
  return { answer, tone: late.length ? "warn" : "good", reasons, rows };
}

/** The answers being made, and the requests that wait, each with its node. An engine counts the
    requests whose prompts it reads among those that run. */
export function workOf(nodes) {
  const waiting = nodes.flatMap((node) => node.waiting.map((one) => ({ ...one, at: node })));
  const read = waiting.filter((one) => one.waits_for?.reason === "prompt").length;
  return { waiting, running: Math.max(0, sum(nodes.map((node) => node.running)) - read) };
}

function wait(fleet) {
  const all = workOf(fleet.nodes).waiting;
  const worst = [...all].sort((a, b) => b.seconds - a.seconds)[0];
  const reasons = all.map((one) => ["warn", `${one.id} of ${one.client || "an unnamed client"} at ${one.at.name}: ${one.waits_for?.says ?? "it is being prepared"}, for ${seconds(one.seconds)} so far`]);
  return {
    answer: worst ? `${count(all.length, "request")}: ${worst.waits_for?.says ?? "being prepared"}.` : "No request waits now.",
    tone: worst ? "warn" : "good", reasons, waiting: all,
  };
}

/** The conversations of the last requests that this node took, each with its last turn. */
export function conversations(fleet) {
  const found = new Map();
  for (const one of fleet.recent.filter(({ via }) => via === fleet.own?.id)) {
    const key = one.conversation || one.id;
    const known = found.get(key);
    if (known) known.turns += 1;
    else if (!one.backend) found.set(key, { key, turns: 1, last: one });
  }
  return [...found.values()];
}

function warm(fleet, warmth) {
  const [first] = conversations(fleet);
  if (!first) return { answer: "No conversation was held lately.", tone: "", reasons: [] };
  const { last } = first;
  const now = warmth.get(last.id);
  if (!now) return { answer: `Its last turn was on ${fleet.nameOf(last.node)}.`, tone: "", reasons: [] };
  if (!now.length) return { answer: "No: no node has it now.", tone: "warn", reasons: [["warn", "its next turn computes the whole prompt"]] };
  const isWhole = now[0].tokens > WARM * now[0].of;
  const answer = `${isWhole ? "Yes" : "In part"}, on ${joined(now.slice(0, 2).map((one) => fleet.nameOf(one.node)))}: ${now[0].tokens} of ${count(now[0].of, "token")}.`;
  return { answer, tone: isWhole ? "good" : "", reasons: [] };
}

export function evictions(fleet) {
  return fleet.nodes.flatMap((node) => (node.memory?.last_evictions ?? []).map((one) => ({ ...one, node }))).sort((a, b) => a.age_s - b.age_s);
}

function evicted(fleet) {
  const all = evictions(fleet);
  const pages = fleet.nodes.filter((node) => node.told.prefixes?.evicted);
  const reasons = all.map((one) => ["", `${one.model} on ${one.node.name}, ${one.age_s ? `over ${seconds(one.age_s)} ago` : "just now"}: ${one.why}`]);
  for (const node of pages) reasons.push(["", `${node.name}: ${count(node.told.prefixes.evicted, "block")} of old prompts made room for new ones`]);
  const answer = all.length ? `${all[0].model} on ${all[0].node.name}: ${all[0].why}.` : pages.length ? "No model; old prompts made room for new ones." : "Nothing was evicted since the start.";
  return { answer, tone: all.length ? "" : "good", reasons };
}

function link(fleet) {
  const peers = fleet.nodes.filter((node) => node.link);
  const degraded = peers.filter((node) => node.link.tone);
  const reasons = degraded.flatMap((node) => node.link.reasons.map(([tone, text]) => [tone, `${node.name}: ${text}`]));
  const answer = degraded.length ? `${degraded[0].name}: ${degraded[0].link.reasons[0][1]}.` : peers.length ? "No: every node answers as it should." : "This node has no peers.";
  return { answer, tone: degraded.some((node) => node.link.tone === "bad") ? "bad" : degraded.length ? "warn" : "good", reasons, peers };
}

/** The ring groups of the fleet: as their leaders tell of them, else as cards do. */
export function rings(fleet) {
  const led = fleet.nodes.flatMap((node) => node.told.rings?.led ?? []);
  const others = (fleet.fleet.rings ?? []).filter((one) => !led.some(({ id, name }) => id === one.id || name === one.model_id));
  return [...led, ...others.map((one) => ({ ...one, name: one.model_id, model: "", state: "up", reason: "", ranks: one.nodes.map((name) => ({ node: name ?? "a node that does not answer", state: "up" })) }))];
}

/** What occupies the memory of a node, the largest first. */
export function occupants(node) {
  const memory = node.memory;
  if (!memory) return [];
  const leases = new Map((memory.leases?.leases ?? []).map((one) => [one.id, one.name]));
  const nameOf = ({ model, role }) => role === "ring-rank" ? `rank ${model.split("#").at(-1)} of ${model.split("#")[0]}` : leases.get(model) || model;
  const found = memory.residents.map((one) => ({ name: nameOf(one), what: one.role, bytes: one.lent_bytes, state: one.state, uses: one.leases, idle_s: one.idle_s, isPinned: one.is_pinned }));
  for (const one of memory.tenants) if (one.held_bytes) found.push({ name: one.name === "pages" ? "pages of prompts" : one.name, what: "cache", bytes: one.held_bytes, state: "", spare: one.spare_bytes });
  for (const [name, size] of Object.entries(memory.foreign ?? {})) found.push({ name, what: "another process", bytes: Number(size), state: "" });
  return found.filter((one) => one.bytes).sort((a, b) => b.bytes - a.bytes);
}

function memory(fleet) {
  const rows = fleet.nodes.flatMap((node) => occupants(node).map((one) => ({ ...one, node })));
  rows.sort((a, b) => b.bytes - a.bytes);
  const fullest = fleet.nodes.filter((node) => node.memory).sort((a, b) => share(b) - share(a))[0];
  if (!fullest) return { answer: "No node tells of its memory.", tone: "", reasons: [], rows };
  const [first] = rows;
  const answer = first ? `Mostly ${first.name} on ${first.node.name}, ${bytes(first.bytes)}; ${fullest.name} is ${percent(share(fullest))} full.` : "Nothing is in memory.";
  return { answer, tone: "", reasons: [], rows };
}

export const share = (node) => node.memory?.budget_bytes ? Math.min(1, node.memory.committed_bytes / node.memory.budget_bytes) : 0;

function speculation(fleet) {
  const of = fleet.recent.filter((one) => one.forwards);
  const tokens = sum(of.map((one) => one.completion_tokens)), forwards = sum(of.map((one) => one.forwards));
  const drafted = sum(of.map((one) => one.drafted)), accepted = sum(of.map((one) => one.accepted));
  if (!forwards) return { answer: "No answer with an account yet.", tone: "", reasons: [] };
  const gain = 1 + accepted / forwards;
  const reasons = [
    [gain > 1.05 ? "good" : "", `${count(tokens, "token")} of the last ${count(of.length, "answer")} took ${count(forwards, "step")} of the model: ${gain.toFixed(2)} tokens a step`],
    ["", drafted ? `${accepted.toLocaleString("en")} of ${drafted.toLocaleString("en")} draft tokens that the model looked at were accepted, ${percent(accepted / drafted)}` : "no draft was looked at: the controller found that none would pay"],
  ];
  const byNode = Map.groupBy ? [...Map.groupBy(of, (one) => one.node)] : [];
  if (byNode.length > 1) for (const [node, list] of byNode) reasons.push(["", `${fleet.nameOf(node)}: ${(1 + sum(list.map((one) => one.accepted)) / sum(list.map((one) => one.forwards))).toFixed(2)} tokens a step`]);
  const answer = gain > 1.05 ? `Yes: ${gain.toFixed(2)} tokens a step${drafted ? `, ${percent(accepted / drafted)} of drafts accepted` : ""}.` : `Hardly: ${gain.toFixed(2)} tokens a step.`;
  return { answer, tone: gain > 1.05 ? "good" : "", reasons };
}

/** The lines of the logs of all watched nodes, and what their memory tells, the newest first. */
export function happenings(fleet) {
  const lines = fleet.nodes.flatMap((node) => (node.told.events ?? []).map((one) => ({ ...one, node })));
  return lines.sort((a, b) => b.at - a.at);
}

function news(fleet) {
  const since = Date.now() / 1000 - 3600;
  const all = happenings(fleet).filter((one) => one.at >= since);
  const bad = all.filter((one) => one.level !== "info");
  const [first] = bad.length ? bad : all;
  const answer = first ? `${count(all.length, "event")}${bad.length ? `, ${count(bad.length, "warning")}` : ""}; at ${clock(first.at)}: ${first.what}.` : "Nothing.";
  return { answer, tone: bad.length ? "warn" : "", reasons: [], events: all };
}

export const QUESTIONS = {
  slow: ["Which Mac is slow, and why?", slow],
  wait: ["Why does my request wait?", wait],
  warm: ["Is my conversation warm, and where?", warm],
  evicted: ["What was evicted, and why?", evicted],
  link: ["Is a link degraded?", link],
  memory: ["Who uses the memory?", memory],
  speculation: ["Does speculation help?", speculation],
  news: ["What changed in the last hour?", news],
};

/** The answer to a question; `warmth` has, by request, what each node has of it now. */
export const answered = (fleet, key, warmth = new Map()) => ({ key, question: QUESTIONS[key][0], ...QUESTIONS[key][1](fleet, warmth) });
