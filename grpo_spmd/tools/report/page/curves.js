"use strict";
// Curves over steps, drawn by uPlot. All charts share the cursor and the zoom; a click opens the step. With one run,
// the metrics of a phase have the phase's colour. With several runs each chart has one metric, and each run a colour.

const PHASES = ["weight_sync", "eval", "rollout", "reward", "logprobs", "update", "checkpoint"];
const phaseColour = (phase) => "c" + (PHASES.includes(phase) ? PHASES.indexOf(phase) : 7);
// {title, keys: names or a pattern, log, stacked, evaluation}. A metric is in the first chart whose keys match it.
const CHARTS = [
  { title: "reward", keys: ["reward/mean"] },
  { title: "rewards by name", keys: /^reward\/.+\/mean$/ },
  { title: "teacher", keys: ["teacher/kl"] },
  { title: "critic", keys: ["critic/explained_variance"] },
  { title: "standard deviation of rewards", keys: /^reward\/(.+\/)?std$/ },
  { title: "evaluation", keys: /^eval\/.+\/(mean|pass_at_\d+|maj_at_\d+)$/, evaluation: true },
  { title: "groups of equal rewards, unscored completions",
    keys: ["reward/zero_std_groups_frac", "reward/unscored_frac"] },
  { title: "reward errors", keys: /^reward\/.+\/(error|timeout|not_applicable|retried)_frac$/ },
  { title: "completion length", keys: /^completion\/tokens_/ },
  { title: "truncated completions", keys: ["completion/truncated_frac"] },
  { title: "entropy", keys: ["loss/entropy"] },
  { title: "KL", keys: ["loss/kl", "reward/kl_penalty_mean"] },
  { title: "clipped tokens", keys: ["loss/clip_frac"] },
  { title: "loss", keys: ["loss/total", "loss/policy"] },
  { title: "gradient norm", keys: ["optim/grad_norm"], log: true },
  { title: "learning rate", keys: ["optim/lr"] },
  { title: "logprob mismatch of engine and policy", keys: /^weight_sync\/mismatch_/, log: true },
  { title: "rollout correction: weights for what engine and policy differ in", keys: /^rollout_correction\// },
  { title: "time by phase", keys: /^time\/(?!step_s|wall_s|unix_s).+_s$/, stacked: true },
  { title: "step time", keys: ["time/step_s"] },
  { title: "throughput", keys: ["rollout/tokens_per_s", "throughput/tokens_per_s_per_rank"] },
  { title: "samples per second", keys: ["throughput/samples_per_s"] },
  { title: "waiting for the slowest rank", keys: ["rollout/tail_waste_frac", "batching/rank_cost_spread_frac"] },
  { title: "memory by phase, peak GiB", keys: /^memory\/.+\/peak_gib$/ },
  { title: "memory by phase, allocated GiB", keys: /^memory\/.+\/allocated_gib$/ },
  { title: "memory by phase, reserved GiB", keys: /^memory\/.+\/reserved_gib$/ },
  { title: "memory by phase, used by the driver, GiB", keys: /^memory\/.+\/driver_used_gib$/ },
  { title: "memory by phase, other processes, GiB", keys: /^memory\/.+\/other_gib$/ },
  { title: "memory after the engine's sleep, GiB", keys: /^memory\/sleep\// },
  { title: "host memory of reward and environment workers, and of what is offloaded, GiB", keys: /^memory\/host\// },
  { title: "how episodes ended", keys: /^episode\/.+_frac$/ },
  { title: "turns and contexts (segments) per episode", keys: /^episode\/(turns|segments)_mean$/ },
  { title: "tokens per episode that were given, not sampled", keys: ["episode/given_tokens_mean"] },
  { title: "dynamic sampling", keys: /^dynamic_sampling\// },
  { title: "environment calls, s", keys: /^environment\/calls?_s/ },
  { title: "updates", keys: ["optim/updates", "optim/skipped_updates"] },
];
const phaseOf = (key) => PHASES.find((phase) => key === `time/${phase}_s` || key.startsWith(`memory/${phase}/`));
const phaseOrder = (key) => (PHASES.indexOf(phaseOf(key)) + 8) % 8;
const MAIN_CHARTS = ["reward", "rewards by name", "teacher", "critic", "completion length",
  "logprob mismatch of engine and policy", "time by phase"];
const HIDDEN = /^(time\/(unix_s|wall_s)|step$)/;

let charts = []; // those of the view: {host, keys, plot, whole: the lines before smoothing}

/** Metrics that are 0 at every step. They get no chart, except mean rewards and the metric that the address names. */
function zeroMetrics() {
  const isZero = (key) => main.runs.every((run) => (own(run.metrics, key) ?? []).every((value) => !value));
  return [...new Set(main.runs.flatMap((run) => Object.keys(run.metrics)))].filter((key) =>
    key !== state.metric && !HIDDEN.test(key) && !/^reward\/(.+\/)?mean$/.test(key) && isZero(key));
}

/** Returns the charts for the metrics that the runs have; with `titles`, only the charts of these titles. Metrics that
 * match none of CHARTS come last, in charts by the first word of their names, eight to a chart. */
function chartsOf(titles) {
  const trained = new Set(main.runs.flatMap((run) => Object.keys(run.metrics)));
  zeroMetrics().forEach((key) => trained.delete(key));
  const evaluated = new Set(main.runs.flatMap((run) => Object.keys(run.evaluations?.metrics ?? {})));
  const result = [];
  for (const chart of CHARTS) {
    const metrics = chart.evaluation ? evaluated : trained;
    const keys = [...metrics].filter((key) => (Array.isArray(chart.keys) ? chart.keys.includes(key) :
      chart.keys.test(key)));
    keys.forEach((key) => metrics.delete(key));
    if (chart.stacked) keys.sort((a, b) => phaseOrder(a) - phaseOrder(b));
    const isMain = () => titles.includes(chart.title) && (chart.title !== "rewards by name" || keys.length > 1);
    if (keys.length && (!titles || isMain())) result.push({ ...chart, keys });
  }
  for (const [metrics, evaluation] of titles ? [] : [[trained, false], [evaluated, true]]) {
    const others = Map.groupBy([...metrics].filter((key) => !HIDDEN.test(key)), (key) => key.split("/")[0]);
    for (const [word, keys] of others)
      for (let from = 0; from < keys.length; from += 8)
        result.push({ title: keys.length === 1 ? keys[0] :
          `${word}/...`, keys: keys.slice(from, from + 8), evaluation });
  }
  if (main.runs.length === 1) return result;
  return result.flatMap((chart) => chart.keys.slice(0, titles ? 1 : undefined).map((key) =>
    ({ ...chart, stacked: false, keys: [key] })));
}

/** The view of all curves. */
async function showCurves(content, before, isCurrent) {
  if (!content.querySelector("#curves")) {
    const host = el("div", { class: "charts", id: "curves" });
    const find = el("input", { type: "search", placeholder: "metric",
      "aria-label": "show charts of metrics that contain", input: () => {
      for (const { host: card, keys } of charts) card.hidden = !keys.some((key) => key.includes(find.value));
    } });
    const smooth = el("input", { type: "checkbox", change: () => smoothCharts(smooth.checked) });
    const all = el("button", { id: "all-steps", hidden: !zoomed, title: "Esc", click: () => zoomTo(null) },
      "all steps");
    content.append(el("p", { class: "bar" }, find, el("label", {}, smooth, " smooth"), all,
      el("span", { class: "note" }, "click: open the step; drag: zoom. ", runOf().thinned ?
        `Of ${runOf().thinned} steps some are drawn, spread evenly.` : "")), host);
    if (main.runs.length > 1) content.append(differences());
    const zeros = zeroMetrics();
    if (zeros.length) content.append(el("details", { class: "panel", id: "zeros" },
      el("summary", {}, `metrics that are 0 at every step: ${zeros.length}`), el("p", { class: "note" },
      zeros.sort().map((key) => [el("code", {}, shown(key)), " "]))));
    await fillCharts(host, null, isCurrent);
  }
  if (!isCurrent()) return;
  markStep();
  const wanted = state.metric && charts.find(({ keys }) => keys.includes(state.metric));
  if (wanted && (before.metric !== state.metric || before.view !== "curves")) {
    wanted.host.scrollIntoView({ block: "center" });
    wanted.host.classList.add("wanted");
  }
}

/** Draws the charts one by one; between those of a full page the browser can handle events. */
async function fillCharts(host, titles, isCurrent = () => true) {
  charts = [];
  whenClosed(() => { charts.forEach(({ plot }) => plot.destroy()); charts = []; watch.disconnect(); });
  const watch = new ResizeObserver(() => charts.forEach(({ plot, host: card }) => fit(plot, card)));
  for (const chart of chartsOf(titles)) {
    const card = el("section", { class: "panel chart" }, el("h2", {}, shown(clip(chart.title, 80)),
      main.runs.length > 1 && el("code", { class: "small" }, " ", shown(clip(chart.keys[0], 80)))));
    host.append(card);
    charts.push({ host: card, keys: chart.keys, ...draw(card, chart) });
    if (!titles) await new Promise((done) => setTimeout(done));
    if (!isCurrent()) return;
  }
  watch.observe(host);
  await new Promise((done) => setTimeout(done)); // until the plots know their scales
  if (!charts.length) host.append(el("p", { class: "note" }, "No step has been recorded."));
  markStep();
}

const HEIGHT = 150;
const DASHES = [undefined, [5, 3], [2, 2], [8, 2, 2, 2]];
/** Gives a plot the width of its card. */
function fit(plot, card) {
  const width = card.clientWidth - 16;
  if (width > 0 && width !== plot.width) plot.setSize({ width, height: HEIGHT });
}

/** Returns the lines of a chart, one for each metric of each run, and their data: [steps, values of each line]. A value
 * is undefined if only another run has the step. */
function linesOf(chart) {
  const of = (run) => (chart.evaluation ? run.evaluations ?? { steps: [], metrics: {} } : run);
  const lines = [], tables = [];
  for (const run of main.runs) {
    const keys = chart.keys.filter((key) => own(of(run).metrics, key));
    if (!keys.length) continue;
    const i = main.runs.indexOf(run);
    keys.forEach((key) => lines.push({ key, run: i, colour: main.runs.length > 1 ? lineColour(i) : phaseOf(key) ?
      phaseColour(phaseOf(key)) : chart.stacked ? "c7" : lineColour(chart.keys.indexOf(key)) }));
    tables.push([of(run).steps, ...keys.map((key) => of(run).metrics[key])]);
  }
  return { lines, data: tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[]] };
}

/** Draws one chart into its card. Returns the plot and its lines before smoothing. */
function draw(card, chart) {
  const { lines, data } = linesOf(chart);
  const isLog = chart.log && data.slice(1).some((values) => values.some((value) => value > 0));
  const raw = data.slice(1);
  let drawn = isLog ? raw.map((values) => values.map((value) => (value === undefined ? value : value > 0 ? value :
    null))) : raw;
  if (chart.stacked) drawn = stack(raw);
  const names = shortNames(chart.keys);
  const mark = (plot, i) => `var(--${lines[i - 1].colour})`;
  const serie = (line, i) => ({
    label: clip(main.runs.length > 1 ? main.runs[line.run].name : names[chart.keys.indexOf(line.key)], 48)
      .replace(ODD, "\ufffd"),
    stroke: () => colour(line.colour), fill: chart.stacked ? () => colour(line.colour) : undefined,
    width: chart.stacked ? 0 : 1.25, dash: DASHES[line.run % DASHES.length], points: { size: 4,
      show: data[0].length < (chart.stacked ? 2 : 40) || chart.evaluation, fill: () => colour(line.colour) },
    value: (plot, value, series, at) => (at === null || at === undefined ? "" : num(raw[i][at])),
  });
  const axis = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 },
    ticks: { show: false }, font: "11px system-ui" };
  const plot = new uPlot({
    width: Math.max(200, card.clientWidth - 16), height: HEIGHT,
    scales: { x: { time: false, range: () => zoomed ?? wholeRange() }, y: isLog ? { distr: 3 } :
      { range: rangeOf(chart) } },
    axes: [{ ...axis, size: 22, space: 60 }, { ...axis, size: 54, values: (p, splits) =>
      splits.map((value) => (value === null ? "" : num(value, 3))), ...(isLog ? decades(data) : {}) }],
    series: [{ label: "step" }, ...lines.map(serie)],
    bands: chart.stacked ? lines.slice(1).map((line, i) => ({ series: [i + 1, i + 2] })) : undefined,
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false,
      bind: { dblclick: () => null } }, // a double click does nothing more: its first click has opened the step
    legend: { markers: { width: 3, stroke: mark, dash: (p, i) => (lines[i - 1].run ? "dotted" : "solid") } },
    hooks: { draw: [drawStep], setSelect: [zoomToSelection] },
  }, [data[0], ...drawn], card);
  let pressedAt = 0;
  plot.over.addEventListener("mousedown", (event) => (pressedAt = event.clientX));
  plot.over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - pressedAt) > 4) return; // a zoom, not a click
    const left = event.clientX - plot.over.getBoundingClientRect().left;
    const step = plot.data[0][plot.posToIdx(left)];
    if (step > 0) go({ view: "rollouts", step, rollout: null, metric: null });
  });
  return { plot, whole: drawn };
}

