// The playground: asks the server for streams with reveals, keeps what came as traces, and draws any moment of them.
// What a model, a server or a file says becomes text on the page through textContent only, never markup.

const $ = (id) => document.getElementById(id);
const clone = (id) => $(id).content.firstElementChild.cloneNode(true);
const LONGEST = 65536; // positions of a run that is loaded from a file

const page = {
  card: null, // the model, as /v1/models describes it
  sides: [], // settings of one or two decoders
  turns: [], // of the conversation: a question, and what was decoded for it
  lanes: [], // those of the turn whose canvas is shown
  forward: 0, // the moment that is shown
  following: true, // whether that is the latest one, whatever comes
  aborter: null, // of the run under way
  timer: null, // of the replay under way
  drawing: false, // a redraw is due with the next frame
};

// ---------------------------------------------------------------- A trace: all that a stream said

class Trace {
  constructor(request) {
    Object.assign(this, { request, begin: null, reveals: [], end: null, text: "" });
    this.places = []; // per position: what was revealed there, and when
    this.finals = null; // per position: what stood there in the end; null is a mask
    this.exist = [1]; // blocks that exist after so many forwards
  }

  get forwards() {
    return this.reveals.length;
  }

  take(name, data) {
    if (name === "begin") {
      this.begin = data;
      this.places = Array(data.gen_length).fill(null);
    } else if (name === "reveal") {
      this.reveals.push(data);
      this.exist.push(Math.max(this.exist.at(-1), ...data.blocks.map((block) => block + 1)));
      data.positions.forEach((at, k) => {
        this.places[at] = { token: data.tokens[k], text: data.texts[k], step: data.forward, sure: data.confidence[k] };
      });
    } else if (name === "end") {
      this.end = data;
      this.text = data.text;
      this.finals = data.tokens.map((token, at) => {
        const cell = { token, text: data.texts[at], step: data.steps[at], sure: data.confidence[at] };
        return cell.step === 0 && cell.text === this.begin.mask ? null : cell;
      });
    } else if (data.error) {
      throw new Error(data.error.message);
    } else {
      this.text += data.choices[0]?.delta?.content ?? "";
    }
  }

  /** The canvas and the counters after so many forwards. */
  at(forward) {
    const now = Math.min(forward, this.forwards);
    const last = this.end !== null && now === this.forwards;
    const cells = last ? this.finals : this.places.map((cell) => (cell && cell.step <= now ? cell : null));
    const ends = new Set(this.begin.ends);
    const first = cells.findIndex((cell) => cell && ends.has(cell.token));
    const limit = Math.min(this.begin.max_tokens, first < 0 ? cells.length : first + 1);
    const found = cells.slice(0, limit).filter(Boolean).length;
    return {
      now,
      last, // decoding is over
      cells,
      ends,
      limit, // behind it nothing counts: the answer has ended or is cut
      revealed: cells.filter(Boolean).length,
      counted: last ? this.end.usage.completion_tokens : found,
      seconds: last ? this.end.seconds : now > 0 ? this.reveals[now - 1].seconds : 0,
      active: new Set(last || now === 0 ? [] : this.reveals[now - 1].blocks),
      exist: last ? Infinity : this.exist[now],
    };
  }
}

// ---------------------------------------------------------------- A turn and its lanes: traces on the screen

class Turn {
  constructor(traces) {
    const sides = traces.length > 1 ? ["First", "Second"] : [""];
    this.lanes = traces.map((trace, number) => new Lane(trace, sides[number]));
    this.root = clone("turn-template");
    this.root.querySelector(".question").textContent = this.question;
    this.root.querySelector(".lanes").append(...this.lanes.map((lane) => lane.root));
    this.root.querySelector(".reopen").addEventListener("click", () => select(this));
  }

  get question() {
    return this.lanes[0].trace.request.messages.at(-1).content;
  }

  /** Whether every answer is complete, so that the next question can build on it. */
  get whole() {
    return this.lanes.every(({ trace }) => trace.end !== null);
  }

