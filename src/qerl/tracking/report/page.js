"use strict";
// Text of a run enters the page only through text nodes.
let data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const MAX_LISTED = 300, MIN_SHARED = 20;

function element(name, properties = {}, children = []) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

// Show and hide runs.
const hidden = new Set();
for (const box of document.querySelectorAll("[data-toggle]")) {
  const apply = () => {
    if (box.checked) hidden.delete(box.dataset.toggle); else hidden.add(box.dataset.toggle);
    applyHidden();
  };
  box.addEventListener("change", () => { apply(); showCrosshair(); });
  apply();
}

function applyHidden() {
  for (const part of document.querySelectorAll("[data-run]")) part.classList.toggle("off", hidden.has(part.dataset.run));
}

// Curves: curve.py draws them, over steps and with these margins.
const LEFT = 50, RIGHT = 470, BOTTOM = 206;
const UNITS = ["step", "min", "tokens"];
const SMOOTHING = ["off", "light", "normal", "strong", "strongest"], REACHES = [0, 120, 60, 30, 12];
const view = { axis: 0, smoothing: 2 };
let pinned = null, hovered = null;

function plots() {
  return [...document.querySelectorAll("[data-part] svg")];
}

function shape(name, attributes, children = []) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// A run's clock has a row of step, minutes and tokens for each step or so; between rows it is linear.
function convert(run, from, to, value) {
  const rows = data.runs[run].clock;
  if (from === to || rows.length < 2) return value;
  let low = 0, high = rows.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (rows[middle][from] < value) low = middle; else high = middle;
  }
  const a = rows[low], b = rows[high];
  return a[to] + (value - a[from]) * (b[to] - a[to]) / (b[from] - a[from] || 1);
}

const lastOf = (run, axis) => run.clock[run.clock.length - 1][axis];
const extent = (axis) => Math.max(...data.runs.map((run) => lastOf(run, axis))) || 1;
const longestRun = () => data.runs.reduce((best, run, i) => lastOf(run, 0) > lastOf(data.runs[best], 0) ? i : best, 0);
const toPixel = (x, end = extent(view.axis)) => LEFT + x / end * (RIGHT - LEFT);

function formatShort(value) {
  return value >= 10000 ? Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value) : formatValue(+value.toPrecision(3));
}

function formatValue(value) {
  return value && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(value);
}

// Move the shapes to the chosen axis, and show the means of the chosen strength before the values, or the values alone.
function applyView(svg) {
  const last = extent(0), end = extent(view.axis);
  const label = (x, anchor, text) => shape("text", { x, y: BOTTOM + 16, "text-anchor": anchor }, [text]);
  const ticks = data.ticks[view.axis].map((tick) => label(toPixel(tick).toFixed(1), "middle", formatShort(tick)));
  svg.querySelector(".x").replaceChildren(...ticks, label(LEFT - 22, "end", UNITS[view.axis]));
  for (const node of svg.querySelectorAll("g.run *, .layer")) {
    const { run } = node.closest("[data-run]").dataset;
    const move = (px) => toPixel(convert(run, 0, view.axis, (px - LEFT) / (RIGHT - LEFT) * last), end).toFixed(1);
    node.drawn ??= ["d", "points", "cx", "x"].filter((name) => node.hasAttribute(name)).map((name) => [name, node.getAttribute(name)]);
    // Each x is a whole attribute or stands before a comma.
    for (const [name, text] of node.drawn) node.setAttribute(name, text.replace(/^[\d.]+$|[\d.]+(?=,)/g, move));
  }
  for (const group of svg.querySelectorAll("g.run")) {
    const means = [...group.querySelectorAll("[data-reach]")], isShown = (mean) => +mean.dataset.reach === REACHES[view.smoothing];
    for (const mean of means) mean.classList.toggle("off", !isShown(mean));
    group.querySelector(".curve:not([data-reach], .between)")?.classList.toggle("raw", means.some(isShown));
  }
}

// The crosshair: one x in all charts, with the values of that step.
function nearest(points, x) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

function describe(x) {
  const run = longestRun(), at = UNITS.map((_, axis) => convert(run, view.axis, axis, x));
  return [`step ${Math.round(at[0])}`, ...UNITS.slice(1).map((unit, i) => hasAxis(i + 1) && `${formatShort(at[i + 1])} ${unit}`)].filter(Boolean).join(", ");
}

