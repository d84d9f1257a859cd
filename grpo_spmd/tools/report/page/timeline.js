"use strict";
// The timeline of one step: a row for each rank, with a block for each phase. Empty and hatched parts are time in which
// the rank waited.

/** The view of the timeline. It shows the step with a timeline that is nearest to the address's step. */
function showTimeline(content) {
  const timeline = runOf().timeline ?? { steps: [], spans: [] };
  if (!timeline.steps.length) return void content.replaceChildren(el("p", { class: "note" },
    "This run has recorded no timeline."));
  const at = nearest(timeline.steps, state.step);
  const one = timeline.spans[at];
  const ends = one.spans.flat().map((span) => span[2]);
  const length = largest(ends) || 1e-9;
  const readout = el("p", { class: "said", "aria-live": "polite" },
    "Point at a block, or move to it with Tab: its figures are shown here.");
  content.replaceChildren(
    panel(`Step ${timeline.steps[at]}: ${seconds(length)} on ${num(one.world_size)} rank` +
      (one.world_size > 1 ? "s" : ""),
      timeline.steps[at] !== state.step && el("p", { class: "note" },
        `The page has the timelines of ${timeline.steps.length} steps, but not that of step ${state.step}; this is ` +
        "the nearest."),
      chooser(timeline, at), legendOfPhases(one), rows(one, length, readout), readout),
    phaseTable(one, length));
}

const lengthOf = (one) => largest(one.spans.flat().map((span) => span[2])) ?? 0;
const busyOf = ([phase, start, end, , busy]) => Math.min(end - start, busy ?? end - start);

/** A bar for each step with a timeline; its height is the step's time. A click shows the step. */
function chooser(timeline, at) {
  const most = largest(timeline.spans.map(lengthOf)) || 1;
  const bar = (step, i) => el("button", { class: "bin", tabindex: -1, "aria-pressed": String(i === at),
    title: `step ${step}: ${seconds(lengthOf(timeline.spans[i]))}`,
    click: () => go({ step }) }, el("i", { style: { height: `${(100 * lengthOf(timeline.spans[i])) / most}%` } }));
  return el("div", { class: "bins low", role: "group", "aria-label": "steps, as high as they were long" },
    timeline.steps.map(bar));
}

/** Explains the colours of the phases. */
function legendOfPhases(one) {
  const phases = [...new Set(one.spans.flat().map((span) => span[0]))];
  return el("p", { class: "legend" },
    phases.map((phase) => el("span", {},
    el("i", { class: "box", style: { "--own": `var(--${phaseColour(phase)})` } }), shown(phase))),
    el("span", {}, el("i", { class: "box hatched",
      style: { "--own": `var(--${phaseColour("rollout")})` } }), "rollout, engine idle"),
    el("span", {}, el("i", { class: "box" }), "empty: between phases"));
}

/** The rows of all ranks; figures of the chosen block are shown in `readout`. */
function rows(one, length, readout) {
  const left = (at) => `${(100 * at) / length}%`;
  const peaks = one.spans.map((spans) => largest(known(spans.map((span) => span[3]))));
  const most = largest(known(peaks));
  const block = (rank, [phase, start, end, peak, busy]) => {
    const waited = end - start - busyOf([phase, start, end, peak, busy]);
    const words = `rank ${rank}, ${phase}: ${num(start)} s to ${num(end)} s, ${num(end - start)} s` +
      (busy === null || busy === undefined ? "" :
        `; its engine generated for ${num(busy)} s and waited ${num(waited)} s`) +
      (peak === null || peak === undefined ? "" : `; peak ${num(peak)} GiB`);
    const say = () => readout.replaceChildren(shown(words));
    return el("div", { class: "block", tabindex: 0, role: "img", "aria-label": words, mouseenter: say, focus: say,
      click: say,
      style: { left: left(start), width: left(end - start), "--own": `var(--${phaseColour(phase)})` } },
      waited > 0 && el("i", { class: "hatched", style: { width: `${(100 * waited) / (end - start)}%` } }));
  };
  const row = (spans, i) => {
    const waits = length - spans.reduce((sum, span) => sum + busyOf(span), 0);
    return el("div", { class: "rank" }, el("span", { class: "num" },
      `rank ${one.ranks[i]}`), el("div", { class: "track" }, spans.map((span) => block(one.ranks[i], span))),
      el("span", { class: "num", title: "seconds between phases, or with an idle engine" },
        `${num(waits, 2)} s`),
      el("span", { class: "num memory", title: "largest memory in use in the step",
        style: { "--part": `${most ? (100 * (peaks[i] ?? 0)) / most : 0}%` } },
        peaks[i] === null ? "\u2013" : `${num(peaks[i], 3)} GiB`));
  };
  const marks = [0, 0.25, 0.5, 0.75, 1].map((part) =>
    el("span", { style: { left: `${100 * part}%` } }, `${num(part * length, 2)} s`));
  return el("div", { class: "ranks" },
    el("div", { class: "rank head" }, el("span", {}, ""), el("div", { class: "marks" }, marks),
      el("span", {}, "idle"), el("span", {}, "memory")),
    one.spans.map(row));
}

/** A table of the phases: their times and memory over the ranks. */
function phaseTable(one, length) {
  const phases = [...new Set(one.spans.flat().map((span) => span[0]))];
  const line = (phase) => {
    const sums = one.spans.map((spans) => spans.filter((span) => span[0] === phase).reduce((sum, span) => sum +
      span[2] - span[1], 0));
    const waits = one.spans.map((spans) => spans.filter((span) => span[0] === phase).reduce((sum, span) => sum +
      span[2] - span[1] - busyOf(span), 0));
    const peaks = one.spans.map((spans) =>
      largest(known(spans.filter((span) => span[0] === phase).map((span) => span[3]))));
    const [slowest, fullest] = [largest(sums), largest(known(peaks))];
    const who = (values, most) => (smallest(known(values)) === most ? "equal" :
      `rank ${one.ranks[values.indexOf(most)]}`);
    return [el("th", { scope: "row" },
      el("i", { class: "box", style: { "--own": `var(--${phaseColour(phase)})` } }), " ", shown(phase)),
      figure(mean(sums), 3),
      figure(slowest, 3), who(sums, slowest), percent(mean(sums) / length), figure(largest(waits), 3),
      figure(fullest, 3), fullest === null ? "" : who(peaks, fullest)];
  };
  return panel("Where the time went", table(["phase", "mean, s", "slowest, s", "", "of the step",
    "longest wait inside, s", "peak, GiB", ""], phases.map(line), { class: "figures" }));
}
