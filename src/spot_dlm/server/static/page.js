// The page: reads the form, asks for speculative and then for standard decoding, and shows any pass of both.
import { Canvas } from "/page/canvas.js";
import { drawGraph, told } from "/page/graph.js";
import { COLOURS, Run, colourOf, compare, thresholds, visible } from "/page/run.js";
import { Refused, decode, modelName } from "/page/stream.js";

const by = (id) => document.getElementById(id);
const KEY = "spot-api-key";
const QUIET_MS = 8000; // without news, after which the person is told
const sides = ["speculative", "standard"].map((name) => {
  const panel = by(name);
  return { name, panel, canvas: new Canvas(panel.querySelector(".canvas")), count: panel.querySelector(".count"), bar: panel.querySelector(".bar div"), run: null };
});
const [ours, theirs] = sides;
const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
let model = "";
let asking = null; // the AbortController of what runs
let head = 0; // passes that are shown
let playing = false;
let clock = 0;
let drawing = 0;

/* --- what is asked --- */

function number(id, words, whole) {
  const text = by(id).value.trim().replace(",", ".");
  if (!text) return undefined;
  const value = Number(text);
  if (!Number.isFinite(value) || (whole && !Number.isSafeInteger(value))) throw complaint(by(id), `${words} must be a ${whole ? "whole " : ""}number, not \u201c${text}\u201d.`);
  return value;
}

function complaint(field, words) {
  if (field.closest("details")) field.closest("details").open = true;
  field.setAttribute("aria-invalid", "true");
  field.focus();
  return new Refused(words);
}

function request() {
  const prompt = by("prompt").value;
  if (!prompt.trim()) throw complaint(by("prompt"), "The prompt is empty: type something, or take an example.");
  const seed = number("seed", "The seed", true) ?? crypto.getRandomValues(new Uint32Array(1))[0];
  const isChat = by("route").value === "chat";
  const body = {
    model, seed, stream: true, stream_options: { include_usage: true }, temperature: number("temperature", "The temperature"), max_tokens: number("max_tokens", "The length", true),
    spot: { return_passes: true, return_order: true, rule: by("rule").value || undefined },
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  return { body, path: isChat ? "/v1/chat/completions" : "/v1/completions" };
}

async function start() {
  if (asking) return;
  say("");
  fail("");
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  let asked = null;
  const abort = new AbortController();
  asking = abort;
  let quiet = 0;
  try {
    asked = request();
    busy(true);
    asked.body.model = model || (await findModel());
    begin();
    say("Decoding\u2026");
    const listen = () => {
      clearTimeout(quiet);
      quiet = setTimeout(() => say("Still waiting: the server has not sent anything for a while. It may be starting, or have others to answer."), QUIET_MS);
    };
    const nodes = Number(by("nodes").value) || undefined;
    ours.run = new Run();
    await follow(ours, asked, { nodes }, abort, listen);
    if (by("beside").checked) {
      theirs.run = new Run();
      await follow(theirs, asked, { drafter: "root" }, abort, listen);
    }
  } catch (error) {
    if (error.name === "AbortError") say("Stopped. What had been decoded until then is shown below.");
    else report(error);
    jump();
    by("result").hidden ||= !most();
  } finally {
    clearTimeout(quiet);
    asking = null;
    busy(false);
    redraw();
  }
}

async function follow(side, { path, body }, more, abort, listen) {
  listen();
  for await (const document of decode(path, { ...body, spot: { ...body.spot, ...more } }, by("key").value.trim(), abort.signal)) {
    listen();
    side.run.take(document);
    if (!pace() && playing) head = most();
    redraw();
  }
  side.run.over = true;
}

async function findModel() {
  model = await modelName(by("key").value.trim());
  by("model").textContent = `Model: ${model}`;
  return model;
}

/* --- what is said --- */

/** Writes the status, which is read out; `unseen` is for the ear alone, where the eye has it elsewhere. */
function say(words, unseen = "") {
  if (by("status").textContent === words + unseen) return;
  const rest = document.createElement("span");
  rest.className = "unseen";
  rest.textContent = unseen;
  by("status").replaceChildren(words, ...(unseen ? [rest] : []));
}

function fail(words) {
  by("error").hidden = !words;
  by("error").textContent = words;
}

function report(error) {
  const known = error instanceof Refused;
  say("");
  fail(known ? error.message : `The page made a mistake: ${error.message}`);
  if (known && error.status === 401) {
    by("options").open = true;
    by("key").focus();
  }
  if (known && error.status === 404) model = ""; // the server is another one now
  if (known && /no chat template/.test(error.message)) by("options").open = true;
}

function busy(is) {
  const hadFocus = document.activeElement === by(is ? "go" : "stop");
  by("go").hidden = is;
  by("stop").hidden = !is;
  if (hadFocus) by(is ? "stop" : "go").focus();
}

/* --- what is shown --- */

const pace = () => Number(by("pace").value);
const most = () => Math.max(...sides.map((s) => s.run?.passes.length ?? 0));
const isOver = () => !asking;
const round = (value, digits = 2) => value.toFixed(digits);

function begin() {
  for (const side of sides) {
    side.run = null;
    side.canvas.clear();
  }
  theirs.panel.hidden = !by("beside").checked;
  by("graph").style.minHeight = "";
  by("result").hidden = false;
  by("verdict").hidden = true;
  head = 0;
  play(true);
  if (by("result").getBoundingClientRect().top > innerHeight * 0.7) {
    by("status").scrollIntoView({ block: "start", behavior: isCalm ? "auto" : "smooth" });
  }
}

function play(is) {
  playing = is;
  clearTimeout(clock);
  by("play").textContent = by("play").ariaLabel = is ? "Pause" : "Play";
  if (is && pace()) clock = setTimeout(tick, 1000 / pace());
  else if (is) head = most();
}

function tick() {
  if (head < most()) head += 1;
  if (head >= most() && isOver()) play(false);
  else clock = setTimeout(tick, 1000 / Math.max(1, pace()));
  redraw();
}

function jump() {
  head = most();
  play(false);
}

function redraw() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    if (!by("result").hidden) draw();
  });
}