// Values near x; a chart of a long run has a point in each 300th of its steps.
function valuesAt(chart, x) {
  return chart.flatMap((series, k) => {
    if (hidden.has(String(series.run))) return [];
    const step = convert(series.run, view.axis, 0, x), [at, value] = nearest(series.points, step);
    const isNear = Math.abs(at - step) <= Math.max(0.5, lastOf(data.runs[series.run], 0) / 250);
    return isNear ? [[k, series, value]] : [];
  });
}

function showCrosshair() {
  const x = hovered ? hovered.x : pinned;
  byId("where").textContent = x === null ? "none" : describe(x);
  plots().forEach((svg, i) => {
    const figure = svg.closest("figure");
    if (!figure || figure.closest("details:not([open])")) return;
    const values = x === null ? [] : valuesAt(data.charts[i], x), pointer = svg.querySelector(".pointer");
    pointer.style.opacity = x === null ? 0 : 0.5;
    figure.querySelector(".values")?.remove();
    if (x === null) return;
    for (const end of ["x1", "x2"]) pointer.setAttribute(end, toPixel(x));
    const shapes = svg.querySelectorAll("g.run, .layer"), isNamed = data.charts[i].length > 1;
    const rows = values.map(([k, series, value]) => element("span", { className: shapes[k].getAttribute("class").replace("layer", "") }, [
      ...isNamed ? [element("i"), `${series.label} `] : [], element("b", { textContent: formatValue(value) }),
    ]));
    if (hovered?.svg === svg) rows.unshift(element("span", { textContent: describe(x) }));
    if (!rows.length) return;
    const box = element("div", { className: `values ${toPixel(x) > (LEFT + RIGHT) / 2 ? "left" : "right"}` }, rows);
    box.style.top = `${svg.getBoundingClientRect().top - figure.getBoundingClientRect().top + 4}px`;
    figure.append(box);
  });
}

// Snap to the step of the chart's nearest point.
function hover(svg, i, clientX) {
  const box = svg.getBoundingClientRect(), px = (clientX - box.left) / box.width * 480;
  const shown = data.charts[i].filter((series) => !hidden.has(String(series.run)));
  if (!shown.length || px < LEFT - 10 || px > RIGHT + 10) hovered = null;
  else {
    const target = (px - LEFT) / (RIGHT - LEFT) * extent(view.axis);
    const xs = shown.map((series) => [convert(series.run, 0, view.axis, nearest(series.points, convert(series.run, view.axis, 0, target))[0])]);
    hovered = { svg, i, clientX, x: nearest(xs, target)[0] };
  }
  showCrosshair();
}

function pin(x) {
  pinned = x;
  if (x !== null) byId("at").value = Math.round(convert(longestRun(), view.axis, 0, x));
  byId("at").setAttribute("aria-valuetext", x === null ? "none" : describe(x));
  showCrosshair();
}

const hasAxis = (axis) => data.runs.every((run) => lastOf(run, axis) > 0);

// After loading, and when a live page has new curves.
function attachPointer() {
  const steps = byId("at");
  steps.max = Math.max(1, extent(0));
  if (pinned === null) steps.value = steps.max;
  for (const radio of document.querySelectorAll("[name=axis]")) radio.disabled = radio.value !== "0" && !hasAxis(+radio.value);
  plots().forEach((svg, i) => {
    if (view.axis || view.smoothing !== 2) applyView(svg);
    svg.onpointermove = (event) => hover(svg, i, event.clientX);
    svg.onpointerleave = () => { hovered = null; showCrosshair(); };
    svg.onclick = () => pin(pinned === null && hovered ? hovered.x : null);
  });
  if (hovered && plots()[hovered.i]) hover(plots()[hovered.i], hovered.i, hovered.clientX);
  else showCrosshair();
}

function changeView() {
  const step = pinned === null ? null : convert(longestRun(), view.axis, 0, pinned);
  view.axis = +document.querySelector("[name=axis]:checked").value;
  view.smoothing = +byId("smoothing").value;
  byId("strength").textContent = SMOOTHING[view.smoothing];
  byId("smoothing").setAttribute("aria-valuetext", SMOOTHING[view.smoothing]);
  pin(step === null ? null : convert(longestRun(), 0, view.axis, step));
  plots().forEach(applyView);
}

