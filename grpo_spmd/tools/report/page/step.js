"use strict";
// The rollouts of a step: histogram of rewards, groups, filters, a table of all rollouts, and below it the opened one.

const COLUMNS = [ // [column of the chunk's table, head, how a cell is shown]
  ["row", "row", (data, i) => num(data.table.row[i])],
  ["position", "group", (data, i) => num(data.table.position[i])],
  ["sample", "sample", (data, i) => num(data.table.sample[i])],
  ["reward", "reward", (data, i) => figure(data.table.reward[i])],
  ["advantage", "advantage", (data, i) => el("span", { class: "num", title: asText(data.table.advantage[i]) },
    signed(data.table.advantage[i], 3))],
  ["tokens", "tokens", (data, i) => num(data.table.tokens[i])],
  ["finish", "end", (data, i) => (data.table.finish[i] ? el("span", { class: "mark warning" }, "cut off") : "stop")],
  ["status", "status", (data, i) => statusMark(data.status_names[data.table.status[i]])],
  ["mismatch", "mismatch", (data, i) => figure(data.table.mismatch[i], 3)],
  ["shown", "completion", (data, i) => (data.table.shown[i] < 0 ? "" : previewOf(data.rollouts[data.table.shown[i]]))],
];
const statusMark = (name) => (name === "ok" || name === "not_applicable" ? shown(name.replace("_", " ")) :
  el("span", { class: "mark " + (/error|timeout|invalid/.test(name) ? "bad" : "warning") }, shown(asText(name))));
const FIRST_ROWS = 100;
const PREVIEW = 40; // characters at each end of a completion

/** Both ends of a completion on one line, with special tokens if the page has its tokens. */
function previewOf(rollout) {
  const text = asText(hasPieces(rollout) ? rollout.tokens.pieces.join("") : rollout.completion);
  const ends = text.length > 2 * PREVIEW ? text.slice(0, PREVIEW) + " \u2026 " + text.slice(-PREVIEW) : text;
  const why = asText(rollout.why);
  return el("span", { class: "preview" }, shown(ends.replace(/\s+/g, " ")),
    !["group", "sampled"].includes(why) && el("span", { class: "mark kind" }, shown(why)));
}

const NO_FILTERS = { status: "", finish: "", rewardLow: "", rewardHigh: "", tokensLow: "", tokensHigh: "",
  mismatchLow: "", text: "", isShown: false, isUnknown: false };

let filters = { ...NO_FILTERS }; // kept when another step is shown
let order = { column: "position", isDown: false };
let opened = null; // of the shown step: {data, step, run, kept: indices of the rollouts that pass the filters, isAll}

const idOf = (data, i) => `${data.table.position[i]}/${data.table.sample[i]}`;

/** The view of a step's rollouts. It shows the step with rollouts that is nearest to the address's step. */
async function showRollouts(content, before, isCurrent) {
  const run = runOf();
  const steps = run.rollouts.steps;
  if (!steps.length) return void content.replaceChildren(el("p", { class: "note" }, "This page has no rollouts. ",
    shown(asText(run.rollouts.note))));
  const step = steps[nearest(steps, state.step)];
  const isSame = opened && content.querySelector("#rollouts") && opened.step === step && opened.run === state.run;
  if (!isSame) {
    const data = await chunk(`${state.run}/${step}`);
    if (!isCurrent()) return;
    opened = { data, step, run: state.run, kept: [], isAll: false };
    content.replaceChildren(el("div", { id: "rollouts" }, headOfStep(run, step),
      el("div", { class: "panel" }, el("div", { id: "histogram" }), el("div", { id: "groups" }), filterBar(data),
        el("div", { id: "table" })), el("div", { id: "detail" })));
  }
  if (!isSame || before.row !== state.row) showTable();
  showDetail(byId("detail"), opened.data, state.rollout, before.rollout !== state.rollout &&
    before.view === "rollouts");
  byId("table").querySelectorAll("tr[data-id]").forEach((row) => row.classList.toggle("open",
    row.dataset.id === state.rollout));
}

