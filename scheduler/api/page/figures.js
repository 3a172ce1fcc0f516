// What an operator wants to see, computed from two scrapes of /metrics. Touches neither the page nor the network.
// scheduler/top/ computes the same for the terminal; a test holds the two together.

export const TIMES = {
  "first token": "purefill_time_to_first_token_seconds",
  "between tokens": "purefill_inter_token_seconds",
  "in the queue": "purefill_wait_seconds",
  "of that held": "purefill_hold_seconds",
  "prefill batch": "purefill_prefill_seconds",
  "handoff": "purefill_handoff_seconds",
  "decode step": "purefill_decode_step_seconds",
  "whole request": "purefill_request_seconds",
};
export const QUANTILES = [0.5, 0.9, 0.99];
const START_TIME = "purefill_start_time_seconds";
const PASSES = {
  prefill: ["purefill_prefill_seconds", "purefill_prefill_tokens_total"],
  decode: ["purefill_decode_step_seconds", "purefill_output_tokens_total"],
};

/** The scrape that `text`, in Prometheus' text format, holds; `at` is when it came, in seconds. */
export function parseScrape(text, at) {
  const series = new Map(); // sample name -> Map of written labels -> {labels, value}
  const counters = new Set();
  for (const line of text.split("\n")) {
    const type = /^# TYPE (\S+) (\S+)/.exec(line);
    if (type) {
      for (const name of sampleNames(type[1], type[2])) {
        if (!series.has(name)) series.set(name, new Map());
        if (type[2] === "counter" || type[2] === "histogram") counters.add(name);
      }
      continue;
    }
    const sample = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!sample) continue;
    const [, name, written = "", value] = sample;
    if (!series.has(name)) series.set(name, new Map());
    series.get(name).set(written, { labels: parseLabels(written), value: parseNumber(value) });
  }
  return { at, series, counters };
}

function sampleNames(family, kind) {
  if (kind === "counter") return [family.endsWith("_total") ? family : `${family}_total`];
  if (kind === "histogram") return ["_bucket", "_sum", "_count"].map((end) => family + end);
  return [family];
}