byId("view").hidden = false;
byId("view").addEventListener("submit", (event) => event.preventDefault());
for (const input of document.querySelectorAll("[name=axis], #smoothing")) input.addEventListener("input", changeView);
byId("at").addEventListener("input", (event) => pin(convert(longestRun(), 0, view.axis, +event.target.value)));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") pin(null); });
byId("strength").textContent = SMOOTHING[view.smoothing];
document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", showCrosshair));
new ResizeObserver(([entry]) => document.documentElement.style.setProperty("--head", `${entry.target.offsetHeight}px`)).observe(document.querySelector("body > header"));
addEventListener("resize", showCrosshair);
attachPointer();

// Samples.
const fields = Object.fromEntries(["run", "kind", "step", "text", "low", "high"].map((id) => [id, byId(id)]));
let minReward = Infinity, maxReward = -Infinity, listed = [], current = null;

// The range of all rewards so far sets the colors: orange to blue, which every kind of color vision tells apart.
function extendRewardRange(groups) {
  const rewards = groups.flatMap((group) => group.samples.map((s) => s.reward)).filter((reward) => reward !== null);
  minReward = rewards.reduce((a, b) => Math.min(a, b), minReward);
  maxReward = rewards.reduce((a, b) => Math.max(a, b), maxReward);
}

function rewardShare(reward) {
  return maxReward > minReward ? (reward - minReward) / (maxReward - minReward) : Number(reward > 0);
}

function rewardColor(reward) {
  return reward === null ? "var(--quiet)" : `color-mix(in oklab, var(--good) ${Math.round(100 * rewardShare(reward))}%, var(--bad))`;
}

function formatNumber(value, digits = 3) {
  return value === null ? "none" : String(+value.toFixed(digits));
}

// The held-out problems have a sample for each evaluation and kind of sampling: {step, kind}.
const isHeldOut = () => fields.kind.value === "held";
const moment = (sample) => sample.step ? `after step ${sample.step}` : "before training";

function shownGroups() {
  const run = data.runs[Number(fields.run.value)];
  if (!isHeldOut()) return run.groups.filter((group) => fields.step.value === "" || group.step === Number(fields.step.value));
  // Problems whose greedy answers changed most come first.
  return [...run.heldOut ?? []].sort((a, b) => Math.abs(gain(b)) - Math.abs(gain(a)));
}

function gain(group) {
  const rewards = group.samples.filter((sample) => sample.kind === "greedy").map((sample) => sample.reward ?? 0);
  return rewards.length ? rewards[rewards.length - 1] - rewards[0] : 0;
}

function showKinds() {
  const run = data.runs[Number(fields.run.value)], has = run.hasHeldOut ?? run.heldOut?.length > 0;
  if (!has) fields.kind.value = "";
  fields.kind.parentElement.hidden = !has;
  fields.step.parentElement.hidden = isHeldOut();
}

// Samples of a group that pass the filter.
function matchingSamples(group) {
  const text = fields.text.value.toLowerCase();
  const low = fields.low.value === "" ? null : Number(fields.low.value);
  const high = fields.high.value === "" ? null : Number(fields.high.value);
  const inPrompt = group.prompt.toLowerCase().includes(text);
  return group.samples.filter((s) => (inPrompt || s.text.toLowerCase().includes(text))
    && (low === null || (s.reward !== null && s.reward >= low))
    && (high === null || (s.reward !== null && s.reward <= high)));
}

function highlighted(text) {
  const wanted = fields.text.value.toLowerCase(), pieces = [];
  const lowered = text.toLowerCase();
  // Lower case can change a text's length, and then the positions differ.
  if (!wanted || lowered.length !== text.length) return [text];
  let begin = 0;
  for (let at = lowered.indexOf(wanted); at >= 0; at = lowered.indexOf(wanted, begin)) {
    pieces.push(text.slice(begin, at), element("mark", { textContent: text.slice(at, at + wanted.length) }));
    begin = at + wanted.length;
  }
  return [...pieces, text.slice(begin)];
}

// Tokens that chat templates put around messages; some name the role.
const TEMPLATE_TOKEN = /<[|\uff5c][^<>\n]{1,40}[|\uff5c]>|<\/?(?:s|bos|eos|pad|start_of_turn|end_of_turn)>|\[\/?INST\]|<<\/?SYS>>/gi;
const ROLE = /^\s*(system|developer|user|assistant|model|tool)\b:?(?=\s|$)/i;