/** The step's main metrics, with links to their curves. */
function headOfStep(run, step) {
  const at = run.steps.indexOf(step);
  const metrics = ["reward/mean", "reward/std", "reward/zero_std_groups_frac", "completion/tokens_mean",
    "completion/truncated_frac", "loss/entropy", "optim/grad_norm",
    "weight_sync/mismatch_abs_max", "time/step_s"];
  const tile = (key) => {
    const value = own(run.metrics, key)?.[at];
    return value === null || value === undefined ? null :
      el("a", { class: "tile", href: addressOf({ view: "curves", metric: key, rollout: null }) },
      el("b", { title: asText(value) }, num(value, 3)), el("span", {}, key));
  };
  return panel(`Step ${step}`,
    step !== state.step && el("p", { class: "note" },
      `Rollouts of step ${state.step} are not in this page; these are of the nearest step that has them.`),
    el("div", { class: "tiles small" }, at >= 0 && metrics.map(tile)),
    el("p", { class: "note" }, "From ", el("code", {}, `rollouts/step_${String(step).padStart(6, "0")}.jsonl`), " of ",
      el("code", {}, shown(asText(run.folder))), ". ", shown(asText(run.rollouts.note))));
}

// ---- filters

/** The fields by which the table is filtered. */
function filterBar(data) {
  const set = (name, value) => {
    filters = { ...filters, [name]: value };
    showTable();
  };
  const input = (name, label, attributes = {}) => el("label", {}, label, " ",
    el("input", { size: 5, value: filters[name], "data-filter": name, inputmode: "decimal", autocomplete: "off",
    input: (event) => set(name, event.target.value), ...attributes }));
  const select = (name, label, options) => el("label", {}, label, " ",
    el("select", { "data-filter": name, change: (event) => set(name, event.target.value) },
    [["", "all"], ...options].map(([value, text]) => el("option", { value, selected: filters[name] === value },
      clip(asText(text), 40)))));
  return el("div", { class: "bar filters" },
    select("status", "status", data.status_names.map((name) => [name, name])),
      select("finish", "end", [["0", "stop"], ["1", "cut off"]]),
    input("rewardLow", "reward from"), input("rewardHigh", "to"), input("tokensLow", "tokens from"),
      input("tokensHigh", "to"), input("mismatchLow", "mismatch from"),
    input("text", "text", { size: 16, inputmode: "text", type: "search", placeholder: "in prompt or completion" }),
    el("label", {}, el("input", { type: "checkbox", checked: filters.isShown, change: (event) => set("isShown",
      event.target.checked) }), " with text only"),
    el("button", { id: "clear", click: clearFilters }, "clear"),
      el("span", { id: "kept", class: "note", "aria-live": "polite" }));
}

/** Removes all filters, also that of a prompt. */
function clearFilters() {
  filters = { ...NO_FILTERS };
  document.querySelectorAll("[data-filter]").forEach((field) => (field.value = ""));
  document.querySelector(".filters [type=checkbox]").checked = false;
  if (state.row !== null) go({ row: null });
  else showTable();
}

/** Whether the i-th rollout passes the filters. The histogram of rewards ignores the filter by reward: `but` is then
 * "reward". */
function passes(data, i, but = "") {
  const { table: columns } = data;
  const isBeyond = (value, low, high) => (low !== "" && !(value !== null && value >= Number(low))) ||
    (high !== "" && !(value !== null && value <= Number(high)));
  if (state.row !== null && columns.row[i] !== state.row) return false;
  if (filters.status !== "" && data.status_names[columns.status[i]] !== filters.status) return false;
  if (filters.finish !== "" && columns.finish[i] !== Number(filters.finish)) return false;
  if (but !== "reward" && filters.isUnknown && columns.reward[i] !== null) return false;
  if (but !== "reward" && isBeyond(columns.reward[i], filters.rewardLow, filters.rewardHigh)) return false;
  if (isBeyond(columns.tokens[i], filters.tokensLow, filters.tokensHigh) || isBeyond(columns.mismatch[i],
    filters.mismatchLow, "")) return false;
  if (filters.isShown && columns.shown[i] < 0) return false;
  if (filters.text === "") return true;
  const wanted = filters.text.toLowerCase();
  const texts = [data.prompts[columns.prompt[i]], columns.shown[i] < 0 ? "" :
    data.rollouts[columns.shown[i]].completion];
  return texts.some((text) => asText(text).toLowerCase().includes(wanted));
}

