"use strict";
// The state of a run: why it has this state, the findings, the checks with their margins, and the main curves.

const LEVELS = { ok: "\u2713", warning: "!", bad: "\u2715" };
const levelMark = (level) =>
  el("span", { class: "mark level " + (own(LEVELS, level) ? level : "warning"), role: "img",
    "aria-label": asText(level) },
    own(LEVELS, level) ?? "!");

/** The view of the verdict. */
function showVerdict(content) {
  if (content.querySelector("#verdict")) return markStep();
  const runs = main.runs.map((run, i) => el("div", { class: "verdict" }, headOf(run, i),
    el("div", { class: "columns" }, findingsOf(run, i), checksOf(run))));
  const charts = el("div", { class: "charts four" });
  content.append(el("div", { id: "verdict" }, el("div", { class: runs.length > 1 ? "columns" : "" }, runs), charts));
  if (main.runs.length > 1) content.append(differences());
  return fillCharts(charts, main.runs.length > 1 ? [...MAIN_CHARTS.slice(0, -1), "step time"] : MAIN_CHARTS);
}

const metric = (run, key) => known(own(run.metrics, key) ?? []);

/** The run's state and its reason, its failure reports, and a few figures. */
function headOf(run, i) {
  const rewards = metric(run, "reward/mean");
  const tile = (label, value, title) => el("div", { class: "tile" }, el("b", { title }, value), el("span", {}, label));
  const walls = metric(run, "time/wall_s");
  const reports = Object.entries(run.reports ?? {}).map(([name, text]) =>
    el("details", { class: "report", open: run.state === "failed" }, el("summary", {}, shown(name)),
      textBlock(asText(text), "log")));
  const first = rewards[0], last = rewards.slice(-10);
  return el("section", { class: "panel" },
    el("h2", {}, runKey(i), shown(run.name), " ", stateMark(run), " ", el("span", { class: "small" },
      shown(asText(run.subject)))),
    run.why && el("p", { class: "why" }, shown(run.why)), reports,
    el("div", { class: "tiles" },
      tile("steps", `${num(run.last_step ?? 0)} of ${run.num_steps ?? "?"}`),
      rewards.length > 0 && tile("reward, first step", num(first, 3), asText(first)),
      rewards.length > 0 && tile(`reward, last ${last.length} steps`, num(mean(last), 3), asText(mean(last))),
      walls.length > 0 && tile("run time", seconds(walls[walls.length - 1])),
      metric(run, "completion/tokens_mean").length > 0 && tile("completion length, tokens",
        num(metric(run, "completion/tokens_mean").at(-1), 3)),
      run.rollouts.total > 0 && tile(run.rollouts.shown < run.rollouts.total ?
        `rollouts, ${num(run.rollouts.shown)} with their text` : "rollouts", num(run.rollouts.total),
        run.rollouts.note || null)));
}

/** The findings, each with links to the curve that shows it and to the step where it began. */
function findingsOf(run, i) {
  const leads = (finding) => [
    finding.metric && linkTo({ run: i, view: "curves", metric: finding.metric, step: finding.step ?? null,
      rollout: null }, shown(clip(finding.metric, 120))),
    finding.step !== null && finding.step !== undefined &&
      linkTo({ run: i, view: "rollouts", step: finding.step, rollout: null, metric: null, row: null },
        `step ${finding.step}`)];
  const item = (finding) => el("li", { class: "finding" }, levelMark(finding.level),
    el("div", {}, el("b", {}, shown(clip(asText(finding.title), 1000))), el("p", {}, shown(asText(finding.text))),
      el("p", { class: "leads" }, leads(finding))));
  return panel("Findings", run.findings.length ? el("ul", { class: "plain" }, run.findings.map(item)) :
    el("p", { class: "note" }, "There is nothing to judge yet: the run has no step."));
}

/** The checks. A bar shows how much of the bound a value takes, if both begin with a number. */
function checksOf(run) {
  const row = (check) => {
    const [value, bound] = [check.value, check.bound].map((text) => parseFloat(String(text).replaceAll(",", "")));
    const part = bound > 0 && value >= 0 ? value / bound : null;
    const bar = part === null ? null : el("div", { class: "margin " + check.level, role: "img",
      "aria-label": `${percent(part)} of its bound`,
      title: `${percent(part)} of its bound` },
        el("i", { style: { width: `${Math.min(100, Math.max(part && 1, 100 * part))}%` } }));
    return el("tr", { title: asText(check.text) || null }, el("td", {}, levelMark(check.level)),
      el("th", { scope: "row" }, shown(clip(asText(check.name), 300)), check.text && el("p", { class: "small" },
        shown(clip(asText(check.text), 2000)))),
      el("td", { class: "num" }, shown(clip(asText(check.value), 300)), bar),
      el("td", { class: "num muted" }, check.bound ?
        [/^[-+.\d]/.test(check.bound) ? "\u2264 " : "", shown(clip(asText(check.bound), 300))] : ""));
  };
  return panel("Checks", run.checks.length ? el("div", { class: "wide" }, el("table", { class: "checks" },
    el("thead", {}, el("tr", {}, ["", "check", "worst so far", "bound"].map((head) =>
      el("th", { scope: "col" }, head)))),
    el("tbody", {}, run.checks.map(row)))) : el("p", { class: "note" }, "No check has run."));
}

/** Keys of the configs that differ, with the value of each run. */
function differences() {
  if (main.runs.length < 2) return null;
  const rows = main.differences.map(([key, ...values]) => [el("code", {}, shown(key)),
    ...values.map((value) => shown(asText(value) || "\u2013"))]);
  return panel(rows.length ? `Configs differ in ${rows.length} keys` : "The configs are the same",
    rows.length ? table(["key", ...main.runs.map((run) => shown(run.name))], rows) : null);
}
