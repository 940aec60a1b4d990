"use strict";
// What a job's facts say, in words. `job` is its id, which every VM's name begins with.

const bare = (text, job) => String(text).replaceAll(`${job}-`, "");
const shapeText = (shape) => shape.replaceAll("x", "×");
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const placeText = (at) => [at.provider, at.zone || at.region, at.instance_type].filter(Boolean).join(" ");

const SAYS = {
  submitted: (f) => ["Submitted", f.job],
  start_copied: (f) => ["Starts", `from step ${f.checkpoint.step} of another job, whose checkpoint was copied${f.skipped ? `; skipped: ${f.skipped}` : ""}`, "key"],
  vm_requested: (f) => ["VM requested", f.vm],
  attempt_made: (f) => ["Asked", `${f.vm}, attempt ${f.attempt.number}: ${placeText(f.attempt.placement)}${f.price.ceiling ? `, at most $${f.price.ceiling}/h` : ""}`],
  attempt_refused: (f) => ["Refused", `${f.vm}, attempt ${f.number}: ${f.kind.replaceAll("_", " ")}: ${f.message}`, "warn"],
  vm_created: (f) => ["Created", `${f.vm} is ${f.id} at its provider`],
  cost_noted: () => ["Cost noted", "what VMs have cost so far is kept"],
  vm_gone: (f) => ["Gone", `nothing of ${f.vm} is left at its provider`],
  vm_not_released: (f) => ["Not released", `${f.vm} is paid for until it is gone, at most $${f.hourly_at_most}/h: ${f.message}`, "warn"],
  vm_joined: (f) => ["VM joined", `${f.vm}, ${plural(f.devices.length, "device")}`],
  vm_noticed: (f) => ["Notice", `${f.vm} will be taken at ${clock(f.deadline)}${f.action ? ` (${f.action})` : ""}`, "warn"],
  vm_notice_withdrawn: (f) => ["Notice withdrawn", `${f.vm} stays`],
  vm_risk_changed: (f) => (f.at_risk ? ["At risk", `${f.vm}: its cloud may take it sooner than others`, "warn"] : ["At risk no more", f.vm]),
  vm_drained: (f) => ["Drained", `${f.vm} is to hand over, and another to take its place`],
  vm_yielded: (f) => (f.stays ? ["VM kept", `${f.vm}: no plan does without it`] : ["VM yielded", `${f.vm} is to hand over: other jobs wait for it, or it waited too long`]),
  vm_ended: (f) => ["VM ended", `${f.vm}: ${f.detail || f.reason.replaceAll("_", " ")}`, f.reason === "released" ? "" : "warn"],
  manager_away: (f) => ["Manager was away", `for at most ${duration(f.unwatched_s)}, in which VMs may have been there unseen`],
  vm_seen: (f) => ["VM seen", `${f.vm} ${f.lives ? "is there" : "has ended"}`],
  isolation_changed: (f) => (f.isolated ? ["Isolated", `most of ${plural(f.num_vms, "VM")} fell silent at about the same time: the manager seems to be cut off, and changes nothing`, "warn"] : ["Heard again", "the manager is no longer isolated"]),
  worker_failed: (f) => ["Worker failed", `${f.worker}: ${f.message}`, "bad"],
  obsolete: (f) => [f.name.replaceAll("_", " "), JSON.stringify(f.written)],
  recalibrated: (f) => ["Calibration changed", `steps took ${Math.min(...f.scales).toFixed(2)} to ${Math.max(...f.scales).toFixed(2)} times what was measured`, "warn"],
  worker_paced: (f) => (f.slowdown === 1 ? ["Pace", `${f.worker} counts as fast as its peers again`] : ["Slow worker", `${f.worker} takes ${f.slowdown} times as long as its peers`, "warn"]),
  recipe_fixed: (f) => {
    const recipe = f.recipe;
    return ["Recipe fixed", `${recipe.cuts.length + 1} sections, ${recipe.num_micro_batches} micro-batches of ${plural(recipe.microbatch_size, "sample")}`];
  },
  bits_fixed: (f) => ["Bits fixed", `${plural(f.workers.length, "worker")} of the same kernels train${f.note ? `; ${f.note}` : ""}`],
  generation_planned: (f) => {
    if (f.kind === "profile") return ["Profiling", f.members.length > 1 ? `${plural(f.members.length, "worker")} measure the model and their links` : `${f.members[0][0]} traces and times the model`];
    const guess = f.predicted_s === null ? "" : `, ${duration(f.predicted_s)} a step predicted`;
    return [`Generation ${f.number} planned`, `${f.cause}: ${plural(f.plan.ranges.length, "worker")}${guess}`, "key"];
  },
  plan_kept: (f) => [`Generation ${f.generation} goes on`, `${f.cause}: no other plan is worth more${f.until === null ? "" : ` until ${clock(f.until)}`}`],
  growth_weighed: (f) => ["More VMs", f.num_more ? `${f.num_more} more are worth what they cost` : "no more are worth what taking them in costs"],
  generation_prepared: (f) => [`Generation ${f.number} prepared`, "older ones can publish nothing any more"],
  generation_opened: (f) => f.kind === "profile" ? ["Profiling", `${f.endpoint} is where its workers meet`] : [`Generation ${f.number} opened`, f.checkpoints.length ? `its base is step ${f.checkpoints[0].step}` : "no checkpoint yet"],
  step_interrupted: (f) => [`Step of generation ${f.superseded} interrupted`, `to finish it in generation ${f.number}: ${f.reason}`],
  generation_formed: (f) => {
    const from = { start: "initial weights", peers: "state from peers", store: "state from the store" }[f.formed.rung];
    const again = f.lost_steps ? `, ${plural(f.lost_steps, "step")} done again` : "";
    const found = f.formed.in_flight;
    const kept = found ? `, ${Math.round((100 * found.kept) / (found.kept + found.missing))} % of the step's work kept${found.dropped ? ", some dropped for want of memory" : ""}` : "";
    return [`Generation ${f.number} formed`, `at step ${f.formed.step}, ${from}${again}${kept}`, "key"];
  },
  generation_stalled: (f) => {
    const bound = `no progress for ${duration(f.silent_s)} at step ${f.step}`;
    const where = Object.entries(f.standing).slice(0, 8).map(([worker, at]) => `${worker} is ${at}`);
    const suspects = f.suspects.length ? [`suspected: ${f.suspects.join(", ")}`] : [];
    return [`Generation ${f.generation} stands still`, [bound, ...where, ...suspects].join("; "), "bad"];
  },
  stacks_taken: (f) => ["Stacks", f.text ? `${f.worker}:\n${f.text}` : `${f.worker} has shown them; not kept`],
  step_miscounted: (f) => ["Step redone", `an attempt at step ${f.miscount.step + 1} did not add each micro-batch's gradients exactly once`, "bad"],
  state_corrupted: (f) => ["State corrupted", `hosts of section${f.corruption.sections.length > 1 ? "s" : ""} ${f.corruption.sections.join(", ")} held different state at step ${f.corruption.step}${f.corruption.suspects.length ? `; suspected: ${f.corruption.suspects.join(", ")}` : ""}`, "bad"],
  generation_closed: (f) => [f.kind === "profile" ? "Profiling again" : `Generation ${f.number} closed`, f.reason, "warn"],
  copies_changed: (f) =>
    f.copies < f.wanted
      ? ["Few copies", `some section lives on ${f.copies} of ${f.num_vms} VMs, ${f.wanted} are asked for${f.enough_vms ? `; ${f.enough_vms} VMs like these would do` : ""}`, "bad"]
      : ["Copies", `each section lives on ${f.copies} VMs`, "good"],
  plan_impossible: (f) => ["No plan", f.reason, "bad"],
  checkpoint_published: (f) => ["Checkpoint published", `step ${f.checkpoint.step}`],
  checkpoint_damaged: (f) => ["Checkpoint damaged", `that of step ${f.checkpoint.step} cannot be read; training goes on from step ${f.instead.step}: ${f.why}`, "bad"],
  checkpoint_retired: (f) => ["Checkpoint retired", `step ${f.checkpoint.step}`],
  hold_changed: (f) => [f.hold ? "Holding" : "Going on", f.reason, "warn"],
  stop_ordered: (f) => [f.failure ? "Fails" : "Stop ordered", `${f.failure ? `${f.failure.reason}; ` : ""}a checkpoint is published first`, f.failure ? "bad" : ""],
  person_needed: (f) => ["Waits for a person", f.console ? `${f.reason}. The last of them wrote:\n${f.console}` : f.reason, "bad"],
  job_resumed: (f) => ["Goes on", { again: "tried again", from_head: "from what the head lists", restart: "from step 0" }[f.how], "key"],
  job_continued: (f) => ["Goes on", `after its end, with up to ${plural(f.max_nodes, "VM")}${f.budget === null ? "" : ` and a budget of $${f.budget}`}`, "key"],
  training_finished: (f) => ["Trained", `step ${f.checkpoint.step} is published`, "key"],
  job_ended: (f) => [`Job ${f.status}`, f.reason, f.status === "failed" ? "bad" : "key"],
};

