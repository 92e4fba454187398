// The page: one stream of facts in, the view that the address names out.

import { fleetOf, WARM } from "./answers.js";
import { startChat } from "./chat.js";
import { h, morphChildren } from "./dom.js";
import * as views from "./views.js";

const WARM_TRIES = 3;
const AGAIN_S = [0.5, 1, 2, 5, 10];
const VIEWS = [["", "Fleet"], ["chat", "Chat"], ["requests", "Requests"], ["memory", "Memory"], ["models", "Models"], ["leases", "Leases"], ["events", "Events"], ["settings", "Settings"]];
const GATHER_MS = 250; // facts that come within it are drawn together
const KEY = "kakeya.key", THEME = "kakeya.theme";
const find = (id) => document.getElementById(id);

const page = { sections: Object.create(null), odd: new Set(), fleet: fleetOf({}), link: "opening", problem: "", needsKey: false, config: null, explained: new Map(), due: false, isTaken: false, said: "", stop: new AbortController() };

// Calls of the node's API.

export async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(key ? { authorization: `Bearer ${key}` } : {}), ...(options.body ? { "content-type": "application/json" } : {}), ...options.headers };
  const answer = await fetch(path, { ...options, headers, body: options.body && JSON.stringify(options.body) });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  if ((answer.status === 401 || answer.status === 403) && path.startsWith("/api/v1/")) { page.needsKey = true; show(); }
  const error = new Error(said.error?.message ?? `the node answered ${answer.status}`);
  error.status = answer.status;
  throw error;
}

/** Yield the data of each event of a stream, and its comments as `{ comment }`. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const lines = text.split("\n");
      text = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ")) yield { data: line.slice(6) };
        else if (line.startsWith(": ")) yield { comment: line.slice(2) };
      }
    }
  } finally {
    reader.cancel().catch(() => null); // the connection of a stream that is left early
  }
}

// The facts.

async function watch() {
  page.stop.abort(); // the watch before, if it goes on
  const { signal } = (page.stop = new AbortController());
  for (let tries = 0; ; tries += 1) {
    try {
      const stream = await call("/api/v1/events", { signal });
      page.sections = Object.create(null);
      for await (const { data } of eventsOf(stream)) {
        if (!data) continue;
        tries = 0;
        page.link = "open";
        take(JSON.parse(data).nodes);
      }
    } catch (problem) {
      if (signal.aborted) return;
      page.problem = problem.message;
      if (page.needsKey) return;
    }
    page.link = "lost";
    show();
    await new Promise((done) => setTimeout(done, 1000 * AGAIN_S[Math.min(tries, AGAIN_S.length - 1)]));
  }
}

function take(nodes) {
  for (const [id, told] of Object.entries(nodes)) {
    const known = (page.sections[id] ??= Object.create(null));
    page.odd.delete(id);
    for (const [name, value] of Object.entries(told)) if (value === null) delete known[name]; else known[name] = value;
    if (!Object.keys(known).length) delete page.sections[id];
  }
  if (page.isTaken) return;
  page.isTaken = true;
  setTimeout(() => { page.isTaken = false; readable(() => null); show(); }, page.fleet.own ? GATHER_MS : 0);
}

/** Read the fleet, and make what depends on it. A peer tells of itself what it likes: where that stops the making, only the peer's card counts, until it tells other facts. */
function readable(make) {
  const tried = (odd) => { page.fleet = fleetOf(page.sections, odd); return make(); };
  try { return tried(page.odd); } catch (problem) { console.warn(problem); }
  const peers = Object.keys(page.sections).filter((id) => !page.sections[id].card?.is_self);
  const isOdd = (id) => { try { tried(new Set(peers.filter((other) => other !== id))); return false; } catch { return true; } };
  page.odd = new Set(peers.filter(isOdd));
  return tried(page.odd);
}

/** Show what is known at the next frame, once however many facts came. */
function show() {
  if (page.due) return;
  page.due = true;
  requestAnimationFrame(() => { page.due = false; draw(); });
}

// The view.

const actions = {
  files: null,
  names: null,
  adapters: null,
  doing: new Set(),
  failed: "",
  /** Read what the view of models shows beside the stream. */
  async readModels() {
    const read = (path) => call(path).then((answer) => answer.json()).catch((problem) => { actions.failed ||= problem.message; return { data: [] }; });
    const [files, names, adapters] = await Promise.all(["/api/v1/models", "/v1/models", "/api/v1/adapters"].map(read));
    Object.assign(actions, { files, names: names.data, adapters: adapters.data });
    show();
  },
  /** Have the node do something; whether it did. What failed is shown. */
  async act(path, body, name = body.model) {
    actions.failed = "";
    actions.doing.add(name);
    show();
    try { await call(`/api/v1/${path}`, { method: "POST", body }); } catch (problem) { actions.failed = problem.message; }
    actions.doing.delete(name);
    await actions.readModels();
    return !actions.failed;
  },
  warmth: new Map(),
  /** Ask which nodes have the KV of requests now; the answer is in `warmth`, null until it is there. */
  wantWarmth(records) {
    for (const one of records) {
      if (actions.warmth.has(one.id)) continue;
      actions.warmth.set(one.id, null);
      readWarmth(one, 0);
    }
  },
};

