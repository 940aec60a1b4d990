"use strict";
// Decisions: the plans that were weighed for each, what each is worth, and why others were not taken.

const MOST_DECISIONS = 50;
const KINDS = { best: "new", running: "as it runs", "as many": "as many VMs" };
const unfolded = new Set(); // sequence numbers of the decisions that are open

// The newest first. `entries` are facts with their sequence numbers, in any order.
function decisionList(entries, job) {
  const weighed = entries.filter((entry) => entry.fact.alternatives && entry.fact.alternatives.length);
  weighed.sort((a, b) => b.sequence - a.sequence);
  const list = element("div");
  if (!weighed.length) list.append(element("p", "quiet", "None yet."));
  for (const entry of weighed.slice(0, MOST_DECISIONS)) list.append(decision(entry, job));
  return list;
}

function decision(entry, job) {
  const node = element("details");
  node.open = unfolded.has(entry.sequence);
  node.addEventListener("toggle", () => (node.open ? unfolded.add(entry.sequence) : unfolded.delete(entry.sequence)));
  const taken = entry.fact.alternatives[0];
  const others = entry.fact.alternatives.length - 1;
  const beside = others ? `, beside ${plural(others, "other")}` : "";
  const text = `${clock(entry.at)}  ${bare(entry.fact.cause || "more VMs", job)}: ${nameOf(taken)}${beside}`;
  node.append(element("summary", "", text), alternativesTable(entry.fact.alternatives));
  return node;
}

function nameOf(one) {
  return [KINDS[one.name] || one.name, shapeText(one.shape)].filter(Boolean).join(" ");
}

function alternativesTable(alternatives) {
  const heads = ["Plan", "Step", "Begins in", "Losses/h", "Next loss costs", "Worth", ""];
  return table(heads, alternatives.map((one, index) => [
    nameOf(one),
    duration(one.step_s),
    duration(one.begins_s),
    one.changes_per_s === null ? "–" : (3600 * one.changes_per_s).toPrecision(2),
    duration(one.change_s),
    one.worth === null ? "–" : `${one.worth.toPrecision(4)} samples/s`,
    index === 0 ? badge("taken") : one.rejected || (one.worth > alternatives[0].worth ? "not worth enough more" : "worth less"),
  ]));
}
