// The chat: a conversation with a model or a task of the fleet, streamed, and a receipt for each answer.

import { count, h, morphChildren, percent, seconds, speed } from "./dom.js";

export function startChat(root, { call, eventsOf, fleet }) {
  const chat = { names: [], model: "", turns: [], id: newId(), busy: null };
  const show = () => draw(root, chat, act, fleet());

  const act = {
    choose(name) { chat.model = name; },
    anew() { chat.busy?.abort(); chat.turns = []; chat.id = newId(); show(); root.querySelector("textarea").focus(); },
    stop() { chat.busy?.abort(); },
    look: () => names(),
    async send(text) {
      const turn = { role: "assistant", text: "", thought: "", waits: "sent", receipt: null, error: "" };
      chat.turns.push({ role: "user", text }, turn);
      chat.busy = new AbortController();
      show();
      try { await answer(turn); } catch (problem) { if (problem.name !== "AbortError") turn.error = problem.message; else turn.stopped = true; }
      turn.waits = "";
      chat.busy = null;
      show();
    },
  };

  async function answer(turn) {
    // A question without an answer is left out: a model would see two questions in a row.
    const isKept = (one, i, all) => one.text && (one.role !== "user" || !all[i + 1] || all[i + 1].text);
    const messages = chat.turns.slice(0, -1).filter(isKept).map(({ role, text }) => ({ role, content: text }));
    const body = { model: chat.model, messages, stream: true, stream_options: { include_usage: true }, conversation_id: chat.id };
    const began = performance.now();
    const stream = await call("/v1/chat/completions", { method: "POST", body, signal: chat.busy.signal });
    const receipt = { id: stream.headers.get("x-request-id") ?? "", task: stream.headers.get("x-kakeya-task") ?? "", first: null };
    for await (const { data, comment } of eventsOf(stream)) {
      if (comment !== undefined) turn.waits = comment;
      else if (data !== "[DONE]") {
        const chunk = JSON.parse(data), delta = chunk.choices?.[0]?.delta ?? {};
        if (chunk.error) throw new Error(chunk.error.message);
        if (delta.content || delta.reasoning_content) { receipt.first ??= (performance.now() - began) / 1000; turn.waits = ""; }
        turn.text += delta.content ?? "";
        turn.thought += delta.reasoning_content ?? "";
        if (chunk.usage) receipt.usage = chunk.usage;
        receipt.model = chunk.model ?? receipt.model;
      }
      show();
    }
    receipt.total = (performance.now() - began) / 1000;
    turn.receipt = receipt;
    show();
    explained(receipt.id).then((told) => { receipt.told = told; show(); });
  }

  /** What the node tells of a request: its record is written a moment after the end of its answer. */
  async function explained(id) {
    for (const pause_ms of [0, 250, 1000, 3000]) {
      await new Promise((done) => setTimeout(done, pause_ms));
      const told = await call(`/api/v1/requests/${encodeURIComponent(id)}`).then((one) => one.json()).catch(() => null);
      if (told?.waits_s) return told;
    }
    return null;
  }

  async function names() {
    const told = await call("/v1/models").then((one) => one.json()).catch(() => ({ data: [] }));
    chat.names = told.data.filter((one) => one.role !== "embedder" && !one.modalities?.output?.includes("image"));
    if (!chat.names.some((one) => one.id === chat.model)) chat.model = chat.names[0]?.id ?? "";
    show();
  }

  show();
  names();
  root.addEventListener("focusin", (event) => { if (event.target.tagName === "SELECT" || !chat.model) names(); });
}