// What earlier versions decided, as their journals have it.
const OBSOLETE = {
  surveyed: (f) => ["Surveyed", `${f.worker}: ${plural(f.survey.layouts[0].cuts.length + 1, "section")}, ${plural(f.survey.layouts.length, "size")} of micro-batches`],
  share_dealt: (f) => ["Share dealt", `${f.worker} measures ${plural(f.share.sections.length, "section")} at ${plural(f.share.microbatch_size, "sample")}`],
  sections_measured: (f) => ["Measured", `${plural(f.rows.length, "section")} by ${f.worker}`],
  probe_dealt: (f) => ["Links", `${plural(f.members.length, "worker")} measure theirs`],
  probe_opened: (f) => ["Links", `${f.endpoint} is where they meet`],
  probe_ended: (f) => ["Links measured", f.failure || `${plural(f.wires.length, "pair")}, ${plural(f.allreduces.length, "sum")}`, f.failure ? "warn" : ""],
};

// [title, text, class] of a fact; one that is not known here is shown as it is.
function say(fact, job) {
  const known = SAYS[fact.fact] || OBSOLETE[fact.fact];
  if (!known) return [fact.fact.replaceAll("_", " "), JSON.stringify(fact), ""];
  const [title, text, style] = known(fact);
  return [title, bare(text, job), style || ""];
}