// ---- histogram and groups

/** Returns bins [{low, high, label}]: one for each value if there are at most 12 of them, else 20 of equal width. */
function binsOf(rewards) {
  const values = [...new Set(rewards)].sort((a, b) => a - b);
  if (values.length <= 12) return values.map((value) => ({ low: value, high: value, label: num(value, 3) }));
  const [low, high] = [values[0], values.at(-1)];
  const edge = (i) => (i === 20 ? high : low + (i * (high - low)) / 20);
  return Array.from({ length: 20 },
    (_, i) => ({ low: edge(i), high: edge(i + 1),
    label: `${num(edge(i), 3)} to ${num(edge(i + 1), 3)}`, isOpen: i < 19 }));
}

/** Shows the histogram of rewards: all rollouts, and those that pass the filters. A click on a bin filters by it. */
function showHistogram(data) {
  const rewards = data.table.reward;
  const bins = binsOf(known(rewards));
  const isIn = (bin, value) => value !== null && value >= bin.low && (bin.isOpen ? value < bin.high :
    value <= bin.high);
  const counts = bins.map((bin) => rewards.reduce((sum, value) => sum + isIn(bin, value), 0));
  const numUnknown = rewards.length - known(rewards).length;
  if (numUnknown) bins.push({ label: "unknown", isUnknown: true }) && counts.push(numUnknown);
  const passing = bins.map((bin) => rewards.reduce((sum, value, i) => sum +
    ((bin.isUnknown ? value === null : isIn(bin, value)) && passes(data, i, "reward")), 0));
  const most = largest(counts) || 1;
  const isChosen = (bin) => (bin.isUnknown ? filters.isUnknown : !filters.isUnknown &&
    filters.rewardLow === String(bin.low) && filters.rewardHigh === String(bin.high));
  const choose = (bin) => {
    const isOff = isChosen(bin);
    filters = { ...filters, isUnknown: !isOff && !!bin.isUnknown, rewardLow: isOff || bin.isUnknown ? "" :
      String(bin.low), rewardHigh: isOff || bin.isUnknown ? "" : String(bin.high) };
    for (const name of ["rewardLow",
      "rewardHigh"]) document.querySelector(`[data-filter=${name}]`).value = filters[name];
    showTable();
  };
  byId("histogram").replaceChildren(el("h3", {}, "rewards"),
    el("div", { class: "bins", role: "group", "aria-label": "histogram of rewards" }, bins.map((bin, i) =>
    el("button", { class: "bin", "aria-pressed": String(isChosen(bin)),
      title: `${bin.label}: ${counts[i]} rollouts`, "aria-label": `reward ${bin.label}: ${counts[i]} rollouts`,
      click: () => choose(bin) },
      el("i", { class: "all", style: { height: `${(100 * counts[i]) / most}%` } }),
      el("i", { style: { height: `${(100 * passing[i]) / most}%` } })))),
    el("div", { class: "edges" }, bins.map((bin, i) => el("span", {}, bins.length <= 13 || i === 0 || bin.isUnknown ?
      (bin.isUnknown ? "?" : num(bin.low, 2)) : i === 19 ? num(bin.high, 2) : ""))));
}

