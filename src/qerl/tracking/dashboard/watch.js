// Below page.js: asks each second how the runs are, and for the page's parts when they have changed.
const EVERY_MS = 1000, MOST_SECONDS = 300;
const now = element("p", { id: "now" });
const gpus = element("section", { id: "gpus", hidden: true });
const shownParts = {}, busy = {};
let loaded = null;
document.querySelector("body > header").append(now);
document.querySelector("[data-part=tiles]").after(gpus);

async function ask(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply.json();
}

function say(states) {
  now.replaceChildren(...states.map((run, i) => {
    const name = data.runs.length > 1 ? `${data.runs[i].name}: ` : "";
    const made = element("span", { className: `state ${run.state}` }, [element("i"), name + run.text]);
    made.style.setProperty("--done", `${100 * run.done}%`);
    return made;
  }));
  document.title = `${states.map((run) => `${Math.floor(100 * run.done)}%`).join(" ")} ${data.runs.map((run) => run.name).join(", ")} - qerl`;
}

function meter(label, share, text) {
  const bar = element("b", { className: "bar" });
  bar.style.setProperty("--done", `${100 * Math.min(1, share ?? 0)}%`);
  return element("div", { className: "meter" }, [element("span", { textContent: label }), bar, element("span", { textContent: text })]);
}

// A GPU's last minutes, as long as this page has been looking: one at least, five at most.
function course(name) {
  const made = (kind, attributes) => {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    return shape;
  };
  const values = busy[name], width = Math.max(60, values.length), first = width - values.length;
  const line = values.map((share, i) => `${first + i},${(40 - 38 * share).toFixed(1)}`).join(" ");
  const svg = made("svg", { viewBox: `0 0 ${width - 1} 41`, preserveAspectRatio: "none", role: "img", "aria-label": `busy until now: ${name}` });
  svg.append(
    made("polygon", { class: "band", points: `${first},41 ${line} ${width - 1},41` }),
    made("polyline", { class: "curve", points: line, "vector-effect": "non-scaling-stroke" }),
  );
  return svg;
}

function draw(found) {
  gpus.hidden = !found.length;
  gpus.replaceChildren(...found.map((gpu) => {
    (busy[gpu.name] ??= []).push(gpu.busy_share ?? 0);
    busy[gpu.name].splice(0, busy[gpu.name].length - MOST_SECONDS);
    const about = [gpu.watts === null ? "" : `${Math.round(gpu.watts)} W`, gpu.celsius === null ? "" : `${gpu.celsius} \u00b0C`];
    const share = gpu.memory_gb === null || !gpu.memory_total_gb ? null : gpu.memory_gb / gpu.memory_total_gb;
    return element("div", { className: "s0" }, [
      element("h3", {}, [gpu.name, element("small", { textContent: about.filter(Boolean).join(", ") })]),
      meter("busy", gpu.busy_share, gpu.busy_share === null ? "not known" : `${Math.round(100 * gpu.busy_share)} %`),
      meter("memory", share, share === null ? "not known" : `${gpu.memory_gb.toFixed(1)} of ${gpu.memory_total_gb.toFixed(0)} GB`),
      course(gpu.name),
    ]);
  }));
}

async function renew() {
  const fresh = await ask("update");
  for (const [name, html] of Object.entries(fresh.parts)) {
    if (shownParts[name] === html) continue;
    shownParts[name] = html;
    // The server has escaped what a run says.
    const parsed = new DOMParser().parseFromString(html, "text/html").body.childNodes;
    document.querySelector(`[data-part=${name}]`).replaceChildren(...parsed);
  }
  data = fresh.data;
  listen();
  hide();
  byId("tip").hidden = true;
  if (under && plots()[under[1]]) point(under[0], plots()[under[1]], data.charts[under[1]]);
  await choose();
}

// The samples of the chosen step of the chosen run.
choose = async function () {
  const index = Number(fields.run.value), steps = data.runs[index].steps;
  const before = steps.includes(Number(fields.step.value)) ? fields.step.value : "";
  if (fields.step.options.length !== steps.length + 1 || before !== fields.step.value || loaded?.run !== index) fillSteps(steps, before);
  const step = before === "" ? steps[steps.length - 1] : Number(before);
  byId("samples").classList.toggle("none", step === undefined);
  if (step === undefined) return;
  if (loaded?.run !== index || loaded.step !== step) {
    const groups = await ask(`samples?run=${index}&step=${step}`);
    if (Number(fields.run.value) !== index || (fields.step.value || String(step)) !== String(step)) return;
    loaded = { run: index, step, groups };
    range(groups);
  }
  data.runs[index].groups = loaded.groups;
  list();
};
for (const field of [fields.run, fields.step]) field.addEventListener("change", () => choose().catch(lost));

function lost() {
  now.replaceChildren(element("span", { className: "state lost" }, [element("i"), "qerl watch does not answer; this is the last it said"]));
}

async function look(isFirst) {
  try {
    const reply = await ask("now");
    if (reply.tag !== data.tag) await renew();
    else if (isFirst) await choose();
    say(reply.runs);
    draw(reply.gpus);
  } catch (error) {
    lost();
  }
  setTimeout(look, EVERY_MS);
}
look(true);