  /** Question and answer as messages; a side that did not answer this turn takes the first one's. */
  messages(side) {
    const { text } = (this.lanes[side] ?? this.lanes[0]).trace;
    return [{ role: "user", content: this.question }, { role: "assistant", content: text }];
  }
}

class Lane {
  constructor(trace, side = "") {
    this.trace = trace;
    this.side = side; // First or Second, where two are compared
    this.root = clone("lane-template");
    this.canvas = this.part(".canvas");
    this.blocks = [];
    this.cells = [];
    this.drawn = []; // what each cell shows, so that only changes touch the page
    this.chosen = null;
    this.frame = null;
    this.part("h2").textContent = this.title;
    this.root.setAttribute("aria-label", this.title);
    this.canvas.setAttribute("aria-label", `Canvas of ${this.title}, waiting for its turn`);
    for (const kind of ["pointerover", "click"]) this.canvas.addEventListener(kind, (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  part(selector) {
    return this.root.querySelector(selector);
  }

  get title() {
    const { decoder } = this.trace.begin ?? this.trace.request;
    return this.side ? `${this.side}: ${decoder}` : decoder;
  }

  build() {
    const { gen_length, block, threshold, adapter } = this.trace.begin;
    const weights = page.card?.tad.adapter || adapter ? (adapter ? "student" : "base") : "";
    this.about = [weights, threshold === null ? "" : `threshold ${round(threshold)}`].filter(Boolean).join(" · ");
    this.part("h2").textContent = this.title;
    this.part(".with").textContent = this.about;
    this.root.setAttribute("aria-label", [this.title, this.about].filter(Boolean).join(", "));
    for (let start = 0; start < gen_length; start += block) {
      const box = document.createElement("div");
      box.dataset.number = start / block + 1;
      for (let at = start; at < Math.min(start + block, gen_length); at++) {
        const cell = document.createElement("span");
        cell.dataset.at = at;
        this.cells.push(cell);
        box.append(cell);
      }
      this.blocks.push(box);
    }
    this.canvas.replaceChildren(...this.blocks);
  }

  draw(forward) {
    const { trace } = this;
    this.part(".answer").textContent = trace.text;
    if (!trace.begin) return;
    if (!this.cells.length) this.build();
    const frame = (this.frame = trace.at(forward));
    this.cells.forEach((cell, at) => this.drawCell(cell, at, frame));
    this.keepWords(frame);
    this.blocks.forEach((box, number) => {
      const kind = frame.active.has(number) ? " active" : number >= frame.exist ? " future" : "";
      box.className = `block${kind}`;
    });
    this.part(".forwards").textContent = frame.now;
    this.part(".tpf").textContent = frame.now ? (frame.counted / frame.now).toFixed(2) : "–";
    this.part(".rate").textContent = frame.seconds ? (frame.counted / frame.seconds).toFixed(1) : "–";
    this.part(".revealed").textContent = `${frame.revealed}/${this.cells.length}`;
    this.canvas.setAttribute(
      "aria-label",
      `Canvas of ${this.title}: ${frame.revealed} of ${this.cells.length} positions revealed after forward ` +
        `${frame.now}. Left and right arrow keys move by position, up and down by block.`,
    );
    if (this.chosen !== null) this.part(".inspect").textContent = this.describe(this.chosen);
  }

  /** A number or word that goes on in the next block stands whole in the box where it began. */
  keepWords({ cells, ends }) {
    const { block } = this.trace.begin;
    // What is known of the end counts already, so that a replay does not move.
    const known = cells.map((cell, at) => cell ?? this.trace.finals?.[at]);
    const pieces = known.map((cell) => (cell && !ends.has(cell.token) ? [...cell.text] : []));
    const letter = (piece, at) => /[\p{L}\p{N}]/u.test(piece.at(at) ?? "");
    const starts = this.blocks.map((_, number) => {
      const end = Math.min((number + 1) * block, cells.length);
      let at = number * block;
      while (number && at < end && letter(pieces[at - 1], -1) && letter(pieces[at], 0)) at++;
      return at;
    });
    if (this.starts?.every((start, number) => start === starts[number])) return;
    this.starts = starts;
    this.blocks.forEach((box, number) => box.replaceChildren(...this.cells.slice(starts[number], starts[number + 1])));
  }

  drawCell(cell, at, frame) {
    const found = frame.cells[at];
    const end = found !== null && frame.ends.has(found.token);
    const kinds = ["cell"];
    if (!found) kinds.push("mask");
    if (end) kinds.push("end");
    if (found?.step === 0) kinds.push("fill");
    if (found && at >= frame.limit) kinds.push("past");
    if (found && found.step === frame.now && !frame.last) kinds.push("new");
    if (at === this.chosen) kinds.push("chosen");
    const text = !found ? "" : end ? (found.step === 0 ? "·" : "▪") : visible(found.text);
    const tone = found ? round(this.tone(found)) : 0;
    // A mask is as wide as its token will be where that is known, so that a replay does not move.
    const later = this.trace.finals?.[at];
    const width = found ? 1 : later && !frame.ends.has(later.token) ? visible(later.text).length : later ? 1 : 3;
    const key = [kinds.join(" "), text, tone, width].join("\n");
    if (this.drawn[at] === key) return;
    this.drawn[at] = key;
    cell.className = kinds.join(" ");
    cell.textContent = text;
    cell.style.setProperty("--t", tone);
    cell.style.setProperty("--w", width);
  }

  /** Where a cell stands on the colour ramp, from 0 to 1. */
  tone(cell) {
    if ($("turns").dataset.colour === "confidence") return cell.sure;
    return cell.step < 1 ? 0 : (cell.step - 1) / Math.max(1, this.trace.forwards - 1);
  }

  describe(at) {
    const found = this.frame.cells[at];
    const place = `Position ${at + 1}, block ${Math.floor(at / this.trace.begin.block) + 1}: `;
    if (!found) return `${place}still a mask`;
    const token = `“${visible(found.text)}” (token ${found.token})`;
    if (found.step === 0) return `${place}${token}, filled in behind the end of the answer`;
    return `${place}${token}, revealed by forward ${found.step} with confidence ${found.sure.toFixed(3)}`;
  }

  choose(at) {
    this.chosen = at;
    this.draw(page.forward);
  }

  point(event) {
    const at = event.target.dataset.at;
    if (at !== undefined) this.choose(Number(at));
  }

  move(event) {
    if (!this.frame || event.ctrlKey || event.altKey || event.metaKey) return;
    const { block } = this.trace.begin;
    const last = this.cells.length - 1;
    const from = this.chosen ?? 0;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -block, ArrowDown: block, Home: -from, End: last - from };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.choose(this.chosen === null ? 0 : Math.min(last, Math.max(0, from + steps[event.key])));
    this.cells[this.chosen].scrollIntoView({ block: "nearest" });
    $("voice").textContent = this.describe(this.chosen);
  }
}

/** Text of a token with its line breaks and other controls to be seen. */
function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/\p{Cc}/gu, "▯") || "∅";
}

