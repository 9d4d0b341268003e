// The live page. Asks /ui/state every two seconds and changes what has changed; every
// text from outside goes in by textContent.
"use strict";

const PERIOD_MS = 2000;
const byId = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function span(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

const ENGINE_CELLS = [
  ["", (e) => [e.id, element("small", `${e.role}, ${e.model}`)]],
  ["State", (e) => [element("span", e.state, { serving: "hit", draining: "miss" }[e.state] ?? "bad")]],
  ["Requests", (e) => [count(e.in_flight)]],
  ["Blocks kept, of the budget", (e) => kept(e)],
  ["Free", (e) => [e.blocks ? `${count(e.blocks.free)} of ${count(e.blocks.total)}` : "not told yet"]],
  ["Leases", (e) => [e.blocks && e.role === "decode" ? count(e.blocks.leases) : "–"]],
];

function kept({ id, blocks }) {
  if (!blocks) return ["not told yet"];
  if (!blocks.budget) return [count(blocks.retained)];
  const meter = element("meter");
  meter.max = blocks.budget;
  meter.value = Math.min(blocks.retained, blocks.budget);
  meter.setAttribute("aria-label", `Blocks that ${id} keeps`);
  return [`${count(blocks.retained)} of ${count(blocks.budget)}`, meter];
}

const CONVERSATION_CELLS = [
  ["", (c) => [c.id, element("small", `${c.tenant}, ${c.model}`)]],
  ["Turn", (c) => [c.turn ? count(c.turn) : "not counted", element("small", `${span(c.ago_s)} ago`), ...trace(c)]],
  ["Outcome", (c) => [element("span", c.outcome, outcomeClass(c.outcome)), element("small", c.why)]],
  ["Reused tokens", (c) => [`${count(c.reused_tokens)} of ${count(c.prompt_tokens)}`]],
  ["Kept by", (c) => holder(c.lease)],
  ["TTFT of the last turns", (c) => sparkline(c.ttfts)],
];

function outcomeClass(outcome) {
  if (outcome === "hit" || outcome === "ok") return "hit";
  return outcome.startsWith("miss") || outcome === "off" ? "miss" : "bad";
}

function trace({ trace_url: url, turn, id }) {
  if (!url) return [];
  const link = element("a", "trace");
  link.href = url;
  link.rel = "noopener";
  link.setAttribute("aria-label", `trace of turn ${turn} of ${id}`);
  return [link];
}

function holder(lease) {
  if (!lease) return ["nobody"];
  const facts = [lease.left_s ? `${span(lease.left_s)} left` : "ending", `${count(lease.tokens)} tokens`];
  if (lease.readers) facts.push(plural(lease.readers, "reader"));
  return [lease.holder, element("small", facts.join(", "))];
}

// Of a conversation none of whose turns had a first token: why the last one had none.
const NO_ANSWER = {
  ok: "no first token: the answer was empty",
  client_error: "no first token: the request was refused",
  failed: "no first token: the turn failed",
  disconnected: "no first token: the client went away",
};

// A bar a turn, full for a hit and hollow for a miss.
function sparkline(turns) {
  const known = turns.filter((turn) => turn.s !== null);
  if (!known.length) return [NO_ANSWER[turns.at(-1)?.end] ?? "no answer yet"];
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const longest = Math.max(...known.map((turn) => turn.s));
  svg.setAttribute("viewBox", "0 0 160 32");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const words = known.map((turn) => `turn ${turn.turn} ${span(turn.s)}${turn.hit ? ", hit" : ""}`);
  svg.setAttribute("aria-label", `Time to first token: ${words.join("; ")}`);
  known.forEach((turn, index) => {
    const bar = document.createElementNS(space, "rect");
    const height = Math.max(2, (turn.s / longest) * 29);
    const place = { x: index * 10 + 1, y: 31 - height, width: 7, height };
    for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value);
    bar.setAttribute("fill", turn.hit ? "currentColor" : "none");
    bar.setAttribute("stroke", "currentColor");
    svg.append(bar);
  });
  return [span(known.at(-1).s), svg];
}

// Rows that stay the same elements while they show the same thing, so that focus and a
// screen reader's place survive a change.
class Rows {
  constructor(table, cells, keyOf) {
    this.body = table.tBodies[0];
    this.empty = table.nextElementSibling;
    this.cells = cells;
    this.keyOf = keyOf;
    this.rows = new Map();
    this.texts = new WeakMap();
  }

