"use strict";
// The frame: it shows what the address names; the header and the keys change the address. Loaded last.

const VIEWS = {
  verdict: showVerdict, curves: showCurves, timeline: showTimeline, rollouts: showRollouts, prompts: showPrompts,
  config: showConfig, search: showSearch,
};
const FIELDS = ["run", "view", "step", "rollout", "row", "metric", "q"];
let main = null; // the chunk "main"
let state = {}; // the fields of the address, checked
let rendered = 0; // counts calls of render(): a view that waited for a chunk gives up if another call has begun

const runOf = (at = state) => main.runs[at.run];

/** Returns the address with `changes`. Other fields stay as they are, except those that belong to one view only. */
function addressOf(changes) {
  const kept = { run: state.run, view: state.view, step: state.step };
  if (!("view" in changes) || changes.view === state.view) Object.assign(kept, { row: state.row, q: state.q });
  if (!("step" in changes) && !("run" in changes)) kept.rollout = state.view === "rollouts" ? state.rollout : null;
  const wanted = { ...kept, ...changes };
  const names = FIELDS.filter((name) => wanted[name] !== null && wanted[name] !== undefined && wanted[name] !== "");
  return "#" + names.map((name) => name + "=" +
    encodeURIComponent(String(wanted[name]).toWellFormed()).replaceAll("%2F", "/")).join("&");
}

/** Changes the address, which shows the new place. With `replace` the browser's history gets no new entry. */
function go(changes, { replace = false } = {}) {
  const address = addressOf(changes);
  if (address === location.hash) return;
  if (replace) location.replace(address);
  else location.hash = address;
}

const linkTo = (changes, ...children) => el("a", { href: addressOf(changes) }, ...children);

/** Reads the fields of the address. Anybody may have typed it: missing and wrong fields get their defaults. */
function stateOfAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const whole = (name) => (/^\d{1,12}$/.test(fields.get(name) ?? "") ? Number(fields.get(name)) : null);
  const run = Math.min(whole("run") ?? 0, main.runs.length - 1);
  const view = Object.hasOwn(VIEWS, fields.get("view")) ? fields.get("view") : "verdict";
  const steps = main.runs[run].steps;
  let step = whole("step");
  if (step === null) step = steps.length ? steps[steps.length - 1] : null;
  const rollout = /^\d{1,12}\/\d{1,6}$/.test(fields.get("rollout") ?? "") ? fields.get("rollout") : null;
  return { run, view, step, rollout, row: whole("row"), metric: fields.get("metric"), q: fields.get("q") ?? "" };
}

/** Shows what the address names. Called whenever the address changes. */
async function render() {
  const before = state;
  state = stateOfAddress();
  const turn = ++rendered;
  const isCurrent = () => turn === rendered;
  const content = byId("content");
  showHeader();
  if (before.view !== state.view || before.run !== state.run) {
    closeView();
    content.replaceChildren();
    scrollTo(0, 0);
  }
  try {
    await VIEWS[state.view](content, before, isCurrent);
  } catch (error) {
    if (!isCurrent()) return;
    content.replaceChildren(el("p", { class: "note bad" }, "This part of the file cannot be shown: ",
      shown(String(error))));
    console.error(error);
  }
  if (isCurrent()) document.documentElement.dataset.ready = location.hash || "#"; // what a test waits for
}

let closing = []; // functions that remove what a view has set up: observers, charts
const whenClosed = (close) => closing.push(close);
/** Removes what the view has set up. */
function closeView() {
  for (const close of closing.splice(0)) close();
}

// ---- header

const STATES = {
  done: ["done", "ok"], running: ["running", "ok"], preempted: ["preempted", "warning"], failed: ["failed", "bad"],
  killed: ["killed", "bad"], silent: ["silent", "warning"], empty: ["empty", "warning"],
};
const stateMark = (run) => {
  const [word, level] = own(STATES, run.state) ?? [String(run.state), "warning"];
  // A run that has ended well is not green if it has findings; the mark says how many.
  const worst = ["bad", "warning"].find((kind) => [level, ...run.findings.map((finding) => finding.level)]
    .includes(kind)) ?? level;
  const number = run.findings.filter((finding) => finding.level !== "ok").length;
  return el("span", { class: "mark " + worst }, shown(word),
    number > 0 && `, ${number} ${number > 1 ? "findings" : "finding"}`);
};

/** Shows the runs with their states, the names of the views, and the step. */
function showHeader() {
  const choose = (run, i) =>
    el("a", { class: "run", href: addressOf({ run: i, step: null, rollout: null, row: null }),
              "aria-current": i === state.run && main.runs.length > 1 ? "true" : null },
      runKey(i), shown(run.name), " ", stateMark(run));
  byId("runs").replaceChildren(...main.runs.map(choose));
  const views = Object.keys(VIEWS).filter((view) => view !== "search" || state.view === "search");
  byId("views").replaceChildren(...views.map((view) =>
    el("a", { href: addressOf({ view, metric: null }), "aria-current": view === state.view ? "page" : null }, view)));
  byId("views").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  byId("step").value = state.step ?? "";
  byId("step").title = `of ${runOf().num_steps ?? "?"}`;
  byId("stepper").hidden = !runOf().steps.length;
  if (state.view !== "search") byId("search").value = "";
}

