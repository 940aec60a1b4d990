"use strict";
// One job: followed by server-sent events, drawn again when something changed.

const ENDED = ["finished", "stopped", "failed"];
const RETRY_MS = 3000;
const COST_MS = 30000; // VMs cost also while nothing happens
const MOST_POINTS = 2000; // that are asked for at a time
const MOST_STEPS = 4000; // that are kept
const MOST_EVENTS = 500; // that are shown, and searched for decisions
let job = null;
let steps = []; // some of them, see `thinned`
let skipped = 0; // steps in which fp16 updated nothing
let facts = new Map(); // by sequence number
let seats = []; // the newest placement, shown until the next one

async function followJob(name, mine) {
  const base = `/api/v1/jobs/${encodeURIComponent(name)}`;
  try {
    job = await call("GET", base);
  } catch (error) {
    if (mine !== visit || !at("sign-in").hidden) return;
    lost();
    if (error.status === 404) location.hash = "#/"; // there is no such job
    else timer = setTimeout(route, RETRY_MS);
    return;
  }
  if (mine !== visit) return;
  steps = [];
  skipped = 0;
  facts = new Map();
  seats = [];
  unfolded.clear();
  show("job");
  at("legend").replaceChildren(phaseLegend());
  drawJob();
  setTimeout(costOn, COST_MS, base, mine);
  source = new EventSource(`${base}/stream`);
  // The stream brings what happens from now on; what came before, or while it was away, is asked for.
  source.onopen = () => catchUp(base, mine).catch(lost);
  source.onerror = () => {
    lost();
    if (source.readyState === EventSource.CLOSED) timer = setTimeout(route, RETRY_MS); // it gave up: we do not
  };
  source.addEventListener("status", (event) => {
    job = JSON.parse(event.data);
    drawSoon();
  });
  source.addEventListener("step", (event) => addSteps([JSON.parse(event.data)]));
  source.addEventListener("fact", (event) => addFacts([JSON.parse(event.data)]));
}

async function costOn(base, mine) {
  if (mine !== visit) return;
  if (job.cost?.hourly_at_most) {
    const view = await call("GET", base).catch(() => null); // the stream says when the manager is away
    if (mine === visit && view) {
      job.cost = view.cost;
      job.vms = view.vms;
      drawSoon();
    }
  }
  setTimeout(costOn, COST_MS, base, mine);
}

async function catchUp(base, mine) {
  connection("live", "live");
  const known = Math.max(0, ...facts.keys());
  if (steps.length) job = await call("GET", base); // steps may have been lost while it was away
  const since = stepsKnown();
  const [metrics, events] = await Promise.all([
    call("GET", `${base}/metrics?since=${since}&points=${MOST_POINTS}`),
    call("GET", `${base}/events?since=${known}&limit=${MOST_EVENTS}`),
  ]);
  if (mine !== visit) return;
  const stored = metrics.metrics;
  const last = stored.length ? stored[stored.length - 1].step : since;
  const before = steps.filter((step) => step.step <= since);
  const live = steps.filter((step) => step.step > last);
  skipped = (since ? skipped : 0) + metrics.num_skipped + live.filter((step) => step.skipped).length;
  steps = thinned(before.concat(stored, live), MOST_STEPS);
  addFacts(events.events);
  drawSoon();
}

// The newest step that the page has of the job's current history; 0: none.
function stepsKnown() {
  if (!steps.length) return 0;
  const last = steps[steps.length - 1];
  const again = job.morphs.filter((morph) => morph.step !== null && morph.generation > last.generation);
  return Math.min(last.step, ...again.map((morph) => morph.step));
}

function addSteps(added) {
  for (const step of added) {
    // A step that is done again takes the place of what was built upon the lost one.
    while (steps.length && steps[steps.length - 1].step >= step.step) steps.pop();
    steps.push(step);
    if (step.skipped) skipped += 1;
    if (steps.length > 2 * MOST_STEPS) steps = thinned(steps, MOST_STEPS);
    job.step = step.step;
    job.loss = step.loss;
  }
  drawSoon();
}

function addFacts(added) {
  for (const entry of added) facts.set(entry.sequence, entry);
  const newest = [...facts.keys()].sort((a, b) => b - a).slice(0, MOST_EVENTS);
  at("events").replaceChildren(...newest.map((sequence) => eventLine(facts.get(sequence), job.job)));
  at("decisions").replaceChildren(decisionList([...facts.values()], job.job));
}

let drawing = false;
function drawSoon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    drawJob();
  });
}

