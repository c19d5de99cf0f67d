// Appended to page.js: requests the runs' states every second, and the page's parts when they have changed.
const POLL_MS = 1000, MAX_SECONDS = 300;
const now = element("p", { id: "now" });
const gpus = element("section", { id: "gpus", hidden: true });
const currentParts = {}, usageHistory = {};
let loaded = null;
document.querySelector("body > header").append(now);
document.querySelector("[data-part=tiles]").after(gpus);

async function getJson(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply.json();
}

function showStates(states) {
  now.replaceChildren(...states.map((run, i) => {
    const name = data.runs.length > 1 ? `${data.runs[i].name}: ` : "";
    const node = element("span", { className: `state ${run.state}` }, [element("i"), name + run.text]);
    node.style.setProperty("--done", `${100 * run.done}%`);
    return node;
  }));
  document.title = `${states.map((run) => `${Math.floor(100 * run.done)}%`).join(" ")} ${data.runs.map((run) => run.name).join(", ")} - qerl`;
}

function meter(label, share, text) {
  const bar = element("b", { className: "bar" });
  bar.style.setProperty("--done", `${100 * Math.min(1, share ?? 0)}%`);
  return element("div", { className: "meter" }, [element("span", { textContent: label }), bar, element("span", { textContent: text })]);
}

// A GPU's utilization since the page was opened; the axis is one to five minutes long.
function usageCurve(name) {
  const values = usageHistory[name], width = Math.max(60, values.length), first = width - values.length;
  const line = values.map((share, i) => `${first + i},${(40 - 38 * share).toFixed(1)}`).join(" ");
  return shape("svg", { viewBox: `0 0 ${width - 1} 41`, preserveAspectRatio: "none", role: "img", "aria-label": `GPU usage: ${name}` }, [
    shape("polygon", { class: "band", points: `${first},41 ${line} ${width - 1},41` }),
    shape("polyline", { class: "curve", points: line, "vector-effect": "non-scaling-stroke" }),
  ]);
}

function drawGpus(found) {
  gpus.hidden = !found.length;
  gpus.replaceChildren(...found.map((gpu) => {
    (usageHistory[gpu.name] ??= []).push(gpu.busy_share ?? 0);
    usageHistory[gpu.name].splice(0, usageHistory[gpu.name].length - MAX_SECONDS);
    const about = [gpu.watts === null ? "" : `${Math.round(gpu.watts)} W`, gpu.celsius === null ? "" : `${gpu.celsius} \u00b0C`];
    const share = gpu.memory_gb === null || !gpu.memory_total_gb ? null : gpu.memory_gb / gpu.memory_total_gb;
    return element("div", { className: "s0" }, [
      element("h3", {}, [gpu.name, element("small", { textContent: about.filter(Boolean).join(", ") })]),
      meter("usage", gpu.busy_share, gpu.busy_share === null ? "unknown" : `${Math.round(100 * gpu.busy_share)} %`),
      meter("memory", share, share === null ? "unknown" : `${gpu.memory_gb.toFixed(1)} of ${gpu.memory_total_gb.toFixed(0)} GB`),
      usageCurve(gpu.name),
    ]);
  }));
}

async function refreshPage() {
  const fresh = await getJson("update");
  for (const [name, html] of Object.entries(fresh.parts)) {
    if (currentParts[name] === html) continue;
    currentParts[name] = html;
    // The server has escaped all text of a run.
    const parsed = new DOMParser().parseFromString(html, "text/html").body.childNodes;
    const part = document.querySelector(`[data-part=${name}]`), isOpen = part.querySelector("details")?.open;
    part.replaceChildren(...parsed);
    if (isOpen) part.querySelector("details")?.setAttribute("open", "");
  }
  data = fresh.data;
  applyHidden();
  attachPointer();
  await chooseStep();
}

// Load the samples of the chosen step of the chosen run.
chooseStep = async function () {
  const index = Number(fields.run.value), steps = data.runs[index].steps;
  const before = steps.includes(Number(fields.step.value)) ? fields.step.value : "";
  if (fields.step.options.length !== steps.length + 1 || before !== fields.step.value || loaded?.run !== index) fillSteps(steps, before);
  const step = before === "" ? steps[steps.length - 1] : Number(before);
  byId("samples").classList.toggle("none", step === undefined);
  showKinds();
  if (step === undefined) return;
  if (isHeldOut()) {
    const groups = await getJson(`samples?run=${index}&held_out=1`);
    extendRewardRange(groups);
    data.runs[index].heldOut = groups;
    return listGroups();
  }
  if (loaded?.run !== index || loaded.step !== step) {
    const groups = await getJson(`samples?run=${index}&step=${step}`);
    if (Number(fields.run.value) !== index || (fields.step.value || String(step)) !== String(step)) return;
    loaded = { run: index, step, groups };
    extendRewardRange(groups);
  }
  data.runs[index].groups = loaded.groups;
  listGroups();
};
groupsOf = (group) => getJson(`samples?run=${fields.run.value}&prompt=${group.prompt_index}`).catch(() => [group]);
for (const field of [fields.run, fields.kind, fields.step]) field.addEventListener("change", () => chooseStep().catch(showDisconnected));

function showDisconnected() {
  now.replaceChildren(element("span", { className: "state lost" }, [element("i"), "qerl watch does not answer; showing the last known state"]));
}

async function poll(isFirst) {
  try {
    const reply = await getJson("now");
    if (reply.tag !== data.tag) await refreshPage();
    else if (isFirst) await chooseStep();
    showStates(reply.runs);
    drawGpus(reply.gpus);
  } catch (error) {
    showDisconnected();
  }
  setTimeout(poll, POLL_MS);
}
poll(true);