// [role, text] of each message of a prompt, without the template's tokens; the empty turn to be sampled is left out.
function messages(prompt) {
  const found = [];
  let begin = 0, role = "";
  const add = (text) => {
    const named = begin > 0 && ROLE.exec(text);
    if (named) { role = named[1].toLowerCase(); text = text.slice(named[0].length); }
    if (!text.trim()) return;
    found.push([role, text.trim()]);
    role = "";
  };
  for (const token of prompt.matchAll(TEMPLATE_TOKEN)) {
    add(prompt.slice(begin, token.index));
    begin = token.index + token[0].length;
    const named = ROLE.exec(token[0].replace(/[<>|\uff5c]/g, ""));
    if (named) role = named[1].toLowerCase();
  }
  add(prompt.slice(begin));
  return found;
}

// Summarize each prompt by the line of its last message that the fewest other prompts have, without the words that all of
// these lines begin with.
function summaries(prompts) {
  const linesOf = new Map(), counts = new Map();
  for (const prompt of new Set(prompts)) {
    const lines = (messages(prompt).pop()?.[1] ?? "").split("\n").map((line) => line.trim()).filter(Boolean);
    linesOf.set(prompt, lines);
    for (const line of new Set(lines)) counts.set(line, (counts.get(line) ?? 0) + 1);
  }
  const rarest = (lines) => lines.reduce((best, line) => counts.get(line) < counts.get(best) ? line : best, lines[0] ?? "");
  const chosen = new Map([...linesOf].map(([prompt, lines]) => [prompt, rarest(lines)]));
  const shared = sharedStart([...chosen.values()]);
  return new Map([...chosen].map(([prompt, line]) => [prompt, shared > MIN_SHARED ? `\u2026 ${line.slice(shared)}` : line]));
}

// The length of the words that all lines begin with; 0 for a single line.
function sharedStart(lines) {
  if (new Set(lines).size < 2) return 0;
  let length = 0;
  while (lines.every((line) => length < line.length && line[length] === lines[0][length])) length++;
  return lines[0].lastIndexOf(" ", length - 1) + 1;
}

function promptBox(prompt) {
  const found = messages(prompt), isPlain = found.length === 1 && found[0][1] === prompt.trim();
  const parts = found.flatMap(([role, text]) => [
    ...role ? [element("p", { className: "role", textContent: role })] : [],
    element("pre", {}, highlighted(text)),
  ]);
  const raw = element("details", { className: "raw" }, [element("summary", { textContent: "as the model reads it" }), element("pre", { textContent: prompt })]);
  return element("div", { className: "prompt" }, isPlain ? parts : [...parts, raw]);
}

// A conversation: what a tool gave and what calls it are folded.
function conversation(turns) {
  const fold = (title, text) => element("details", {}, [element("summary", { textContent: title }), element("pre", {}, highlighted(text))]);
  return turns.flatMap(([role, text]) => {
    if (role === "tool") return [fold(`tool: ${text.split("\n")[0].slice(0, 60)}`, text)];
    const pieces = role === "assistant" ? text.split(/(<tool_call>[^]*?(?:<\/tool_call>|$))/) : [text];
    const shown = pieces.filter((piece) => piece.trim()).map((piece) => piece.startsWith("<tool_call>")
      ? fold(`call: ${/"name":\s*"([^"]*)"/.exec(piece)?.[1] ?? ""}`, piece) : element("pre", {}, highlighted(piece)));
    return [element("p", { className: "role", textContent: role }), ...shown];
  });
}

function sampleCard(sample) {
  const reward = element("span", {}, ["reward ", element("b", { textContent: formatNumber(sample.reward) })]);
  const advantage = sample.kind ? element("span", { textContent: moment(sample) })
    : element("span", {}, ["advantage ", element("b", { textContent: formatNumber(sample.advantage, 2) })]);
  const tokens = sample.num_tokens === null ? "" : `${sample.num_tokens} tokens`;
  const length = element("span", { textContent: sample.finish === "length" ? `${tokens}, truncated` : tokens });
  const branch = sample.prefix_tokens ? [element("span", { textContent: `branched after ${sample.prefix_tokens} tokens` })] : [];
  const node = element("div", {}, [
    element("header", {}, [reward, advantage, length, ...branch]),
    ...sample.failure ? [element("p", { className: "failure", textContent: sample.failure })] : [],
    ...sample.turns ? conversation(sample.turns) : [element("pre", {}, highlighted(sample.text))],
  ]);
  node.style.setProperty("--r", rewardColor(sample.reward));
  return node;
}

// The samples of one prompt in all steps, if these are shown in place of a group: {group, groups}.
let spread = null;

function groupsOf(group) {
  return data.runs[Number(fields.run.value)].groups.filter((other) => other.prompt_index === group.prompt_index);
}