function draw() {
  if (playing && isOver() && head >= most()) play(false);
  const longest = Math.max(most(), ours.run?.transitions ?? 0, 1);
  for (const side of sides) drawSide(side, longest);
  by("head").max = most();
  by("head").value = head;
  by("at").textContent = `Pass ${head} of ${most()}`;
  by("head").setAttribute("aria-valuetext", by("at").textContent);
  const pass = ours.run?.passes[Math.min(head, ours.run.passes.length) - 1];
  const first = pass?.committed[0] && ours.run.cells.get(pass.committed[0].position);
  drawGraph(by("graph"), pass, first ? colourOf(first.inBlock, ours.run.length) : 0);
  by("told").textContent = told(pass);
  by("answer").textContent = ours.run?.text ?? "";
  drawTiles();
  drawRamp();
  conclude();
}

function drawSide(side, longest) {
  const { run } = side;
  const isWaiting = !run;
  const at = run?.figures(head) ?? { passes: 0, tokens: 0, tpf: 0 };
  side.count.textContent = isWaiting ? (asking ? "Waits until the other is done, so that both have the machine for themselves" : "Not decoded") : `${at.passes} passes, ${at.tokens} tokens, ${round(at.tpf)} tokens per pass`;
  side.bar.style.width = `${(100 * at.passes) / longest}%`;
  if (run) side.canvas.draw(run, head);
}

function drawTiles() {
  const at = ours.run?.figures(head) ?? { passes: 0, tpf: 0, transitions: 0 };
  const [a, b] = [ours.run?.counts, theirs.run?.counts];
  const isEnd = a && b;
  by("passes").textContent = at.passes;
  by("tpf").textContent = round(at.tpf);
  by("reduction").textContent = at.passes ? `${round(at.transitions / at.passes)}\u00d7` : "\u2013";
  by("speedup").textContent = isEnd && a.total_s ? `${round(b.total_s / a.total_s)}\u00d7` : "\u2013";
  by("seconds").textContent = isEnd ? `${seconds(a.total_s)} against ${seconds(b.total_s)} on this server, now` : theirs.run || (asking && by("beside").checked) ? "when both are done" : "needs standard beside it";
}

