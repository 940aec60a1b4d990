"use strict";
// The status page: signs in and lists jobs; job.js follows one.

const at = (id) => document.getElementById(id);
let csrf = null;
let source = null;
let timer = null;
let visit = 0; // counts changes of route: an answer to an older one is dropped

async function call(method, path, body) {
  const headers = method === "GET" ? {} : { "X-CSRF-Token": csrf || "" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  if (response.status === 401) {
    show("sign-in");
    throw new Error("signed out");
  }
  if (!response.ok) {
    const { detail } = await response.json();
    throw Object.assign(new Error(detail), { status: response.status });
  }
  return response.status === 204 ? null : response.json();
}

function show(name) {
  for (const id of ["sign-in", "jobs", "job"]) at(id).hidden = id !== name;
  at("sign-out").hidden = name === "sign-in";
}

async function signIn(token) {
  const form = new URLSearchParams({ token });
  const response = await fetch("/login", { method: "POST", body: form });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.detail);
  csrf = answer.csrf;
}

async function start() {
  const given = /^#token=(.+)$/.exec(location.hash); // a fragment is never sent to a server
  if (given) {
    history.replaceState(null, "", "/");
    await signIn(decodeURIComponent(given[1])).catch((error) => (at("sign-in-error").textContent = error.message));
  }
  try {
    csrf = (await call("GET", "/session")).csrf;
  } catch (error) {
    return show("sign-in");
  }
  route();
}

function route() {
  if (source) source.close();
  clearTimeout(timer);
  source = null;
  visit += 1;
  connection("");
  document.title = "Makara";
  const match = /^#\/jobs\/(.+)$/.exec(location.hash);
  if (match) followJob(decodeURIComponent(match[1]), visit);
  else listJobs(visit);
}

// `style`: live, lost, or nothing.
function connection(text, style) {
  at("connection").textContent = text;
  at("connection").className = style || "";
  at("connection").title = style === "lost" ? "training goes on without the manager" : "";
}

function lost() {
  connection("reconnecting", "lost");
}

// ---- jobs --------------------------------------------------------------------------------------------------

async function listJobs(mine) {
  try {
    const { jobs, next } = await call("GET", "/api/v1/jobs");
    if (mine !== visit) return;
    connection("live", "live");
    show("jobs");
    at("job-list").replaceChildren(...(jobs.length ? jobs.map(jobCard) : [element("p", "quiet", "No job yet: makara apply -f job.yaml")]));
    if (next) at("job-list").append(element("p", "quiet", `Older than these ${next}: makara ps`));
  } catch (error) {
    if (mine !== visit || !at("sign-in").hidden) return;
    lost();
  }
  timer = setTimeout(listJobs, 2000, mine);
}

function jobCard(entry) {
  const card = element("a", "card");
  card.href = `#/jobs/${encodeURIComponent(entry.job)}`;
  const head = element("div", "title");
  head.append(element("b", "", entry.job), badge(entry.status));
  const bar = element("div", "bar");
  const inside = element("div");
  inside.style.width = `${(100 * entry.step) / entry.steps}%`;
  bar.append(inside);
  const loss = entry.loss === null ? "" : `loss ${entry.loss.toFixed(3)} · `;
  const shape = entry.shape ? ` · ${shapeText(entry.shape)}` : "";
  const cost = entry.cost ? ` · ${costShort(entry.cost)}` : "";
  const owner = entry.owner ? ` · ${entry.owner}` : "";
  card.append(head, bar, element("p", "quiet", `${loss}step ${entry.step} of ${entry.steps}${shape} · ${vmCount(entry)} VMs${cost}${owner}`));
  return card;
}

// ---- what a user does --------------------------------------------------------------------------------------

at("sign-in").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  at("sign-in-error").textContent = "";
  try {
    await signIn(at("token").value);
    at("token").value = "";
    route();
  } catch (error) {
    at("sign-in-error").textContent = error.message;
  }
});
at("sign-out").addEventListener("click", async () => {
  await call("POST", "/logout").catch(() => null);
  if (source) source.close();
  clearTimeout(timer);
  visit += 1;
  csrf = null;
  connection("");
  show("sign-in");
});
at("stop").addEventListener("click", async () => {
  const follows = job.status === "exporting" ? "Its weights are not exported then." : "A checkpoint is published first.";
  if (confirm(`Stop ${job.job}? ${follows}`)) {
    await call("POST", `/api/v1/jobs/${encodeURIComponent(job.job)}/stop`).catch((error) => connection(error.message, "lost"));
  }
});
at("why").addEventListener("toggle", () => job && explain());

window.addEventListener("hashchange", route);
window.addEventListener("resize", () => job && !at("job").hidden && drawSoon());
start();