async function spreadPrompt(group) {
  spread = { group, groups: await groupsOf(group) };
  showSpread();
}

function showSpread() {
  const { group, groups } = spread, back = element("button", { type: "button", textContent: `step ${group.step + 1} alone` });
  back.addEventListener("click", () => openGroup(group));
  const steps = [...groups].sort((a, b) => a.step - b.step).map((each) => [each, matchingSamples(each)]);
  byId("group").replaceChildren(promptBox(group.prompt), aboutGroup(group, `prompt ${group.prompt_index} in ${groups.length} steps`, back),
    ...steps.flatMap(([each, shown]) => shown.length ? [
      element("p", { className: "role", textContent: `step ${each.step + 1}${meanReward(each)}` }),
      element("div", { className: "cards" }, shown.map(sampleCard)),
    ] : []));
}

function meanReward(group) {
  const rewards = group.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  return rewards.length ? `, reward ${formatNumber(rewards.reduce((a, b) => a + b) / rewards.length, 2)}` : "";
}

function aboutGroup(group, text, ...buttons) {
  const about = element("p", { className: "about" }, [text]);
  if (group.answer !== null) about.append(", answer ", element("b", {}, highlighted(group.answer)));
  about.append(...buttons.flatMap((button) => [" ", button]));
  return about;
}

function openGroup(group) {
  current = group;
  spread = null;
  for (const [i, button] of [...byId("groups").querySelectorAll("button")].entries()) {
    button.setAttribute("aria-current", String(listed[i] === group));
  }
  if (!group) return byId("group").replaceChildren();
  if (isHeldOut()) return showAnswers(group);
  const shown = matchingSamples(group), buttons = [];
  if (data.isLive || groupsOf(group).length > 1) {
    buttons.push(element("button", { type: "button", textContent: "in all steps" }));
    buttons[0].addEventListener("click", () => spreadPrompt(group));
  }
  const part = shown.length < group.samples.length ? `; ${shown.length} of ${group.samples.length} samples match` : "";
  byId("group").replaceChildren(
    promptBox(group.prompt),
    aboutGroup(group, `step ${group.step + 1}, prompt ${group.prompt_index}${part}`, ...buttons),
    element("div", { className: "cards" }, shown.map(sampleCard)),
  );
}

// The answers to a held-out problem side by side, before and after training, by kind of sampling.
function showAnswers(group) {
  const kinds = [...new Set(group.samples.map((sample) => sample.kind))];
  byId("group").replaceChildren(promptBox(group.prompt), aboutGroup(group, `problem ${group.prompt_index}`),
    ...kinds.flatMap((kind) => [
      element("p", { className: "role", textContent: kind }),
      element("div", { className: "cards" }, matchingSamples(group).filter((sample) => sample.kind === kind).map(sampleCard)),
    ]));
}

// A histogram of the samples' lengths; those that were cut off stand on the others.
const MAX_BARS = 24;