/** Goes `by` steps further; in the view of rollouts, among the steps whose rollouts are in the file. */
function moveStep(by, options = { replace: true }) {
  const run = runOf();
  const all = state.view === "rollouts" && run.rollouts.steps.length ? run.rollouts.steps : run.steps;
  if (!all.length) return;
  let at = nearest(all, state.step);
  if (all[at] === state.step || Math.sign(all[at] - state.step) !== Math.sign(by)) at += by;
  go({ step: all[Math.max(0, Math.min(all.length - 1, at))], rollout: null }, options);
}

/** Switches between dark and light. The choice also holds for other pages, if the browser lets a file store it. */
function changeTheme() {
  const root = document.documentElement;
  const now = root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
}

/** Shows the page in a theme, and stores it if the browser allows that. */
function setTheme(theme) {
  document.documentElement.style.colorScheme = theme;
  try {
    localStorage.setItem("grpo_spmd theme", theme);
  } catch { /* no storage: a page in a mail, or a browser that has it turned off */ }
  redrawCharts();
}

// ---- keys

const KEYS = {
  j: () => moveStep(1), k: () => moveStep(-1), ArrowRight: () => moveStep(1), ArrowLeft: () => moveStep(-1),
  n: () => moveRollout(1), p: () => moveRollout(-1), c: () => nextColouring(), t: changeTheme,
  "/": () => byId("search").focus(), "?": () => byId("help").showModal(), Escape: () => closeLast(),
};

/** Closes what was opened last: search, rollout, prompt or zoom. */
function closeLast() {
  if (state.view === "search") history.back();
  else if (state.rollout) go({ rollout: null });
  else if (state.row !== null) go({ row: null });
  else if (state.view === "curves") zoomTo(null);
}

/** Handles a key, unless it belongs to the browser or to a field of input. */
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const isTyping = event.target.matches("input:not([type=checkbox]), select, textarea");
  if (isTyping && event.key === "Escape") return void event.target.blur();
  if (isTyping || event.defaultPrevented) return;
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  const isPlain = event.target.matches("body, main, a, button, [tabindex], summary");
  if (view && view !== "search") go({ view, metric: null });
  else if (event.key === "Enter" && state.view === "curves" &&
    event.target.matches("body, main")) go({ view: "rollouts" });
  else if (isPlain && Object.hasOwn(KEYS, event.key)) KEYS[event.key]();
  else return;
  event.preventDefault();
}

// ---- begin

/** Shows nothing but the reason why the page cannot be shown. */
function refuse(...children) {
  byId("content").replaceChildren(el("p", { class: "note bad", id: "refused" }, ...children));
  document.documentElement.dataset.ready = "refused";
}

/** Checks browser and file, reads the chunk "main", and shows the first view. */
async function begin() {
  if (typeof DecompressionStream === "undefined" || !CSS.supports("color", "light-dark(red, red)"))
    return refuse("This browser is too old to unpack the page's data. It must be Chrome or Edge 123, Firefox 120, " +
      "Safari 17.5, or a later version.");
  if (!chunkElement("main") || !document.querySelector("i#end"))
    return refuse("This file is not whole: it was cut off while it was copied or sent. Make or fetch it again.");
  const read = await unpack("main");
  if (read.format !== FORMAT)
    return refuse(`This page's data has the format ${read.format}, but its scripts can only show ${FORMAT}.`);
  main = read;
  if (!main.runs.length) return refuse("There is no run in this file.");
  performance.mark("main read");
  byId("earlier").addEventListener("click", () => moveStep(-1));
  byId("later").addEventListener("click", () => moveStep(1));
  byId("step").addEventListener("change", (event) => {
    const wanted = Number(event.target.value);
    if (Number.isInteger(wanted) && wanted >= 0) go({ step: wanted, rollout: null });
    else showHeader();
  });
  byId("search").addEventListener("change", (event) => event.target.value &&
    go({ view: "search", q: event.target.value }));
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.value) go({ view: "search", q: event.target.value });
  });
  byId("theme").addEventListener("click", changeTheme);
  byId("keys").addEventListener("click", () => byId("help").showModal());
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", render);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
  let kept = null;
  try {
    kept = localStorage.getItem("grpo_spmd theme");
  } catch { /* as above */ }
  if (kept === "light" || kept === "dark") document.documentElement.style.colorScheme = kept;
  await render();
  performance.mark("first view");
}

document.addEventListener("DOMContentLoaded", () => begin().catch((error) => {
  console.error(error);
  refuse("The page's data cannot be read: ", shown(String(error)));
}));