async function readWarmth(record, tries) {
  const told = await call(`/api/v1/requests/${encodeURIComponent(record.id)}`).then((answer) => answer.json()).catch(() => ({}));
  // What an engine has just computed is found a moment later.
  if (!told.warm?.some((one) => one.tokens > WARM * one.of) && tries < WARM_TRIES && Date.now() / 1000 - record.ended_at < 30) setTimeout(() => readWarmth(record, tries + 1), 1500);
  else actions.warmth.set(record.id, told.warm ?? []);
  show();
}

const decoded = (word) => { try { return decodeURIComponent(word); } catch { return word; } };
const where = () => location.hash.replace(/^#\/?/, "").split("/").map(decoded);

function drawn() {
  const [view, id] = where();
  if (page.needsKey) return keyForm();
  if (!page.fleet.own) return [h("p", { class: "empty" }, page.link === "lost" ? `The node does not answer: ${page.problem}. Trying again…` : "Reading the fleet…")];
  switch (view) {
    case "ask": return views.askView(page.fleet, id, actions);
    case "node": return views.nodeView(page.fleet, id);
    case "requests": return views.requestsView(page.fleet);
    case "request": return views.requestView(page.fleet, id, explained(id));
    case "memory": return views.memoryView(page.fleet);
    case "models": return views.modelsView(page.fleet, actions);
    case "leases": return views.leasesView(page.fleet);
    case "events": return views.eventsView(page.fleet);
    case "settings": return views.settingsView(settings());
    default: return views.fleetView(page.fleet, actions);
  }
}

function explained(id) {
  if (!page.explained.has(id)) {
    page.explained.set(id, null);
    call(`/api/v1/requests/${encodeURIComponent(id)}`).then((answer) => answer.json()).catch((problem) => ({ error: problem.message })).then((told) => { page.explained.set(id, told); show(); });
  }
  return page.explained.get(id);
}

function settings() {
  if (page.config === null) {
    page.config = false;
    call("/api/v1/config").then((answer) => answer.json()).then((told) => { page.config = told; show(); }, () => { page.config = {}; });
  }
  return page.config;
}

function keyForm() {
  const given = sessionStorage.getItem(KEY);
  const submit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, new FormData(event.target).get("key").trim());
    page.needsKey = false;
    show();
    watch();
  };
  return [
    h("h1", { class: "lead" }, "This node asks for an admin key."),
    h("p", { class: "soft" }, "Make one on the node itself with ", h("code", {}, "kakeya key add NAME --role admin"), ". It stays in this tab."),
    given && h("p", { class: "error" }, page.problem),
    h("form", { class: "line", style: { "margin-top": "16px", "max-width": "560px" }, onsubmit: submit }, h("label", { class: "unseen", for: "key" }, "Admin key"), h("input", { id: "key", name: "key", type: "password", autocomplete: "off", required: true, placeholder: "Admin key" }), h("button", { class: "main" }, "Open")),
  ];
}

function draw() {
  const [view] = where();
  document.body.dataset.view = view || "fleet";
  const at = { ask: "", node: "", request: "requests" }[view] ?? view;
  morphChildren(find("nav"), [h("ul", {}, VIEWS.map(([key, name]) => h("li", { class: key === "chat" && "only-chat" }, h("a", { href: `#/${key}`, "aria-current": key === at && "page" }, name))))]);
  morphChildren(find("main"), readable(drawn).flat(9).filter(Boolean));
  const link = find("link"), said = { open: "live", lost: "no connection", opening: "connecting" }[page.needsKey ? "lost" : page.link];
  link.dataset.state = page.link;
  if (link.textContent !== said) link.textContent = said;
  const lead = document.querySelector("main h1")?.textContent ?? "";
  document.title = view ? `${lead} · Kakeya` : "Kakeya";
  const news = page.fleet.own && !view ? lead : "";
  if (news && news !== page.said) find("says").textContent = page.said = news;
}

function theme(wanted) {
  const names = { "": "Auto", light: "Light", dark: "Dark" };
  if (wanted) document.documentElement.dataset.theme = wanted; else delete document.documentElement.dataset.theme;
  localStorage.setItem(THEME, wanted);
  const button = find("theme"), order = ["", "light", "dark"];
  button.textContent = `◐ ${names[wanted]}`;
  button.setAttribute("aria-label", `Colours: ${names[wanted]}. Change them`);
  button.onclick = () => theme(order[(order.indexOf(wanted) + 1) % 3]);
}

theme(localStorage.getItem(THEME) ?? "");
function arrive() {
  actions.failed = "";
  if (where()[0] === "models") actions.readModels();
}

addEventListener("hashchange", () => {
  arrive();
  page.explained.clear();
  actions.warmth.clear();
  page.config = page.config || null;
  draw();
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  scrollTo(0, 0);
  if (where()[0] !== "chat") find("main").focus({ preventScroll: true });
});
startChat(find("chat"), { call, eventsOf, fleet: () => page.fleet });
draw();
arrive();
watch();