function round(number, digits = 3) {
  return Number(number.toFixed(digits));
}

// ---------------------------------------------------------------- Settings of one side

class Side {
  constructor() {
    this.root = clone("settings-template");
    this.decoder = this.root.querySelector(".decoder");
    this.adapter = this.root.querySelector(".adapter");
    this.slider = this.root.querySelector(".threshold input");
    for (const { name } of page.card.tad.decoders) this.decoder.append(new Option(name));
    this.root.querySelector(".weights").hidden = page.card.tad.adapter === null;
    this.decoder.addEventListener("change", () => this.fit());
    this.slider.addEventListener("input", () => this.show());
    this.set({ decoder: page.card.tad.decoder });
  }

  get threshold() {
    return page.card.tad.decoders.find(({ name }) => name === this.decoder.value).threshold;
  }

  set({ decoder, threshold, adapter }) {
    if (![...this.decoder.options].some(({ value }) => value === decoder)) {
      throw new Error(`this server has no decoder “${decoder}”`);
    }
    this.decoder.value = decoder;
    this.adapter.value = String(adapter ?? true);
    this.fit();
    if (typeof threshold === "number" && this.threshold) this.slider.value = threshold;
    this.show();
  }

  /** Give the slider the range of the decoder. */
  fit() {
    const range = this.threshold;
    this.root.querySelector(".threshold").hidden = range === null;
    this.root.querySelector(".meaning").textContent = range ? `Threshold: ${range.meaning}.` : "This decoder has no threshold.";
    if (range) {
      Object.assign(this.slider, { min: range.min, max: range.max, step: range.step, value: range.default });
    }
    this.show();
  }

