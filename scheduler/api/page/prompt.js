// One prompt: sent, streamed, and where its time went.

import { draw, duration, make, row } from "./format.js";

const STAGES = [
  ["queued", "waited for a free prefill worker, or for room to decode"],
  ["held", "held for others to join its batch"],
  ["prefill", "at a prefill worker, with the rest of its batch"],
  ["handoff", "its KV pages were on their way to the decode worker"],
  ["decode", "all tokens after the first"],
  ["messages", "between the processes, and tokenising"],
];

/** The body of a request, and its path. */
export function requestOf(kind, model, prompt, maxTokens, temperature) {
  const shared = {
    model,
    max_tokens: maxTokens,
    temperature,
    stream: true,
    stream_options: { include_usage: true },
    return_timings: true,
  };
  return kind === "chat"
    ? ["v1/chat/completions", { ...shared, messages: [{ role: "user", content: prompt }] }]
    : ["v1/completions", { ...shared, prompt }];
}

/** Yields the JSON of each server-sent event of an answer. Throws the error that one holds. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ") || frame === "data: [DONE]") continue;
      const event = JSON.parse(frame.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** The seconds of each stage, by name. */
export function stagesOf(timings) {
  const seconds = Object.fromEntries(STAGES.map(([name]) => [name, timings[`${name}_s`] ?? 0]));
  const known = Object.values(seconds).reduce((sum, part) => sum + part, 0);
  seconds.messages = Math.max(timings.total_s - known, 0);
  return seconds;
}

/** Show the stages as a bar and as a table. */
export function showTimeline(timings, bar, body) {
  const seconds = stagesOf(timings);
  const total = Object.values(seconds).reduce((sum, part) => sum + part, 0) || 1;
  bar.setAttribute("viewBox", "0 0 1000 1");
  let x = 0;
  const parts = STAGES.map(([name], i) => {
    const width = (1000 * seconds[name]) / total;
    const part = draw("rect", { class: `s${i}`, x, y: 0, width, height: 1 });
    part.append(draw("title", {}, `${name} ${duration(seconds[name])}`));
    x += width;
    return part;
  });
  bar.replaceChildren(...parts);
  bar.setAttribute("aria-label", STAGES.map(([name]) => `${name} ${duration(seconds[name])}`).join(", "));
  body.replaceChildren(
    ...STAGES.map(([name, what], i) => {
      const made = row("", duration(seconds[name]), what);
      made.firstChild.append(make("span", { class: `swatch s${i}` }), name);
      return made;
    }),
    row("first token", duration(timings.first_token_s), "after the request came"),
    row("all", duration(timings.total_s), `of which ${duration(timings.detokenise_s)} to make text of tokens`),
  );
}