/** For a logarithmic scale over a decade or more: grid lines and labels only at powers of ten. */
const decades = (data) => {
  const all = data.slice(1).flat().filter((value) => value > 0);
  const number = Math.log10(largest(all) / smallest(all));
  if (number < 1) return {};
  const every = Math.ceil(number / 5);
  const isShown = (power) => Number.isInteger(power) && power % every === 0;
  const powerOf = (value) => Math.round(1e6 * Math.log10(value)) / 1e6;
  const filter = (plot, splits) => splits.map((value) => (isShown(powerOf(value)) ? value : null));
  return { filter, grid: { stroke: () => colour("line"), width: 1, filter } };
};

/** Returns names without the parts that all of them share at their beginning and end. */
function shortNames(keys) {
  if (keys.length < 2) return keys;
  const parts = keys.map((key) => key.split("/"));
  let head = 0, tail = 0;
  const shortest = Math.min(...parts.map((part) => part.length)) - 1;
  while (head < shortest && parts.every((part) => part[head] === parts[0][head])) head++;
  while (tail < shortest - head && parts.every((part) => part.at(-1 - tail) === parts[0].at(-1 - tail))) tail++;
  return parts.map((part) => part.slice(head, part.length - tail).join("/"));
}

/** Returns for each line the sum of it and all lines after it, so that the first is on top. uPlot fills the bands
 * between neighbours. */