  show() {
    this.root.querySelector("output").textContent = Number(this.slider.value).toFixed(2);
  }

  /** The fields of a request that differ between sides. */
  values() {
    const found = { decoder: this.decoder.value };
    if (this.threshold) found.threshold = Number(this.slider.value);
    if (page.card.tad.adapter !== null) found.adapter = this.adapter.value === "true";
    return found;
  }
}

function setSides(compare) {
  while (page.sides.length < (compare ? 2 : 1)) {
    const side = new Side();
    page.sides.push(side);
    if (page.sides.length === 2) side.set(contrast(page.sides[0].values()));
  }
  page.sides.length = compare ? 2 : 1;
  page.sides.forEach((side, number) => {
    side.root.querySelector("legend").textContent = compare ? ["First", "Second"][number] : "Settings";
  });
  $("settings").replaceChildren(...page.sides.map((side) => side.root));
  $("compare").checked = compare;
}

/** What the first side is best compared with: the base one token at a time, of a base its student, else the next decoder. */
function contrast(first) {
  const slow = page.card.tad.decoders.some(({ name }) => name === "one-by-one") ? "one-by-one" : first.decoder;
  if (page.card.tad.adapter !== null) {
    return first.adapter ? { decoder: slow, adapter: false } : { decoder: page.card.tad.decoder, adapter: true };
  }
  const others = page.card.tad.decoders.map(({ name }) => name).filter((name) => name !== first.decoder);
  return { decoder: others.includes("one-by-one") ? "one-by-one" : (others[0] ?? first.decoder) };
}

// ---------------------------------------------------------------- Asking the server

/** Ask a question as the next turn, or in place of the last one. */
async function run(question, again = false) {
  const before = again ? page.turns.slice(0, -1) : page.turns;
  const shared = { model: page.card.id };
  for (const [field, id] of [["max_tokens", "max-tokens"], ["temperature", "temperature"], ["seed", "seed"]]) {
    if ($(id).value !== "") shared[field] = Number($(id).value);
  }
  const traces = page.sides.map((side, number) => {
    const said = before.filter((turn) => turn.whole).flatMap((turn) => turn.messages(number));
    const messages = [...said, { role: "user", content: question }];
    return new Trace({ ...shared, messages, ...side.values(), stream: true, reveals: true });
  });
  const kept = page.turns;
  pause();
  complain("");
  say("Decoding …");
  page.aborter = new AbortController();
  present([...before, new Turn(traces)]);
  setBusy(true);
  const { lanes, root } = page.turns.at(-1);
  reach(root);
  const outcomes = await Promise.allSettled(traces.map((trace) => follow(trace, page.aborter.signal)));
  const reasons = outcomes.map(({ reason }) => reason);
  const failed = lanes.filter((_, number) => reasons[number] && reasons[number].name !== "AbortError");
  complain(failed.map((lane) => {
    const message = reasons[lanes.indexOf(lane)].message;
    return lane.side ? `${lane.title}: ${message}` : message;
  }).join("\n"));
  say(page.aborter.signal.aborted ? "Stopped." : failed.length ? "" : summarise(lanes));
  if (traces.every((trace) => !trace.begin)) present(kept); // nothing came: what was there stays
  else if ($("prompt").value === question) $("prompt").value = "";
  setBusy(false);
  refresh();
}