function parseLabels(written) {
  const labels = {};
  for (const [, name, value] of written.matchAll(/([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g)) {
    labels[name] = value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
  }
  return labels;
}

function parseNumber(text) {
  return text.endsWith("Inf") ? (text.startsWith("-") ? -Infinity : Infinity) : Number(text);
}

/** Whether the scheduler, whose counters these are, was started again since `earlier`. */
export function beganAnew(scrape, earlier) {
  const pool = { pool: "scheduler" };
  if (valueOf(scrape, START_TIME, pool) !== valueOf(earlier, START_TIME, pool)) return true;
  for (const name of scrape.counters) {
    for (const [written, { value }] of scrape.series.get(name)) {
      if (value < (earlier.series.get(name)?.get(written)?.value ?? 0)) return true;
    }
  }
  return false;
}

/** The samples of a metric that have these labels, or lack them; null if there is no such metric. */
function chosen(scrape, name, wanted = {}) {
  const series = scrape.series.get(name);
  if (!series) return null;
  const pairs = Object.entries(wanted);
  return [...series.values()].filter(({ labels }) => pairs.every(([key, text]) => (labels[key] ?? text) === text));
}

/** A metric's value, summed over the chosen samples; null if there is no such metric. */
function valueOf(scrape, name, wanted) {
  const samples = chosen(scrape, name, wanted);
  return samples && samples.reduce((sum, { value }) => sum + value, 0);
}

/** The values of a metric by a label, as a Map; null if there is no such metric. */
function valuesBy(scrape, name, label, wanted) {
  const samples = chosen(scrape, name, wanted);
  if (!samples) return null;
  const sums = new Map();
  for (const { labels, value } of samples) {
    const key = labels[label] ?? "";
    sums.set(key, (sums.get(key) ?? 0) + value);
  }
  return sums;
}

/** The time between two scrapes of one run of the service. */
export class Interval {
  constructor(start, end) {
    this.start = start;
    this.end = end;
    this.seconds = end.at - start.at;
  }

  increase(name, wanted) {
    const after = valueOf(this.end, name, wanted);
    return after === null ? null : after - (valueOf(this.start, name, wanted) ?? 0);
  }

  rate(name, wanted) {
    const grown = this.increase(name, wanted);
    return grown === null || this.seconds <= 0 ? null : grown / this.seconds;
  }

  rates(name, label, wanted) {
    const after = valuesBy(this.end, name, label, wanted);
    if (after === null || this.seconds <= 0) return null;
    const before = valuesBy(this.start, name, label, wanted) ?? new Map();
    const keys = [...after.keys()].sort();
    return Object.fromEntries(keys.map((key) => [key, (after.get(key) - (before.get(key) ?? 0)) / this.seconds]));
  }

  mean(histogram) {
    const count = this.increase(`${histogram}_count`);
    return count ? this.increase(`${histogram}_sum`) / count : null;
  }

  /** Interpolated within a bucket, as Prometheus' histogram_quantile does; null if nothing was observed. */
  quantile(histogram, q) {
    const after = valuesBy(this.end, `${histogram}_bucket`, "le");
    if (after === null) return null;
    const before = valuesBy(this.start, `${histogram}_bucket`, "le") ?? new Map();
    const counts = [...after]
      .map(([le, count]) => [parseNumber(le), count - (before.get(le) ?? 0)])
      .sort((a, b) => a[0] - b[0]);
    const all = counts.at(-1)?.[1] ?? 0;
    if (counts.length < 2 || all <= 0) return null;
    let [lower, below] = [0, 0];
    for (const [upper, upto] of counts.slice(0, -1)) {
      if (upto >= q * all && upto > below) {
        return lower + ((upper - lower) * (q * all - below)) / (upto - below);
      }
      [lower, below] = [upper, upto];
    }
    return counts.at(-2)[0];
  }
}

/** Owns the scrapes of the last seconds. */
export class History {
  constructor(spanS) {
    this.spanS = spanS;
    this.scrapes = [];
  }

  /** Take in the newest scrape; whether the service was started again, and those before are gone. */
  add(scrape) {
    const restarted = this.scrapes.length > 0 && beganAnew(scrape, this.scrapes.at(-1));
    if (restarted) this.scrapes = [];
    this.scrapes.push(scrape);
    while (this.scrapes.length > 2 && scrape.at - this.scrapes[1].at >= this.spanS) this.scrapes.shift();
    return restarted;
  }

  interval() {
    return new Interval(this.scrapes[0], this.scrapes.at(-1));
  }
}

/** What the service did in an interval, per second, and its state at the end. null: not told, or nothing happened. */
export function figuresOf(interval) {
  const padding = interval.increase("purefill_prefill_padding_tokens_total");
  const computed = interval.increase("purefill_prefill_tokens_total");
  return {
    seconds: interval.seconds,
    model: labelOf(interval.end, "purefill_queue_requests", "model"),
    version: labelOf(interval.end, "purefill_build_info", "version"),
    waitingRequests: valueOf(interval.end, "purefill_queue_requests"),
    waitingTokens: valueOf(interval.end, "purefill_queue_tokens"),
    liveRequests: valueOf(interval.end, "purefill_live_requests"),
    requests: interval.rates("purefill_requests_total", "outcome"),
    rejections: interval.rates("purefill_rejections_total", "reason"),
    requeues: interval.rates("purefill_requeues_total", "reason"),
    promptTokens: interval.rate("purefill_prefill_tokens_total"),
    outputTokens: interval.rate("purefill_output_tokens_total"),
    batches: interval.rates("purefill_batches_total", "reason"),
    batchRequests: interval.mean("purefill_prefill_batch_requests"),
    batchTokens: interval.mean("purefill_prefill_batch_tokens"),
    paddingShare: padding === null || computed === null || padding + computed <= 0 ? null : padding / (padding + computed),
    replays: interval.rates("purefill_graph_replays_total", "bucket", { pool: "prefill" }),
    eagerSteps: interval.rates("purefill_eager_steps_total", "reason"),
    times: Object.fromEntries(
      Object.entries(TIMES).map(([title, name]) => [title, QUANTILES.map((q) => interval.quantile(name, q))]),
    ),
    pages: pagesOf(interval.end),
    workers: workerNames(interval.end).map(([pool, name]) => workerOf(interval, pool, name)),
    workerStates: toObject(valuesBy(interval.end, "purefill_workers", "state")),
  };
}

function toObject(map) {
  return map && Object.fromEntries(map);
}

function labelOf(scrape, name, label) {
  const [first] = scrape.series.get(name)?.values() ?? [];
  return first?.labels[label] ?? null;
}

/** Pool and name of each worker that counts anything: prefill first, prefill-2 before prefill-10. */
function workerNames(scrape) {
  const names = new Map();
  for (const metric of ["purefill_prefill_seconds_count", "purefill_decode_step_seconds_count", START_TIME]) {
    for (const { labels } of scrape.series.get(metric)?.values() ?? []) {
      if (labels.pool in PASSES && "worker" in labels) names.set(`${labels.pool} ${labels.worker}`, [labels.pool, labels.worker]);
    }
  }
  const order = ([pool, name]) => [pool === "prefill" ? 0 : 1, name.length, name];
  return [...names.values()].sort((a, b) => compare(order(a), order(b)));
}

function compare(a, b) {
  const i = a.findIndex((part, at) => part !== b[at]);
  return i < 0 ? 0 : a[i] < b[i] ? -1 : 1;
}

function workerOf(interval, pool, name) {
  const [seconds, tokens] = PASSES[pool];
  const own = { pool, worker: name };
  const peak = valueOf(interval.end, "purefill_device_peak_flops", own);
  const flops = interval.increase("purefill_prefill_flops_total", own);
  const computing = interval.increase(`${seconds}_sum`, own);
  return {
    name,
    pool,
    busyShare: interval.rate(`${seconds}_sum`, own),
    passes: interval.rate(`${seconds}_count`, own),
    tokens: interval.rate(tokens, own),
    utilisation: flops !== null && computing && peak ? flops / computing / peak : null,
    restarts: valueOf(interval.end, "purefill_worker_restarts_total", own),
  };
}

function pagesOf(scrape) {
  const workers = new Map();
  for (const { labels, value } of scrape.series.get("purefill_kv_pages")?.values() ?? []) {
    const worker = labels.worker ?? "";
    if (!workers.has(worker)) workers.set(worker, { worker, used: null, reserved: null, free: null });
    workers.get(worker)[labels.state] = value;
  }
  return [...workers.values()].sort((a, b) => (a.worker < b.worker ? -1 : 1));
}