const newId = () => `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;

function draw(root, chat, act, fleet) {
  const talk = root.querySelector(".talk");
  const isAtEnd = !talk || talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  const groups = [["Tasks", chat.names.filter((one) => one.kind === "task")], ["Models", chat.names.filter((one) => one.kind !== "task" && !one.parent)], ["Adapters", chat.names.filter((one) => one.parent)]];
  const submit = async (event) => {
    event.preventDefault();
    if (!chat.model) await act.look(); // at the start, and where a key is given late
    const area = root.querySelector("textarea"), text = area.value.trim();
    if (!text || chat.busy || !chat.model) return;
    area.value = "";
    act.send(text);
  };
  morphChildren(root, [
    h("div", { class: "head" },
      h("label", {}, h("span", { class: "unseen" }, "Model or task"), h("select", { onchange: (event) => act.choose(event.target.value) }, groups.filter(([, list]) => list.length).map(([name, list]) => h("optgroup", { label: name }, list.map((one) => h("option", { value: one.id, selected: one.id === chat.model }, one.id)))))),
      h("button", { type: "button", class: "quiet", onclick: act.anew, disabled: !chat.turns.length }, "New chat")),
    h("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: "0" }, chat.turns.length ? chat.turns.map((turn) => said(turn, fleet)) : h("p", { class: "hint" }, chat.names.length ? "Ask something. Each answer says where it was made, how long it waited, and what was warm." : "No model can be asked yet.")),
    h("form", { onsubmit: submit },
      h("label", { class: "unseen", for: "ask" }, "Message"),
      h("textarea", { id: "ask", rows: "1", placeholder: "Message", onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event); } }),
      chat.busy ? h("button", { type: "button", onclick: act.stop }, "Stop") : h("button", { class: "main" }, "Send")),
  ]);
  const select = root.querySelector("select"); // options that come later may leave another one chosen
  if (chat.model && select.value !== chat.model) select.value = chat.model;
  if (isAtEnd) root.querySelector(".talk").scrollTop = 1e9;
}

function said(turn, fleet) {
  if (turn.role === "user") return h("div", { class: "said user" }, turn.text);
  return h("div", { class: "said assistant" },
    turn.thought && h("p", { class: "thought" }, turn.thought),
    pieces(turn.text),
    turn.waits && h("p", { class: "waits" }, turn.text ? "" : `${turn.waits.replace(/^waiting:? ?/, "waiting ")}…`),
    turn.error && h("p", { class: "error" }, turn.error),
    turn.stopped && h("p", { class: "waits" }, "Stopped."),
    turn.receipt && receiptOf(turn.receipt, fleet));
}

/** Text with its fenced code apart. */
const pieces = (text) => text.split(/```/).map((piece, i) => i % 2 ? piece.trim() && h("pre", {}, piece.replace(/^[\w+-]*\n/, "")) : piece && h("span", {}, piece));

function receiptOf({ id, task, first, total, model, usage, told }, fleet) {
  const badge = (...text) => h("span", { class: "badge" }, ...text);
  const node = told && (told.routes.at(-1)?.node ?? fleet.own?.id);
  const waited = told?.waits_s && (told.waits_s.load ?? 0) + (told.waits_s.queue ?? 0);
  const cached = usage?.prompt_tokens_details?.cached_tokens, account = usage?.kakeya;
  const made = usage?.completion_tokens, spent = total - (first ?? total);
  return h("div", { class: "receipt" },
    told && badge(told.backend ? `by ${told.backend}` : `on ${fleet.nameOf(node)}`),
    task && badge(`${task.split(";")[0]}: ${model}`),
    waited !== undefined && waited !== null && badge(`waited ${seconds(waited)}`),
    first !== null && badge(`first word in ${seconds(first)}`),
    made > 1 && spent > 0 && badge(speed((made - 1) / spent)),
    cached !== undefined && badge(`${count(cached, "token")} of ${usage.prompt_tokens} cached`),
    account && badge(account.verified ? `${account.accepted} of ${account.verified} drafts accepted, ${percent(account.accepted / account.verified)}` : "no drafts"),
    id && h("a", { class: "badge accent", href: `#/request/${encodeURIComponent(id)}` }, "why"));
}