/** Send a trace's request and take in what comes until the end. */
async function follow(trace, signal) {
  let response;
  try {
    response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(trace.request),
      signal,
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  }
  if (!response.ok) throw new Error(await explain(response));
  for await (const [name, data] of readEvents(response)) {
    trace.take(name, data);
    refresh();
  }
  if (!trace.end) throw new Error("The stream ended before the answer was complete.");
}

/** The message of an error response. */
async function explain(response) {
  if (response.headers.get("Content-Type")?.includes("json")) {
    const body = await response.json();
    if (body.error?.message) return body.error.message;
  }
  return `The server answered ${response.status} ${response.statusText}`.trim();
}

/** Server-sent events as [name, data]. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      let name = "";
      let data = "";
      for (const line of part.split(/\r?\n/)) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        if (line.startsWith("data:")) data += line.slice(5);
      }
      if (data.trim() === "[DONE]") return;
      if (data) yield [name, JSON.parse(data)];
    }
  }
}

function summarise(lanes) {
  const parts = lanes.map(({ title, about, side, trace: { end } }) =>
    `${side && about ? `${title} (${about})` : title}: ${count(end.usage.completion_tokens, "token")} in ` +
    `${count(end.forwards, "forward")}, ${end.tpf.toFixed(2)} per forward`);
  if (lanes.length === 2) parts.push(lanes[0].trace.text === lanes[1].trace.text ? "the same answer" : "different answers");
  return `Done. ${parts.join("; ")}.`;
}

function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

// ---------------------------------------------------------------- Showing and replaying

/** Show these turns; the last one has its canvas open. */
function present(turns) {
  page.turns = turns;
  turns.forEach((turn, number) => turn.root.setAttribute("aria-label", `Turn ${number + 1}`));
  $("turns").replaceChildren(...turns.map((turn) => turn.root));
  $("empty").hidden = turns.length > 0;
  select(turns.at(-1));
}

/** Open the canvas of a turn, and close those of the others. */
function select(chosen) {
  pause();
  page.lanes = chosen?.lanes ?? [];
  page.following = true;
  for (const turn of page.turns) turn.root.classList.toggle("past", turn !== chosen);
  $("shared").hidden = page.lanes.length < 2;
  refresh();
}

const total = () => Math.max(0, ...page.lanes.map((lane) => lane.trace.forwards));

/** Redraw with the next frame, at the latest forward where that is being followed. */
function refresh() {
  if (page.drawing) return;
  page.drawing = true;
  requestAnimationFrame(() => {
    page.drawing = false;
    show(page.following ? total() : page.forward);
  });
}

function show(forward) {
  const last = total();
  page.forward = Math.min(last, Math.max(0, forward));
  for (const lane of page.lanes) lane.draw(page.forward);
  $("replay").hidden = last === 0;
  $("download").disabled = last === 0;
  $("scrub").max = last;
  $("scrub").value = page.forward;
  $("scrub").setAttribute("aria-valuetext", `forward ${page.forward} of ${last}`);
  $("where").textContent = `${page.forward} / ${last}`;
}

/** Show a moment somebody asked for. */
function seek(forward) {
  pause();
  page.following = forward >= total();
  show(forward);
}

function play() {
  if (page.timer !== null) return pause();
  if (page.forward >= total()) show(0);
  page.following = false;
  $("play").textContent = "Pause";
  const tick = () => {
    if (page.forward >= total()) {
      page.following = true;
      return pause();
    }
    show(page.forward + 1);
    page.timer = setTimeout(tick, 1000 / Number($("pace").value));
  };
  page.timer = setTimeout(tick, 1000 / Number($("pace").value));
}

function pause() {
  clearTimeout(page.timer);
  page.timer = null;
  $("play").textContent = "Play";
}

/** Scroll to an element that lies too low to be seen, as on a phone. */
function reach(element) {
  if (element.getBoundingClientRect().top > 0.6 * window.innerHeight) element.scrollIntoView({ block: "start" });
}

