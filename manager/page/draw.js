"use strict";
// Pictures drawn from values: no state, no requests.

const PHASES = ["decide", "prepare", "open", "finish", "form", "first_step"];

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function badge(status) {
  return element("span", `badge ${status}`, status);
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}

function clock(at) {
  return new Date(1000 * at).toLocaleTimeString();
}

function table(heads, rows) {
  const node = element("table");
  const head = node.createTHead().insertRow();
  for (const text of heads) head.append(element("th", "", text));
  const body = node.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    for (const cell of cells) {
      const place = row.insertCell();
      if (cell instanceof Node) place.append(cell);
      else place.textContent = cell === null || cell === undefined ? "" : cell;
    }
  }
  return node;
}

// About `most` of these steps: those with the least and the greatest loss of each stretch, and the last one.
function thinned(steps, most) {
  if (steps.length <= most) return steps;
  const width = Math.ceil(steps.length / (most / 2));
  const kept = [];
  for (let from = 0; from < steps.length; from += width) {
    const some = steps.slice(from, from + width);
    const losses = some.filter((step) => step.loss !== null);
    const [least, greatest] = losses.reduce(
      ([low, high], step) => [step.loss < low.loss ? step : low, step.loss > high.loss ? step : high],
      [losses[0] || some[0], losses[0] || some[0]],
    );
    kept.push(...[...new Set([least, greatest])].sort((a, b) => a.step - b.step));
  }
  const last = steps[steps.length - 1];
  return kept[kept.length - 1] === last ? kept : kept.concat(last);
}

// The loss over steps, `width` pixels wide; dashed lines mark the steps at which a new plan took over.
function lossChart(steps, morphs, total, width) {
  const points = steps.filter((step) => step.loss !== null);
  if (points.length < 2) return element("p", "quiet", "No steps yet.");
  const [height, left, right, bottom, top] = [250, 40, 6, 24, 20];
  const low = Math.min(...points.map((p) => p.loss));
  const high = Math.max(...points.map((p) => p.loss));
  const span = high - low || 1;
  const x = (step) => left + ((width - left - right) * step) / Math.max(1, total);
  const y = (loss) => top + ((height - top - bottom) * (high - loss)) / span;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img" });
  picture.append(svg("title", {}, `Loss ${points[points.length - 1].loss.toFixed(3)} at step ${points[points.length - 1].step}`));
  for (let i = 0; i <= 4; i++) {
    const loss = low + (span * i) / 4;
    picture.append(svg("line", { x1: left, x2: width - right, y1: y(loss), y2: y(loss), class: "grid" }));
    picture.append(svg("text", { x: left - 6, y: y(loss) + 4, class: "label", "text-anchor": "end" }, loss.toFixed(2)));
  }
  picture.append(svg("text", { x: left, y: height - 6, class: "label" }, "step 0"));
  picture.append(svg("text", { x: width - right, y: height - 6, class: "label", "text-anchor": "end" }, `step ${total}`));
  let labelled = -Infinity;
  for (const morph of morphs.filter((m) => m.step !== null)) {
    const at = x(morph.step);
    const line = svg("line", { x1: at, x2: at, y1: top - 6, y2: height - bottom, class: "morph" });
    line.append(svg("title", {}, `generation ${morph.generation}: ${shapeText(morph.shape)}, ${morph.cause}`));
    picture.append(line);
    if (at - labelled < 24) continue; // the next one would cover it
    labelled = at;
    picture.append(svg("text", { x: at + 2, y: top - 9, class: "label" }, shapeText(morph.shape)));
  }
  const path = thinned(points, 1200).map((p, i) => `${i ? "L" : "M"}${x(p.step).toFixed(1)} ${y(p.loss).toFixed(1)}`).join("");
  picture.append(svg("path", { d: path, class: "loss" }));
  return picture;
}

// Rows are replicas, columns are stages; a colour belongs to a stage.
function placementGrid(seats, job) {
  const grid = element("div", "placement");
  const depth = Math.max(...seats.map((seat) => seat.stage)) + 1;
  const replicas = Math.max(...seats.map((seat) => seat.replica)) + 1;
  grid.style.setProperty("--depth", depth);
  grid.append(element("span", "corner"));
  for (let stage = 0; stage < depth; stage++) grid.append(element("span", "column-name", depth > 4 ? `${stage}` : `stage ${stage}`));
  for (let replica = 0; replica < replicas; replica++) {
    grid.append(element("span", "row-name", `replica ${replica}`));
    const row = seats.filter((s) => s.replica === replica);
    for (let stage = 0; stage < depth; stage++) grid.append(seatBox(row.find((s) => s.stage === stage), job));
  }
  return grid;
}

function seatBox(seat, job) {
  if (!seat) return element("span");
  const box = element("div", `seat stage-${seat.stage % 8} phase-${seat.phase || "unknown"}`);
  const sections = seat.stop - seat.start === 1 ? `${seat.start}` : `${seat.start}–${seat.stop - 1}`;
  box.append(element("b", "", bare(seat.vm, job)), element("span", "", `§ ${sections}`), element("small", "", seat.phase || "silent"));
  box.title = `${seat.worker}, rank ${seat.rank}, stage ${seat.stage}, sections ${sections}`;
  return box;
}

function morphTable(morphs, job) {
  if (!morphs.length) return element("p", "quiet", "None yet.");
  const sum = (morph) => Object.values(morph.phases_s).reduce((a, b) => a + b, 0);
  const longest = Math.max(...morphs.map(sum), 0.001);
  const rows = morphs.slice().reverse().map((morph) => {
    const bar = element("div", "phases");
    for (const name of PHASES.filter((phase) => phase in morph.phases_s)) {
      const part = element("span", `phase ${name}`);
      part.style.width = `${(100 * morph.phases_s[name]) / longest}%`;
      const first = morph.in_flight ? "then the rest of the step" : "then the first step";
      part.title = `${name === "first_step" ? first : name} ${duration(morph.phases_s[name])}`;
      bar.append(part);
    }
    const changed = morph.before && morph.before !== morph.shape;
    const shape = shapeText(changed ? `${morph.before} → ${morph.shape}` : morph.shape);
    return [morph.generation, clock(morph.at), shape, bare(morph.cause, job), outcome(morph, job), bar, duration(sum(morph))];
  });
  return table(["Gen.", "At", "P×D", "Cause", "Outcome", "Time to the first step", ""], rows);
}

function outcome(morph, job) {
  if (morph.step === null) return morph.ended ? `given up: ${bare(morph.ended, job)}` : "under way";
  const from = { start: "from the start", peers: "state from peers", store: "state from the store" }[morph.rung];
  const again = morph.lost_steps ? `, ${plural(morph.lost_steps, "step")} again` : "";
  const kept = morph.in_flight ? `, ${short(morph.in_flight.kept)} of ${short(morph.in_flight.kept + morph.in_flight.left)} micro-batches kept` : "";
  return `step ${morph.step}, ${from}${again}${kept}`;
}

function short(number) {
  return String(Math.round(number * 10) / 10);
}

function phaseLegend() {
  const list = document.createDocumentFragment();
  for (const name of PHASES) {
    const entry = element("span");
    entry.append(element("i", `phase ${name}`), name.replace("_", " "));
    list.append(entry);
  }
  return list;
}

function eventLine(entry, job) {
  const [title, text, style] = say(entry.fact, job);
  const line = element("li");
  line.append(element("time", "", clock(entry.at)), element("b", style, title), element("span", "quiet", text));
  return line;
}