function stack(values) {
  const sums = [];
  for (let i = values.length - 1; i >= 0; i--)
    sums[i] = values[i].map((value, at) => (value ?? 0) + (sums[i + 1] ? sums[i + 1][at] : 0));
  return sums;
}

/** The range of the y axis: from 0 if no value is negative and 0 is near; never empty. */
const rangeOf = (chart) => (plot, low, high) => {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  const room = (high - low) * 0.06;
  const fromZero = chart.stacked || chart.keys.some((key) => key.endsWith("_frac")) ||
    (low >= 0 && low < (high - low) / 2);
  return [fromZero && low >= 0 ? 0 : low - room, high + room];
};

/** Draws a vertical line at the step of the address. */
function drawStep(plot) {
  const { min, max } = plot.scales.x;
  if (state.step === null || min === null || state.step < min || state.step > max) return;
  const x = Math.round(plot.valToPos(state.step, "x", true));
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour("accent");
  ctx.globalAlpha = 0.5;
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

/** Puts the cursor of all charts at the step of the address, so that their legends show its values. */
function markStep() {
  for (const { plot } of charts) {
    plot.redraw(false);
    const at = plot.data[0].indexOf(state.step);
    if (at >= 0) plot.setCursor({ left: plot.valToPos(state.step, "x"), top: 20 }, false);
    if (at >= 0) plot.setLegend({ idx: at });
  }
}

// ---- zoom: one range of steps for all charts

let zoomed = null; // [first, last], or null for all steps
/** Returns the range of the steps of all runs, for the x axis. */
function wholeRange() {
  const all = main.runs.flatMap((run) => [run.steps, run.evaluations?.steps ?? []]).flatMap((steps) =>
    (steps.length ? [steps[0], steps.at(-1)] : []));
  const [low, high] = [smallest(all) ?? 0, largest(all) ?? 1];
  return low < high ? [low, high] : [low - 0.5, high + 0.5];
}

/** Shows a range of steps in all charts; null shows all steps. */
function zoomTo(range) {
  zoomed = range;
  const [min, max] = zoomed ?? wholeRange();
  for (const { plot } of charts) plot.setScale("x", { min, max });
  if (byId("all-steps")) byId("all-steps").hidden = !zoomed;
}

/** Zooms all charts to what was selected by dragging in one. */
function zoomToSelection(plot) {
  const { left, width } = plot.select;
  if (width > 4) zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

/** Shows each line as an exponential moving average. Its weight falls with the number of steps, so that curves of short
 * and of long runs look equally smooth. */
function smoothCharts(isSmooth) {
  for (const { plot, whole } of charts) {
    if (plot.bands?.length) continue;
    const weight = Math.min(1, 20 / plot.data[0].length);
    const smoothed = (values) => {
      let last = null;
      return values.map((value) => (value === null || value === undefined ? value : (last = last === null ? value :
        last + weight * (value - last))));
    };
    plot.setData([plot.data[0], ...(isSmooth ? whole.map(smoothed) : whole)]);
  }
  markStep();
}

/** Draws all charts again in the colours of the present theme. */
function redrawCharts() {
  charts.forEach(({ plot }) => plot.redraw(false, true));
    // reads the colours of the theme again; those of the legends come from the style sheet
}