function say(text) {
  $("status").textContent = text;
}

function complain(text) {
  $("error").textContent = text;
  $("error").hidden = text === "";
}

function setBusy(busy) {
  $("run").disabled = busy;
  $("stop").hidden = !busy;
  $("load").disabled = busy;
  $("again").hidden = $("fresh").hidden = busy || page.turns.length === 0;
  for (const button of $("examples").children) button.disabled = busy;
}

// ---------------------------------------------------------------- Runs as files, settings as links

function download() {
  const lanes = page.lanes.map(({ trace: { request, begin, reveals, end } }) => ({ request, begin, reveals, end }));
  const run = { format: "tad-run", version: 1, created: new Date().toISOString(), lanes };
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(run, null, 1)], { type: "application/json" }));
  link.download = `tad-run-${run.created.slice(0, 19).replaceAll(":", "")}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function load(file) {
  try {
    const traces = unpack(await file.text());
    pause();
    complain("");
    present([new Turn(traces)]);
    setBusy(false);
    say(`Loaded ${file.name}: ${traces.map((trace) => count(trace.forwards, "forward")).join(" and ")}.`);
  } catch (error) {
    complain(`${file.name}: ${error.message}`);
  }
}

/** Traces of a saved run; anything that is not one is an error, since it may come from anywhere. */
function unpack(text) {
  const need = (right, what) => {
    if (!right) throw new Error(`not a saved run (${what})`);
  };
  const whole = (value, low, high) => Number.isInteger(value) && value >= low && value <= high;
  const list = (value, length, test) => Array.isArray(value) && value.length === length && value.every(test);
  const isText = (value) => typeof value === "string";
  const isNumber = (value) => Number.isFinite(value) && value >= 0;
  const isId = (value) => whole(value, 0, 2 ** 32);

  let run;
  try {
    run = JSON.parse(text);
  } catch {
    throw new Error("not JSON");
  }
  need(run?.format === "tad-run" && run.version === 1, "format");
  need(Array.isArray(run.lanes) && whole(run.lanes.length, 1, 2), "lanes");
  return run.lanes.map(({ request, begin, reveals, end }) => {
    need(isText(request?.decoder) && isText(request.messages?.at?.(-1)?.content), "request");
    const size = begin?.gen_length;
    need(whole(size, 1, LONGEST) && whole(begin.block, 1, size) && whole(begin.max_tokens, 1, size), "begin: lengths");
    need(isText(begin.mask) && isText(begin.decoder) && Array.isArray(begin.ends) && begin.ends.every(isId), "begin");
    need(begin.threshold === null || isNumber(begin.threshold), "begin: threshold");
    need(Array.isArray(reveals) && reveals.length <= LONGEST, "reveals");
    const trace = new Trace(request);
    trace.take("begin", begin);
    const blocks = Math.ceil(size / begin.block);
    reveals.forEach((reveal, number) => {
      const found = reveal?.positions?.length;
      need(reveal?.forward === number + 1 && isNumber(reveal.seconds), `reveal ${number + 1}`);
      need(list(reveal.positions, found, (at) => whole(at, 0, size - 1)), `reveal ${number + 1}: positions`);
      need(list(reveal.tokens, found, isId) && list(reveal.texts, found, isText), `reveal ${number + 1}: tokens`);
      need(list(reveal.confidence, found, isNumber), `reveal ${number + 1}: confidence`);
      need(Array.isArray(reveal.blocks) && reveal.blocks.every((block) => whole(block, 0, blocks)), `reveal ${number + 1}: blocks`);
      trace.take("reveal", reveal);
    });
    if (end === null) return trace; // it was stopped
    need(isText(end?.text) && isNumber(end.seconds) && isNumber(end.tpf) && end.forwards === reveals.length, "end");
    need(list(end.tokens, size, isId) && list(end.texts, size, isText), "end: tokens");
    need(list(end.steps, size, (step) => whole(step, 0, reveals.length)) && list(end.confidence, size, isNumber), "end: steps");
    need(whole(end.usage?.completion_tokens, 0, size), "end: usage");
    trace.take("end", end);
    return trace;
  });
}

async function copyLink() {
  const settings = { prompt: $("prompt").value || (page.turns.at(-1)?.question ?? ""), sides: page.sides.map((side) => side.values()) };
  for (const id of ["max-tokens", "temperature", "seed"]) if ($(id).value !== "") settings[id] = $(id).value;
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(settings))}`);
  try {
    await navigator.clipboard.writeText(location.href);
    say("Link copied.");
  } catch {
    say("The address of this page now holds prompt and settings."); // the browser keeps its clipboard to itself
  }
}

