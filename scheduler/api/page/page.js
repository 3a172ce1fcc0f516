// The page: asks the service for its metrics and shows them, and sends a prompt.

import { figuresOf, History, parseScrape, QUANTILES } from "./figures.js";
import { DASH, duration, make, number, row, share } from "./format.js";
import { Plot } from "./plots.js";
import { eventsOf, requestOf, showTimeline } from "./prompt.js";

const POLL_MS = 2000;
const SPAN_S = 10; // as in `purefill top`: single batches do not make rates jump
const NUM_POINTS = 90; // three minutes
const TIMEOUT_MS = 10_000;
const KEY = "purefill-api-key";

const byId = (id) => document.getElementById(id);
const rate = (value) => number(value, " /s");
const history = new History(SPAN_S);
let model = null;

const plots = [
  new Plot("Waiting", (f) => ({ requests: f.waitingRequests }), number, NUM_POINTS),
  new Plot("Batches", (f) => f.batches, rate, NUM_POINTS),
  new Plot("Tokens", (f) => ({ prompt: f.promptTokens, output: f.outputTokens }), rate, NUM_POINTS),
  new Plot("First token", (f) => quantilesOf(f.times["first token"]), duration, NUM_POINTS),
  new Plot("Between tokens", (f) => quantilesOf(f.times["between tokens"]), duration, NUM_POINTS),
  new Plot("Padding", (f) => ({ "share of prefill": f.paddingShare }), share, NUM_POINTS),
];

function quantilesOf([p50, , p99]) {
  return { p50, p99 };
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const words = body?.error?.message ?? `the service answers with status ${response.status}`;
  throw Object.assign(new Error(words), { status: response.status });
}

function wordsOf(error) {
  // fetch throws a TypeError when there is no answer at all.
  return error instanceof TypeError || error.name === "TimeoutError" ? "does not answer; asking again" : error.message;
}

function say(id, text, isBad = false) {
  const element = byId(id);
  // Said again, it would be read out again.
  if (element.textContent !== text) element.textContent = text;
  element.classList.toggle("bad", isBad);
}

// What the service does.

async function poll() {
  let figures = null;
  try {
    const response = await ask("metrics", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    const restarted = history.add(parseScrape(await response.text(), performance.now() / 1000));
    figures = figuresOf(history.interval());
    say("state", restarted ? "started again: rates begin anew" : "answers");
    // The metrics are open to all, prompts may need a key.
    if (model === null || restarted) await askModel().catch((error) => say("state", wordsOf(error), true));
  } catch (error) {
    say("state", error.status === 404 ? "the metrics are at another port" : wordsOf(error), true);
  }
  for (const plot of plots) plot.add(figures);
  if (figures !== null) showTables(figures);
  if (!document.hidden) setTimeout(poll, POLL_MS);
}

async function askModel() {
  const { data } = await (await ask("v1/models")).json();
  model = data[0].id;
  byId("model").textContent = model;
}

function showTables(figures) {
  byId("span").textContent = figures.seconds ? `last ${Math.round(figures.seconds)} s` : "";
  fillTable("times", ["", ...QUANTILES.map((q) => `p${100 * q}`)],
    Object.entries(figures.times).map(([title, values]) => row(title, ...values.map(duration))));
  fillTable("batches", ["left because", "batches", ""], [
    ...bars(figures.batches),
    row("requests in each", number(figures.batchRequests), ""),
    row("tokens in each", number(figures.batchTokens), ""),
    row("padding", share(figures.paddingShare), ""),
  ]);
  fillTable("replays", ["bucket", "passes", ""], [
    ...bars(figures.replays),
    ...listed("without a graph", figures.eagerSteps),
  ]);
  fillTable("requests", ["", ""], [
    row("not ended", number(figures.liveRequests)),
    row("waiting", `${number(figures.waitingRequests)} (${number(figures.waitingTokens)} tokens)`),
    ...listed("ended", figures.requests),
    ...listed("turned away", figures.rejections),
    ...listed("queued again", figures.requeues),
  ]);
  const states = Object.entries(figures.workerStates ?? {}).filter(([, count]) => count > 0);
  byId("worker-states").textContent = states.map(([state, count]) => `${count} ${state}`).join(", ");
  fillTable("workers", ["", "busy", "passes/s", "tokens/s", "FLOPs", "died"], figures.workers.map((worker) =>
    row(worker.name, share(worker.busyShare), number(worker.passes), number(worker.tokens),
      share(worker.utilisation), number(worker.restarts))));
  fillTable("pages", ["", "used", "reserved", "free", ""], figures.pages.map(pagesRow));
}

function pagesRow({ worker, used, reserved, free }) {
  const taken = (used ?? 0) + (reserved ?? 0);
  return row(worker, number(used), number(reserved), number(free), meter(taken, taken + (free ?? 0)));
}

function meter(value, most) {
  return make("meter", { min: 0, max: most || 1, value, "aria-hidden": "true" });
}

function bars(rates) {
  const entries = Object.entries(rates ?? {}).sort(([a], [b]) => (parseInt(a) || 0) - (parseInt(b) || 0));
  const most = Math.max(0, ...entries.map(([, value]) => value));
  if (!entries.length) return [row(DASH, "", "")];
  return entries.map(([name, value]) => row(name, rate(value), meter(value, most)));
}

/** One row for each rate that is not 0, or one that says so. */
function listed(title, rates) {
  const moving = Object.entries(rates ?? {}).filter(([, value]) => value > 0);
  if (!moving.length) return [row(title, rates === null ? DASH : rate(0))];
  return moving.map(([name, value]) => row(`${title}: ${name}`, rate(value)));
}

function fillTable(id, heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make(text ? "th" : "td", text ? { scope: "col" } : {}, text)));
  byId(id).replaceChildren(make("thead", {}, head), make("tbody", {}, ...(rows.length ? rows : [row(DASH)])));
}