/** Shows a square for each group: the higher its mean reward the fuller, and dashed if all its rewards are equal. */
function showGroups(data) {
  const groups = Map.groupBy(data.table.position.keys(), (i) => data.table.position[i]);
  const means = [...groups].map(([position, places]) =>
    ({ position, places, rewards: known(places.map((i) => data.table.reward[i])) }));
  const all = known(data.table.reward);
  const [low, high] = [smallest(all), largest(all)];
  const square = ({ position, places, rewards }) => {
    const isAlike = smallest(rewards) === largest(rewards);
    const part = rewards.length && high > low ? (mean(rewards) - low) / (high - low) : 0;
    const best = places.filter((i) => data.table.shown[i] >= 0).sort((a, b) =>
      data.table.reward[b] - data.table.reward[a])[0] ?? places[0];
    return el("button", { class: "square" + (isAlike ? " alike" : ""), tabindex: -1,
      style: { "--part": `${Math.round(100 * part)}%` }, click: () => go({ rollout: idOf(data, best) }),
      title: `group ${position}, row ${data.table.row[places[0]]}: mean reward ${num(mean(rewards), 3)} of ` +
        places.length + (isAlike ? ", all equal" : "") });
  };
  byId("groups").replaceChildren(el("h3", {},
    `${means.length} groups`, el("span", { class: "note" },
    " (the fuller, the higher its mean reward; dashed: equal rewards)")), el("div", { class: "squares" },
    means.map(square)));
}

// ---- the table

/** Shows histogram, groups and table again, after a change of filters or order. */
function showTable() {
  const { data } = opened;
  const places = [...data.table.position.keys()].filter((i) => passes(data, i));
  const values = data.table[order.column];
  const sign = order.isDown ? -1 : 1;
  const rank = (i) => (order.column === "shown" ? (values[i] < 0 ? null : data.rollouts[values[i]].why) :
    order.column === "status" ? data.status_names[values[i]] : values[i]);
  const compare = (a, b) => { // unknown values come last in either direction
    const [first, second] = [rank(a), rank(b)];
    if (first === null || second === null) return (first === null) - (second === null) || a - b;
    return sign * (first < second ? -1 : first > second ? 1 : 0) || a - b;
  };
  opened.kept = places.sort(compare);
  showHistogram(data);
  showGroups(data);
  byId("kept").textContent = `${places.length} of ${data.table.position.length} rollouts`;
  if (state.row !== null) byId("kept").append(`, of the prompt in row ${state.row} `,
    el("button", { click: () => go({ row: null }) }, "all prompts"));
  const head = ([column, text]) => {
    const isOwn = order.column === column;
    return el("th", { scope: "col", "aria-sort": isOwn ? (order.isDown ? "descending" : "ascending") : null },
      el("button", { click: () => {
      order = { column, isDown: isOwn ? !order.isDown : ["reward", "advantage", "tokens", "mismatch",
        "shown"].includes(column) };
      showTable();
      byId("table").querySelector("[aria-sort] button").focus();
    } }, text));
  };
  const rows = opened.kept.slice(0, opened.isAll ? undefined : FIRST_ROWS);
  byId("table").replaceChildren(el("div", { class: "wide scroll" }, el("table", { class: "figures rollouts" },
    el("thead", {}, el("tr", {}, COLUMNS.map(head))), el("tbody", {}, rows.map((i) => rowOf(data, i))))),
    ...(rows.length < opened.kept.length ? [el("button", { click: () => { opened.isAll = true; showTable(); } },
      `show ${opened.kept.length - rows.length} more`)] : []));
}

/** The table's row of the i-th rollout. */
function rowOf(data, i) {
  const id = idOf(data, i);
  const first = el("td", {}, linkTo({ rollout: id }, num(data.table.row[i])));
  return el("tr", { "data-id": id, class: id === state.rollout ? "open" : null, click: () => go({ rollout: id }) },
    first,
    COLUMNS.slice(1).map(([, , cell]) => el("td", {}, cell(data, i))));
}

/** Opens the rollout that is `by` rows further in the table. */
function moveRollout(by) {
  if (state.view !== "rollouts" || !opened?.kept.length) return;
  const at = opened.kept.findIndex((i) => idOf(opened.data, i) === state.rollout);
  const to = at < 0 ? (by > 0 ? 0 : opened.kept.length - 1) : Math.max(0, Math.min(opened.kept.length - 1, at + by));
  go({ rollout: idOf(opened.data, opened.kept[to]) }, { replace: true });
}