/** Take over prompt and settings from the address; they are filled in, not run. */
function readLink() {
  if (location.hash.length < 2) return;
  try {
    const settings = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    $("prompt").value = String(settings.prompt ?? "");
    for (const id of ["max-tokens", "temperature", "seed"]) if (id in settings) $(id).value = settings[id];
    setSides(settings.sides.length === 2);
    page.sides.forEach((side, number) => side.set(settings.sides[number]));
  } catch (error) {
    complain(`The link does not fit this page: ${error.message}`);
  }
}

// ---------------------------------------------------------------- The page itself

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}

/** The browser's storage, or null where the reader has forbidden it: the theme is then forgotten, nothing else. */
function storage() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}

async function connect() {
  let response;
  try {
    response = await fetch("v1/models");
  } catch {
    throw new Error("The server cannot be reached.");
  }
  if (!response.ok) throw new Error(await explain(response));
  page.card = (await response.json()).data[0];
  const { family, device, dtype, adapter, limits, examples } = page.card.tad;
  const facts = [page.card.id, family, `${device} ${dtype}`, adapter === null ? "" : `adapter ${adapter}`];
  $("about").textContent = facts.filter(Boolean).join(" · ");
  Object.assign($("max-tokens"), { max: limits.max_tokens, value: Math.min(128, limits.default_max_tokens) });
  for (const { title, prompt } of examples) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(document.createElement("b"), document.createElement("span"));
    [button.firstChild.textContent, button.lastChild.textContent] = [title, prompt];
    button.addEventListener("click", () => {
      present([]);
      run(prompt);
    });
    $("examples").append(button);
  }
  $("examples").hidden = examples.length === 0;
  setSides(false);
  readLink();
  $("run").disabled = $("compare").disabled = false;
}

setTheme(storage()?.getItem("theme") ?? "system");
$("theme").addEventListener("click", () => {
  const themes = ["system", "light", "dark"];
  const theme = themes[(themes.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % 3];
  setTheme(theme);
  storage()?.setItem("theme", theme);
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!$("run").disabled) run($("prompt").value);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => page.aborter.abort());
$("again").addEventListener("click", () => run(page.turns.at(-1).question, true));
$("fresh").addEventListener("click", () => {
  present([]);
  setBusy(false);
  complain("");
  say("");
  $("prompt").focus();
});
$("compare").addEventListener("change", () => setSides($("compare").checked));
$("scrub").addEventListener("input", () => seek(Number($("scrub").value)));
$("back").addEventListener("click", () => seek(page.forward - 1));
$("next").addEventListener("click", () => seek(page.forward + 1));
$("play").addEventListener("click", play);
$("download").addEventListener("click", download);
$("load").addEventListener("change", async () => {
  if ($("load").files.length) await load($("load").files[0]);
  $("load").value = ""; // so that the same file can be loaded again
});
$("link").addEventListener("click", copyLink);
for (const choice of document.querySelectorAll("[name=colour]")) {
  choice.addEventListener("change", () => {
    const byStep = choice.value === "step";
    $("turns").dataset.colour = choice.value;
    $("scale-low").textContent = byStep ? "first forward" : "confidence 0";
    $("scale-high").textContent = byStep ? "last forward" : "1";
    show(page.forward);
  });
}
connect().catch((error) => {
  $("about").textContent = "Not connected";
  complain(error.message);
});
