"use strict";
// A search for a text in the completions of all steps; their chunks are unpacked one by one, the newest step first.

const MOST_FOUND = 200;

/** The view of a search. */
async function showSearch(content, before, isCurrent) {
  byId("search").value = state.q;
  const run = runOf();
  const wanted = state.q.toLowerCase();
  const status = el("p", { class: "note", "aria-live": "polite" });
  const matches = el("ul", { class: "plain" });
  content.replaceChildren(panel(el("span", {}, "Completions with ", el("code", {}, shown(state.q))), status, matches));
  if (!wanted) return void status.append("Type the text to search for.");
  let numFound = 0, numRead = 0;
  const steps = run.rollouts.steps.toReversed();
  for (const step of steps) {
    const data = await unpack(`${state.run}/${step}`);
    if (!isCurrent()) return;
    numRead += 1;
    for (const rollout of data.rollouts) {
      const at = numFound < MOST_FOUND ? asText(rollout.completion).toLowerCase().indexOf(wanted) : -1;
      if (at >= 0) matches.append(hit(step, rollout, at, wanted.length));
      numFound += at >= 0;
    }
    if (numRead % 10 === 0 || numRead === steps.length || numFound >= MOST_FOUND)
      status.textContent = (numFound >= MOST_FOUND ? "the newest " : "") +
        `${numFound} of them, in ${numRead} of ${steps.length} steps`;
    if (numFound >= MOST_FOUND) break;
  }
}

/** A match with some text around it and a link to its rollout. */
function hit(step, rollout, at, length) {
  const text = asText(rollout.completion);
  return el("li", { class: "finding" }, el("div", {},
    el("p", { class: "leads" },
      linkTo({ view: "rollouts", step,
      rollout: `${rollout.position}/${rollout.sample}`, q: null, row: null },
      `step ${step}, group ${rollout.position}, sample ${rollout.sample}`),
      el("span", { class: "muted" }, "reward ", figure(rollout.reward, 3))),
    el("div", { class: "text" }, at > 60 ? "\u2026" : "", shown(text.slice(Math.max(0, at - 60), at)),
      el("mark", {}, shown(text.slice(at, at + length))), shown(clip(text.slice(at + length), 120)))));
}