  show(records) {
    const keys = new Set(records.map(this.keyOf));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    const inUse = this.body.contains(document.activeElement);
    records.forEach((record, index) => {
      const row = this.row(this.keyOf(record));
      this.fill(row, record);
      // What is in use is not moved away from under its user.
      if (!inUse && this.body.children[index] !== row) this.body.insertBefore(row, this.body.children[index] ?? null);
    });
    this.empty.hidden = records.length > 0;
  }

  row(key) {
    const known = this.rows.get(key);
    if (known) return known;
    const row = element("tr");
    row.setAttribute("role", "row");
    this.cells.forEach(([label], index) => {
      const cell = element(index ? "td" : "th");
      cell.setAttribute("role", index ? "cell" : "rowheader");
      if (index) cell.dataset.label = label;
      else cell.scope = "row";
      if (["Turn", "Requests", "Free", "Leases", "Reused tokens"].includes(label)) cell.className = "number";
      // One child, so that a card's cell has its label beside it.
      cell.append(element("div"));
      row.append(cell);
    });
    this.rows.set(key, row);
    this.body.append(row);
    return row;
  }

  fill(row, record) {
    this.cells.forEach(([, make], index) => {
      const box = row.cells[index].firstChild;
      const made = element("div");
      made.append(...make(record));
      if (this.texts.get(box) === made.innerHTML) return;
      const focused = box.contains(document.activeElement);
      this.texts.set(box, made.innerHTML);
      box.replaceChildren(...made.childNodes);
      if (focused) box.querySelector("a")?.focus();
    });
  }
}

const engines = new Rows(byId("engines"), ENGINE_CELLS, (e) => `${e.role}/${e.id}`);
const conversations = new Rows(byId("conversations"), CONVERSATION_CELLS, (c) => JSON.stringify([c.tenant, c.model, c.id]));

// What is worth being read out: an engine's new state, a problem's end, what a search
// found. Not every turn.
const known = new Map();
function news(state) {
  const said = [];
  const there = new Map(state.engines.map((e) => [e.id, e.state]));
  for (const [id, now] of there) if (known.size && known.get(id) !== now) said.push(`${id} is ${now}`);
  for (const id of known.keys()) if (!there.has(id)) said.push(`${id} is gone`);
  known.clear();
  for (const [id, now] of there) known.set(id, now);
  if (said.length) byId("news").textContent = said.join(". ");
}

function problem(text) {
  const box = byId("problem");
  if (box.textContent !== text) box.textContent = text;
  box.hidden = !text;
}

let paused = false;
let timer = 0;
let asked = 0;

async function update() {
  clearTimeout(timer);
  const mine = ++asked;
  const wanted = byId("filter").value.trim();
  try {
    const response = await fetch(`/ui/state?filter=${encodeURIComponent(wanted)}`, { signal: AbortSignal.timeout(10000) });
    const state = await response.json();
    if (mine !== asked) return;
    if (!response.ok) throw new Error(state.error.message);
    problem(state.problem);
    news(state);
    engines.show(state.engines);
    if (state.conversations) {
      conversations.show(state.conversations);
      tell(state, wanted);
    }
  } catch (error) {
    if (mine !== asked) return;
    problem(`The router does not answer: what is below may be old. (${error.message})`);
  }
  if (!paused && !document.hidden) timer = setTimeout(update, PERIOD_MS);
}

function tell({ conversations: shown, total }, wanted) {
  byId("freshness").textContent = paused ? "Paused." : `As of ${new Date().toLocaleTimeString()}.`;
  const rest = total - shown.length;
  const found = `${plural(total, "conversation")}${wanted ? ` with “${wanted}” in the id` : ""}`;
  const text = rest > 0 ? `${found}: the latest ${shown.length} are shown, ${count(rest)} are not.` : `${found}.`;
  byId("count").textContent = text;
  byId("conversations").nextElementSibling.textContent = wanted ? "None found." : "No conversation yet.";
  if (wanted && tell.last !== wanted) byId("news").textContent = text;
  tell.last = wanted;
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", paused);
  byId("freshness").textContent = paused ? "Paused." : "";
  if (paused) clearTimeout(timer);
  else update();
});
byId("filter").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(update, 200);
});
document.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  update();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) update();
});
update();