function drawJob() {
  document.title = `${job.step}/${job.steps} ${job.job} – Makara`;
  at("job-name").textContent = job.job;
  at("job-status").textContent = job.status;
  at("job-status").className = `badge ${job.status}`;
  at("stop").hidden = [...ENDED, "stopping"].includes(job.status);
  at("job-reason").textContent = job.reason || "";
  drawOffers();
  at("job-reason").className = job.status === "finished" || job.status === "stopped" ? "quiet" : "bad";
  const trying = job.trouble.length ? `Trying again to ${job.trouble.map(task).join("; to ")}` : "";
  at("job-trouble").textContent = [job.stalled, job.isolated, trying].filter(Boolean).join(". ");
  at("job-notes").textContent = [job.doing, ...job.notes].filter(Boolean).join(". ");
  at("job-traceback").hidden = !job.traceback;
  at("job-traceback").textContent = job.traceback || "";
  const percent = (100 * job.step) / job.steps;
  at("bar").style.width = `${percent}%`;
  at("bar").parentElement.setAttribute("aria-valuenow", Math.round(percent));
  drawNumbers();
  drawCost();
  at("loss").replaceChildren(lossChart(steps, job.morphs, job.steps, Math.max(240, at("loss").clientWidth)));
  drawPlacement();
  explain();
  at("morphs").replaceChildren(morphTable(job.morphs, job.job));
  drawVms();
  drawCheckpoints();
}

// What a person may have a job do that waits, was stopped or failed.
const OFFERS = {
  go_on: ["Go on", "Have it go on from its newest checkpoint, on VMs that are rented anew?"],
  again: ["Try again", "Has what was wrong been put right?"],
  from_head: ["Go on from the head", "Go on from the checkpoints that the head in the store lists?"],
  restart: ["Start over", "Begin at step 0? The checkpoints that are listed are deleted."],
};

// What a waiting job stands to lose, and when.
function atStake() {
  const { vms_until: until, unsaved_steps: unsaved } = job.waiting;
  const lines = [];
  if (job.num_live_vms && until === null) lines.push("Its VMs are kept as long as its generation steps, which can publish checkpoints.");
  else if (job.num_live_vms) lines.push(`Its VMs are kept until ${clock(until)}, then saved from and released.`);
  const held = job.num_live_vms ? "only its VMs hold them" : "no VM holds them any more";
  if (unsaved) lines.push(`Steps ${unsaved[0]} to ${unsaved[1]} cannot be saved as things are, and ${held}.`);
  return lines.join(" ");
}

// What a person may have it do; a job with secrets goes on by `makara resume`, which sends them again.
function offersOf() {
  if (job.waiting) return job.waiting.offers;
  return ["stopped", "failed"].includes(job.status) && !job.secrets.length ? ["go_on"] : [];
}

// How mended code goes on: as a new job.
function mended() {
  const newest = job.checkpoints.length ? job.checkpoints[0].step : 0;
  if (job.status !== "failed" || newest >= job.steps) return "";
  const from = newest ? `, from step ${newest} with checkpoint.start_from: ${job.job}` : "";
  return `Mended code or settings are a new job${from}; this one goes on with those that it has.`;
}

function drawOffers() {
  const offers = offersOf();
  at("job-stake").textContent = job.waiting ? atStake() : mended();
  const wrote = job.waiting?.console || "";
  at("job-console-title").hidden = at("job-console").hidden = !wrote;
  at("job-console").textContent = wrote;
  at("job-offers").hidden = !offers.length;
  at("job-offers").replaceChildren(...offers.map((how) => {
    const [title, question] = OFFERS[how];
    const button = element("button", "", title);
    button.addEventListener("click", () => {
      const from = how === "restart" && job.waiting?.start_from;
      if (!window.confirm(from ? `${question} It does NOT begin from ${from}.` : question)) return;
      call("POST", `/api/v1/jobs/${encodeURIComponent(job.job)}/resume`, { how: how === "go_on" ? "again" : how })
        .catch((error) => connection(error.message, "lost"));
    });
    return button;
  }));
}

// "request_vm: why" -> "request vm: why"
function task(trouble) {
  return trouble.replace(/^\w+/, (command) => command.replaceAll("_", " ").replace("vm", "a VM"));
}

function drawNumbers() {
  const running = job.status === "running" && job.seconds_per_step !== null;
  const values = {
    Step: `${job.step} / ${job.steps}`,
    Loss: job.loss === null ? "–" : job.loss.toFixed(4),
    "Samples/s": job.samples_per_s === null ? "–" : job.samples_per_s.toFixed(0),
    "Time a step": duration(job.seconds_per_step),
    "As predicted": duration(job.predicted_s),
    "P×D": job.shape ? shapeText(job.shape) : "–",
    VMs: vmCount(job),
    "Time left": running ? duration(job.seconds_per_step * (job.steps - job.step)) : "–",
  };
  const newest = steps[steps.length - 1];
  if (newest && newest.loss_scale !== null) {
    values["Loss scale"] = `2^${Math.log2(newest.loss_scale)}, ${skipped} skipped`;
  }
  at("numbers").replaceChildren(...figures(Object.entries(values)));
}

