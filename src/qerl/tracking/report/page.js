"use strict";
// Text of a run enters the page only through text nodes.
let data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const MAX_LISTED = 300;

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
  box.addEventListener("change", apply);
  apply();
}

function applyHidden() {
  for (const part of document.querySelectorAll("[data-run]")) part.classList.toggle("off", hidden.has(part.dataset.run));
}

// Show the values under the pointer. The margins are those of curve.py.
const LEFT = 50, RIGHT = 10, WIDTH = 480;

function nearest(points, x) {
  let best = points[0];
  for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best;
}

function showValues(event, svg, chart) {
  const box = svg.getBoundingClientRect();
  const low = Number(svg.dataset.low), high = Number(svg.dataset.high);
  const px = (event.clientX - box.left) / box.width * WIDTH;
  const target = low + (px - LEFT) / (WIDTH - LEFT - RIGHT) * (high - low);
  const shown = chart.filter((series) => !hidden.has(String(series.run)));
  if (!shown.length || px < LEFT - 10 || px > WIDTH - RIGHT + 10) return hideValues(svg);
  const x = nearest(shown.map((series) => nearest(series.points, target)), target)[0];
  const lines = shown.flatMap((series) => series.points.filter((p) => p[0] === x)
    .map((p) => `${data.runs.length > 1 || shown.length > 1 ? series.label + "  " : ""}${p[1]}`));
  const place = LEFT + (x - low) / (high - low || 1) * (WIDTH - LEFT - RIGHT);
  const pointer = svg.querySelector(".pointer");
  pointer.setAttribute("x1", place);
  pointer.setAttribute("x2", place);
  pointer.style.opacity = 0.4;
  const tip = byId("tip");
  tip.textContent = [`step ${+x.toFixed(1)}`, ...lines].join("\n");
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

function hideValues(svg) {
  byId("tip").hidden = true;
  svg.querySelector(".pointer").style.opacity = 0;
}

function plots() {
  return [...document.querySelectorAll("[data-part] svg")];
}

let hovered = null;
function attachPointer() {
  plots().forEach((svg, i) => {
    svg.onpointermove = (event) => { hovered = [event, i]; showValues(event, svg, data.charts[i]); };
    svg.onpointerleave = () => { hovered = null; hideValues(svg); };
  });
}
attachPointer();

// Samples.
const fields = Object.fromEntries(["run", "step", "text", "low", "high"].map((id) => [id, byId(id)]));
let minReward = Infinity, maxReward = -Infinity, listed = [], current = null;

// The range of all rewards so far sets the colors.
function extendRewardRange(groups) {
  const rewards = groups.flatMap((group) => group.samples.map((s) => s.reward)).filter((reward) => reward !== null);
  minReward = rewards.reduce((a, b) => Math.min(a, b), minReward);
  maxReward = rewards.reduce((a, b) => Math.max(a, b), maxReward);
}

function rewardColor(reward) {
  if (reward === null) return "var(--quiet)";
  const share = maxReward > minReward ? (reward - minReward) / (maxReward - minReward) : Number(reward > 0);
  return `color-mix(in oklab, var(--good) ${Math.round(100 * share)}%, var(--bad))`;
}

function formatNumber(value, digits = 3) {
  return value === null ? "none" : String(+value.toFixed(digits));
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

// Summarize a prompt by its last long line, without the chat template's tokens.
function summary(prompt) {
  const lines = prompt.replace(/<\|[^|]*\|>/g, "\n").split("\n").map((line) => line.trim());
  const last = lines.map((line, i) => [line, i]).filter(([line]) => line.length > 12).pop();
  return last ? last[0] : lines.join(" ").trim();
}

function sampleCard(sample) {
  const reward = element("span", {}, ["reward ", element("b", { textContent: formatNumber(sample.reward) })]);
  const advantage = element("span", {}, ["advantage ", element("b", { textContent: formatNumber(sample.advantage, 2) })]);
  const tokens = sample.num_tokens === null ? "" : `${sample.num_tokens} tokens`;
  const length = element("span", { textContent: sample.finish === "length" ? `${tokens}, truncated` : tokens });
  const branch = sample.prefix_tokens ? [element("span", { textContent: `branched after ${sample.prefix_tokens} tokens` })] : [];
  const node = element("div", {}, [
    element("header", {}, [reward, advantage, length, ...branch]),
    element("pre", {}, highlighted(sample.text)),
  ]);
  node.style.setProperty("--r", rewardColor(sample.reward));
  return node;
}

function openGroup(group) {
  current = group;
  for (const [i, button] of [...byId("groups").querySelectorAll("button")].entries()) {
    button.setAttribute("aria-current", String(listed[i] === group));
  }
  if (!group) return byId("group").replaceChildren();
  const shown = matchingSamples(group);
  const about = element("p", { className: "about" }, [`step ${group.step + 1}, prompt ${group.prompt_index}`]);
  if (group.answer !== null) about.append(", answer ", element("b", {}, highlighted(group.answer)));
  if (shown.length < group.samples.length) about.append(`; ${shown.length} of ${group.samples.length} samples match`);
  byId("group").replaceChildren(
    element("pre", { className: "prompt" }, highlighted(group.prompt)),
    about,
    element("div", { className: "cards" }, shown.map(sampleCard)),
  );
}

function groupRow(group) {
  const chips = group.samples.map((sample) => {
    const chip = element("i", { className: "chip", title: formatNumber(sample.reward) });
    chip.style.background = rewardColor(sample.reward);
    return chip;
  });
  const label = fields.step.value === "" ? `step ${group.step + 1}, prompt ${group.prompt_index}` : `prompt ${group.prompt_index}`;
  const button = element("button", { type: "button" }, [
    element("span", { className: "line", textContent: summary(group.prompt) }),
    element("span", { className: "line" }, [label, ...chips.slice(0, 16)]),
  ]);
  button.addEventListener("click", () => openGroup(group));
  return element("li", {}, [button]);
}

function listGroups() {
  const groups = data.runs[Number(fields.run.value)].groups;
  const found = groups.filter((group) => (fields.step.value === "" || group.step === Number(fields.step.value))
    && matchingSamples(group).length);
  const numSamples = found.reduce((sum, group) => sum + matchingSamples(group).length, 0);
  listed = found.slice(0, MAX_LISTED);
  byId("groups").replaceChildren(...listed.map(groupRow));
  const more = found.length > listed.length ? `, showing the first ${listed.length}` : "";
  byId("count").textContent = `${found.length} prompts, ${numSamples} samples${more}`;
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
  data.runs.forEach((run) => extendRewardRange(run.groups));
  fields.run.addEventListener("change", chooseStep);
  fields.step.addEventListener("change", listGroups);
  chooseStep();
}