// A prompt.

let sending = null;

async function sendPrompt(submitted) {
  submitted.preventDefault();
  if (sending !== null) return;
  sending = new AbortController();
  setSending(true);
  byId("answer").textContent = "";
  byId("timeline").hidden = true;
  say("outcome", "sent");
  try {
    if (model === null) await askModel();
    await stream(sending.signal);
  } catch (error) {
    if (error.name === "AbortError") say("outcome", "stopped");
    else say("outcome", error instanceof TypeError ? "the service does not answer" : error.message, true);
  }
  sending = null;
  setSending(false);
}

async function stream(signal) {
  const [path, body] = requestOf(
    byId("kind").value, model, byId("prompt").value, byId("max-tokens").valueAsNumber, byId("temperature").valueAsNumber,
  );
  const sentAt = performance.now();
  const headers = { "Content-Type": "application/json" };
  const response = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const answer = byId("answer");
  let firstAt = null;
  let end = null;
  let usage = null;
  for await (const event of eventsOf(response)) {
    usage = event.usage ?? usage;
    const choice = event.choices[0];
    if (!choice) continue;
    const text = choice.text ?? choice.delta?.content ?? "";
    if (text) {
      firstAt ??= performance.now();
      answer.append(text);
      answer.scrollTop = answer.scrollHeight;
    }
    if (choice.finish_reason) end = choice;
  }
  if (end === null) throw new Error("the stream ended before its last token");
  const seconds = (performance.now() - sentAt) / 1000;
  const first = firstAt === null ? "" : `, first text here after ${duration((firstAt - sentAt) / 1000)}`;
  say("outcome", `${usage?.prompt_tokens} tokens in, ${usage?.completion_tokens} out (${end.finish_reason})` +
    `${first}, all after ${duration(seconds)}`);
  if (end.timings) {
    showTimeline(end.timings, byId("timeline-bar"), byId("timeline-table").tBodies[0]);
    byId("timeline").hidden = false;
  }
}

function setSending(is) {
  byId("send").disabled = is;
  byId("stop").disabled = !is;
}

// The start.

byId("plots").append(...plots.map((plot) => plot.element));
byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key").addEventListener("input", () => {
  sessionStorage.setItem(KEY, byId("key").value.trim());
  model = null;
});
byId("key-form").addEventListener("submit", (submitted) => submitted.preventDefault());
byId("prompt-form").addEventListener("submit", sendPrompt);
byId("prompt").addEventListener("keydown", (pressed) => {
  if (pressed.key === "Enter" && (pressed.ctrlKey || pressed.metaKey)) byId("prompt-form").requestSubmit();
});
byId("stop").addEventListener("click", () => sending?.abort());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
poll();