function figures(pairs) {
  return pairs.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    return pair;
  });
}

function drawCost() {
  at("cost-card").hidden = !job.cost;
  if (!job.cost) return;
  at("cost").replaceChildren(...figures(costFigures(job.cost)));
  at("cost-sources").textContent = costSources(job.cost);
}

function vmCount(entry) {
  const joined = entry.vms.filter((vm) => vm.status === "joined" || vm.status === "noticed").length;
  return joined === entry.num_live_vms ? `${joined}` : `${joined} of ${entry.num_live_vms}`;
}

// Between two plans the last one stays, faded, so that nothing jumps.
function drawPlacement() {
  const now = job.placement.length > 0;
  if (now) seats = job.placement;
  const next = job.morphs.length ? job.morphs[job.morphs.length - 1] : null;
  const waits = next && next.step === null && !next.ended && !(now && next.generation === job.generation);
  const coming = waits ? `generation ${next.generation}, ${shapeText(next.shape)}, comes next` : "";
  const running = now ? `${shapeText(job.shape)}, generation ${job.generation}` : "none runs";
  const ended = ENDED.includes(job.status);
  at("shape").textContent = ended ? "" : [running, coming].filter(Boolean).join("; ");
  if (ended || !seats.length) {
    at("placement").replaceChildren(element("p", "quiet", ended ? "The job has ended." : "No plan yet."));
    return;
  }
  const grid = placementGrid(seats, job.job);
  grid.classList.toggle("stale", !now);
  at("placement").replaceChildren(grid);
}

// The ranking of plans is computed when somebody looks, once for each generation.
let explained = null;
async function explain() {
  at("why").hidden = !job.placement.length;
  const wanted = at("why").open && job.placement.length ? `${job.job} ${job.generation}` : null;
  if (wanted === explained) return;
  explained = wanted;
  if (!wanted) return;
  const mine = visit;
  try {
    const plan = await call("GET", `/api/v1/jobs/${encodeURIComponent(job.job)}/plan`);
    if (mine !== visit || explained !== wanted) return;
    at("why-text").textContent = [plan.why, plan.after_a_death].filter(Boolean).join(" ");
    at("why-plans").replaceChildren(planTable(plan.rows));
  } catch (error) {
    if (mine === visit) at("why-text").textContent = error.message; // asked again when it is opened again
  }
}

function planTable(rows) {
  const heads = ["P×D", "Step", "Samples/s", "Deaths", "Idle", "Memory", ""];
  return table(heads, rows.filter((row, index) => index < 8 || row.running).map((row) => [
    shapeText(row.shape),
    duration(row.predicted_s),
    row.samples_per_s.toPrecision(3),
    row.lost < 5e-4 ? "" : `+${(100 * row.lost).toPrecision(2)} %`,
    `${row.workers_idle}`,
    row.peak_bytes === null ? "" : `${(row.peak_bytes / 1e6).toPrecision(3)} MB`,
    row.running ? badge("running") : "",
  ]));
}

function noticed(vm) {
  const node = element("span");
  node.append(badge(vm.status), vm.notice ? ` ${vm.notice}` : "");
  return node;
}

function drawVms() {
  const rank = { noticed: 0, joined: 1, requested: 2, ended: 3 };
  const sorted = job.vms.slice().sort((a, b) => rank[a.status] - rank[b.status] || b.requested_at - a.requested_at);
  const rows = sorted.map((vm) => [
    bare(vm.vm, job.job),
    noticed(vm),
    vm.detail === "silent" ? "silent" : vm.workers.map((worker) => worker.split(": ")[1]).join(", ") || (vm.reason || "").replaceAll("_", " "),
    clock(vm.ended_at || vm.joined_at || vm.requested_at),
    ...(job.cost ? vmCostCells(vm) : []),
  ]);
  const heads = ["VM", "Status", "Workers", "Since", ...(job.cost ? VM_COST_HEADS : [])];
  at("vms").replaceChildren(rows.length ? table(heads, rows) : element("p", "quiet", "None yet."));
}

function drawCheckpoints() {
  const list = element("p", "", job.checkpoints.length ? "Published: steps " : "None yet.");
  for (const reference of job.checkpoints) list.append(element("span", "badge", reference.step), " ");
  const nodes = [list, element("p", "quiet", job.checkpoint_uri)];
  if (job.export_uri) nodes.push(element("p", "", `Weights: ${job.export_uri}`), element("p", "quiet", `Hash: ${job.export_sha256}`));
  at("checkpoints").replaceChildren(...nodes);
}
