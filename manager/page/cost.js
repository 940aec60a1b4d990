"use strict";
// What a job and its VMs cost, in words: no state, no requests, no document.

const MARKETS = { spot: "spot", on_demand: "on demand" };

// With two digits after the point; below ten cents with four.
function usd(amount) {
  const size = Math.abs(amount);
  const digits = size >= 0.1 || size === 0 ? 2 : 4;
  const text = size.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return `${amount < 0 ? "-" : ""}$${text}`;
}

// As clouds name their prices: with two digits after the point, and up to four.
function rate(hourly) {
  return `$${hourly.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 4 })}`;
}

// [title, value] of each figure of a job.
function costFigures(cost) {
  const figures = [
    ["So far", usd(cost.spent)],
    ["At most so far", usd(cost.at_most)],
    ["An hour", rate(cost.hourly)],
    ["At most an hour", rate(cost.hourly_at_most)],
  ];
  for (const [market, title] of Object.entries(MARKETS)) {
    const { spent, hourly, num_vms: count } = cost[market];
    if (spent || count) figures.push([`${title[0].toUpperCase()}${title.slice(1)}`, `${usd(spent)}, ${count} at ${rate(hourly)}/h`]);
  }
  if (cost.max_hourly_cost !== null) figures.push(["Left of hourly cap", `${usd(cost.hourly_left)} of ${usd(cost.max_hourly_cost)}`]);
  if (cost.budget !== null) figures.push(["Left of budget", `${usd(cost.budget_left)} of ${usd(cost.budget)}`]);
  return figures;
}

// Who says what VMs cost, and when.
function costSources(cost) {
  return Object.entries(cost.prices).map(([source, at]) => `${source}, ${clock(at)}`).join("; ");
}

function costShort(cost) {
  return `${usd(cost.spent)} so far, ${rate(cost.hourly)}/h`;
}

const VM_COST_HEADS = ["Where", "An hour", "So far"];

function vmCostCells(vm) {
  const cost = vm.cost;
  if (!cost) return ["", "", ""];
  const where = [MARKETS[cost.market], cost.provider, cost.instance_type, cost.zone || cost.region].join(" ");
  const hourly = cost.hourly_at_most ? `${rate(cost.hourly)}, at most ${rate(cost.hourly_at_most)}` : "";
  return [where, hourly, usd(cost.spent)];
}