const seconds = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : `${round(s)} s`);

function drawRamp() {
  const length = ours.run?.length ?? 16;
  if (by("ramp").dataset.length === String(length)) return;
  by("ramp").dataset.length = length;
  const from = thresholds(length);
  by("ramp").replaceChildren(...from.map((first, i) => {
    const box = document.createElement("span");
    const last = i + 1 < COLOURS ? from[i + 1] - 1 : Infinity;
    box.className = `cell p${i}`;
    box.textContent = last === Infinity ? `${first}+` : last > first ? `${first}\u2013${last}` : first;
    return box;
  }));
}

function conclude() {
  if (!isOver() || head < most() || !ours.run?.over) return;
  const { counts } = ours.run;
  const found = theirs.run?.over ? compare(ours.run, theirs.run) : null;
  by("made").textContent = `${ours.run.usage?.completion_tokens ?? counts?.tokens} tokens, seed ${ours.run.seed}. ${counts ? `${counts.drafted} guesses were checked, ${counts.accepted} were right.` : ""}`;
  by("verdict").hidden = !found;
  by("other").hidden = !found || found.same || ours.run.text === theirs.run.text;
  let unseen = "";
  const words = `Done: ${counts?.tokens} tokens in ${counts?.nfe} passes; standard decoding ${theirs.run?.over ? "took" : "takes"} ${theirs.run?.counts?.nfe ?? counts?.transitions}.`;
  if (found) {
    by("verdict").classList.toggle("same", found.same);
    by("verdict").textContent = found.same
      ? `\u2713 Identical: both gave the same ${found.size} tokens, committed in the same order.`
      : `\u26a0 Not identical: ${difference(found)} This should not happen where passes do not depend on their shape; \u201cspot verify\u201d tells more, and \u201cspot serve --strict\u201d evaluates every pass at one shape.`;
    by("other-answer").textContent = theirs.run.text;
    unseen = found.same ? " The answers are identical." : " The answers are not identical.";
  }
  if (by("error").hidden) say(words, unseen);
}

function difference({ what, at }) {
  const token = (run) => (run.ids[at] === undefined ? "nothing" : `\u201c${visible(run.cells.get(at)?.text ?? "", run.ids[at])}\u201d`);
  if (what === "token") return `token ${at + 1} is ${token(ours.run)} in speculative and ${token(theirs.run)} in standard decoding.`;
  return `the tokens are the same, but token ${at + 1} was committed at step ${ours.run.steps[at] + 1} in speculative and at step ${theirs.run.steps[at] + 1} in standard decoding.`;
}

/* --- what is done by hand --- */

by("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
by("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  start();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") asking?.abort();
});
by("stop").addEventListener("click", () => asking?.abort());
for (const button of document.querySelectorAll(".example")) {
  button.addEventListener("click", () => {
    by("prompt").value = button.textContent;
    by("prompt").focus();
  });
}
by("play").addEventListener("click", () => {
  if (!playing && head >= most()) head = 0;
  play(!playing);
  redraw();
});
by("head").addEventListener("input", () => {
  play(false);
  head = Number(by("head").value);
  redraw();
});
by("pace").addEventListener("change", () => {
  if (playing) play(true);
  redraw();
});
by("numbers").addEventListener("change", () => {
  for (const side of sides) side.canvas.element.classList.toggle("numbered", by("numbers").checked);
});
by("key").addEventListener("change", () => {
  if (by("key").value.trim()) sessionStorage.setItem(KEY, by("key").value.trim());
  else sessionStorage.removeItem(KEY);
  fail("");
  findModel().catch(report);
});
addEventListener("resize", redraw);

by("key").value = sessionStorage.getItem(KEY) ?? "";
if (isCalm) by("pace").value = "0";
drawRamp();
findModel().catch(report);
