"use strict";
// Two views: the prompts of a run by how their rewards developed, and its config with versions and launches.

const KINDS = {
  never: "never solved", worse: "got worse", better: "got better", mixed: "mixed", always: "always solved",
};
let kindShown = ""; // of the list of prompts
let promptText = "";

/** The view of the prompts. */
function showPrompts(content) {
  const run = runOf();
  const counts = run.prompt_kinds ?? {};
  const list = el("div");
  const draw = () => {
    const wanted = promptText.toLowerCase();
    const passing = run.prompts.filter((one) => (state.row === null || one.row === state.row) &&
      (!kindShown || one.kind === kindShown) && (!wanted || asText(one.prompt).toLowerCase().includes(wanted)));
    list.replaceChildren(passing.length ? el("ul", { class: "plain prompts" },
      passing.map((one) => promptItem(run, one))) : el("p", { class: "note" },
      "No prompt in this page matches."));
    kinds.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed",
      String(button.dataset.kind === kindShown)));
  };
  const kinds = el("div", { class: "bar", role: "group", "aria-label": "prompts by how they went" },
    [["", "all"], ...Object.entries(KINDS)].map(([kind, words]) =>
      el("button", { "data-kind": kind, click: () => { kindShown = kind; draw(); } }, words, " ",
      el("b", { class: "num" }, num(kind ? own(counts, kind) ?? 0 : run.prompts_total ?? run.prompts.length)))),
    el("input", { type: "search", placeholder: "text of the prompt", "aria-label": "prompts that contain",
      value: promptText, input: (event) => { promptText = event.target.value; draw(); } }),
    state.row !== null && el("span", {},
      `row ${state.row} `, el("button", { click: () => go({ row: null }) }, "all prompts")));
  content.replaceChildren(panel("Prompts", kinds, (run.prompts_total ?? 0) > run.prompts.length &&
    el("p", { class: "note" },
      `${run.prompts.length} of ${run.prompts_total} prompts are listed: first those never solved, then those that ` +
      "got worse or better."), list));
  draw();
}

/** One prompt: its mean rewards over the steps, its text and columns, and links to its completions. */
function promptItem(run, one) {
  const rewards = known(run.prompts.flatMap((other) => other.means));
  const [first, last] = [one.means.find((value) => value !== null), one.means.findLast((value) => value !== null)];
  const links = one.steps.filter((step) => run.rollouts.steps.includes(step));
  const link = (step) => linkTo({ view: "rollouts", step, row: one.row, rollout: null }, String(step));
  return el("li", { class: "prompt" }, el("div", { class: "prompt-head" },
    el("b", {}, `row ${one.row}`), el("span", { class: "mark kind" }, KINDS[one.kind] ?? shown(asText(one.kind))),
    spark(one.means, smallest(rewards), largest(rewards)), el("span", { class: "num" },
      `${num(first, 3)} \u2192 ${num(last, 3)}`),
    el("span", { class: "leads" }, links.length ? ["completions of step ", links.slice(-6).map(link)] :
      el("span", { class: "muted" }, "no completions in this page"))),
    textBlock(clip(asText(one.prompt), 4000)),
    Object.keys(one.columns ?? {}).length > 0 && el("p", { class: "note" },
      Object.entries(one.columns).map(([name, value]) => [shown(name), " = ",
      el("code", {}, shown(clip(asText(value), 200))), "  "])));
}

// ---- config

/** The view of the config, with versions and launches. */
function showConfig(content) {
  if (content.querySelector("#config")) return;
  const run = runOf();
  const find = el("input", { type: "search", placeholder: "key or value", "aria-label": "keys that contain",
    input: () => draw() });
  const body = el("div");
  const isSet = el("input", { type: "checkbox", change: () => draw() });
  const isDefault = (source) => !source || source === "default";
  const draw = () => body.replaceChildren(table(["key", "value", "from"],
    run.config.filter(([key, value, source]) => !(isSet.checked && isDefault(source)) &&
      `${key} ${asText(value)}`.toLowerCase().includes(find.value.toLowerCase()))
    .map(([key, value, source]) => [el("code", {}, shown(key)), textBlock(asText(value)),
      isDefault(source) ? el("span", { class: "muted" }, "default") : shown(asText(source))]), { class: "config" }));
  draw();
  const versions = Object.entries(run.versions ?? {}).map(([name, value]) =>
    [shown(name), shown(asText(value) || "\u2013")]);
  content.append(el("div", { id: "config" }, differences(), el("div", { class: "columns" },
    panel("Config", el("p", { class: "bar" }, find, el("label", {}, isSet, " without defaults")), body),
    el("div", {}, panel("Run folder", el("p", {}, el("code", {}, shown(asText(run.folder))))),
      panel("Versions", versions.length ? table(["package", "version"], versions) : null),
      run.launches.toReversed().map(launchPanel),
      panel("This page", el("p", { class: "note" },
        `Made ${main.made_unix_s ? new Date(1000 * main.made_unix_s).toLocaleString() : "\u2013"} by grpo_spmd `,
        shown(asText(main.version)), "."))))));
}

/** What launches.jsonl records of one launch. */
function launchPanel(launch) {
  const rows = Object.entries(launch).filter(([name, value]) => name !== "versions" &&
    value !== null).map(([name, value]) => [shown(name),
    textBlock(Array.isArray(value) && value.every((one) => typeof one === "string") ? value.join(" ") :
      asText(value))]);
  return panel(`Launch ${num(launch.launch ?? null)}`, table(["", ""], rows, { class: "launch" }));
}