function drawLengths(samples) {
  const known = samples.filter((sample) => sample.num_tokens !== null && sample.num_tokens >= 0), figure = byId("lengths");
  figure.hidden = known.length < 2;
  if (figure.hidden) return;
  const lengths = known.map((sample) => sample.num_tokens).sort((a, b) => a - b), longest = lengths[lengths.length - 1];
  const width = Math.ceil((longest + 1) / MAX_BARS), bars = Array.from({ length: Math.floor(longest / width) + 1 }, () => [0, 0]);
  for (const sample of known) bars[Math.floor(sample.num_tokens / width)][Number(sample.finish === "length")]++;
  const high = bars.reduce((most, [ended, cut]) => Math.max(most, ended + cut), 1), step = (RIGHT - LEFT) / bars.length;
  const bar = (kind, i, from, to) => shape("rect", { class: kind, x: (LEFT + i * step + 1).toFixed(1), width: Math.max(1, step - 2).toFixed(1),
    y: (80 - 70 * to / high).toFixed(1), height: (70 * (to - from) / high).toFixed(1) });
  const label = (x, anchor, text) => shape("text", { x, y: 96, "text-anchor": anchor }, [text]);
  const cut = bars.reduce((sum, each) => sum + each[1], 0);
  const share = cut ? `; ${Math.round(100 * cut / known.length)} % cut off` : "";
  figure.replaceChildren(
    element("figcaption", {}, [element("b", { textContent: "Lengths" }), ` of these samples: median ${lengths[lengths.length >> 1]}, longest ${longest} tokens${share}`]),
    shape("svg", { viewBox: "0 0 480 102", role: "img", "aria-label": "Lengths of the samples" }, [
      ...bars.flatMap(([ended, cutOff], i) => [
        ...ended ? [bar("ended", i, 0, ended)] : [], ...cutOff ? [bar("cut", i, ended, ended + cutOff)] : [],
      ]),
      shape("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: 80, y2: 80 }),
      shape("text", { x: LEFT - 6, y: 14, "text-anchor": "end" }, [String(high)]),
      label(LEFT, "start", "0"), label(RIGHT, "end", formatShort(bars.length * width)), label((LEFT + RIGHT) / 2, "middle", "tokens"),
    ]),
  );
}

function groupRow(group, line) {
  const chips = group.samples.map((sample) => {
    const chip = element("i", { className: "chip", title: formatNumber(sample.reward) });
    chip.style.background = rewardColor(sample.reward);
    chip.style.height = `${sample.reward === null ? 2 : 4 + 9 * rewardShare(sample.reward)}px`;
    return chip;
  });
  const change = gain(group), label = isHeldOut() ? `problem ${group.prompt_index}, greedy ${change > 0 ? "+" : ""}${formatNumber(change, 2)}` : `${fields.step.value === "" ? `step ${group.step + 1}, ` : ""}prompt ${group.prompt_index}${meanReward(group)}`;
  const button = element("button", { type: "button" }, [
    element("span", { className: "line", textContent: line }),
    element("span", { className: "line" }, [label, ...chips.slice(0, 16)]),
  ]);
  button.addEventListener("click", () => openGroup(group));
  return element("li", {}, [button]);
}

function listGroups() {
  showKinds();
  const found = shownGroups().filter((group) => matchingSamples(group).length);
  const samples = found.flatMap(matchingSamples);
  listed = found.slice(0, MAX_LISTED);
  const lines = summaries(listed.map((group) => group.prompt));
  byId("groups").replaceChildren(...listed.map((group) => groupRow(group, lines.get(group.prompt))));
  const more = found.length > listed.length ? `, showing the first ${listed.length}` : "";
  byId("count").textContent = `${found.length} prompts, ${samples.length} samples${more}`;
  drawLengths(samples);
  if (spread) return showSpread();
  // Prefer a prompt whose samples have different rewards.
  const differing = listed.find((group) => new Set(group.samples.map((sample) => sample.reward)).size > 1);
  openGroup(listed.includes(current) ? current : differing || listed[0] || null);
}

// Fill the list of steps; the empty choice means the newest step on a live page, all steps in a report.
function fillSteps(steps, chosen) {
  const option = (value, text) => element("option", { value, textContent: text });
  const numbered = steps.map((step) => option(String(step), String(step + 1)));
  fields.step.replaceChildren(...data.isLive ? [...numbered, option("", "newest")] : [option("", "all"), ...numbered]);
  fields.step.value = chosen;
}

function chooseStep() {
  const steps = [...new Set(data.runs[Number(fields.run.value)].groups.map((group) => group.step))].sort((a, b) => a - b);
  const before = fields.step.value;
  fillSteps(steps, before !== "" && steps.includes(Number(before)) ? before : String(steps[steps.length - 1] ?? ""));
  listGroups();
}

for (const field of [fields.run, fields.kind, fields.step]) field.addEventListener("change", () => { spread = null; });

function moveStep(by) {
  const index = fields.step.selectedIndex + by;
  if (index < 0 || index >= fields.step.options.length) return;
  fields.step.selectedIndex = index;
  fields.step.dispatchEvent(new Event("change"));
}

data.runs.forEach((run, i) => fields.run.append(element("option", { value: String(i), textContent: run.name })));
fields.run.parentElement.hidden = data.runs.length < 2;
for (const id of ["text", "low", "high"]) fields[id].addEventListener("input", listGroups);
byId("previous").addEventListener("click", () => moveStep(-1));
byId("next").addEventListener("click", () => moveStep(1));
byId("filter").addEventListener("submit", (event) => event.preventDefault());
byId("samples").classList.toggle("none", !data.runs.some((run) => run.groups.length));

// A live page loads the samples of one step at a time: dashboard.js.
if (!data.isLive) {
  data.runs.forEach((run) => extendRewardRange([...run.groups, ...run.heldOut]));
  fields.kind.addEventListener("change", listGroups);
  fields.run.addEventListener("change", chooseStep);
  fields.step.addEventListener("change", listGroups);
  chooseStep();
}
