"use strict";
// A group side by side: the samples of one prompt with rewards and advantages. In each the place is marked where it
// begins to differ from the opened one.

const CARD_BEFORE = 80, CARD_BEHIND = 500; // characters that are shown before and after the marked place

/** Shows what is below the table: the group of the opened rollout, and the rollout itself. */
function showDetail(host, data, id, isNew) {
  if (!id) return void host.replaceChildren(el("p", { class: "note" },
    "Open a rollout: a row of the table, a group, or n."));
  const [position, sample] = id.split("/").map(Number);
  const places = [...data.table.position.keys()].filter((i) => data.table.position[i] === position).sort((a, b) =>
    data.table.sample[a] - data.table.sample[b]);
  const chosen = places.find((i) => data.table.sample[i] === sample);
  if (chosen === undefined) return void host.replaceChildren(el("p", { class: "note" },
    `Step ${opened.step} has no rollout ${id}.`));
  const rollout = rolloutAt(data, chosen);
  host.replaceChildren(groupPanel(data, places, chosen), rollout ? completionPanel(data, chosen, rollout) :
    panel(titleOf(data, chosen), figuresOf(data, chosen), el("p", { class: "note" },
      "The text of this rollout is not in this page, which keeps the best, the worst, the failed and the most " +
      "mismatched of each step, and others evenly. It is in the run's folder, where it was dumped.")));
  if (isNew) host.scrollIntoView({ block: "nearest" });
}

const rolloutAt = (data, i) => (data.table.shown[i] < 0 ? null : data.rollouts[data.table.shown[i]]);
const titleOf = (data, i) =>
  `Row ${data.table.row[i]}, group ${data.table.position[i]}, sample ${data.table.sample[i]}`;

/** The figures of the i-th rollout. */
function figuresOf(data, i) {
  const columns = data.table;
  const tile = (label, value, title) => el("div", { class: "tile" }, el("b", { title }, value), el("span", {}, label));
  return el("div", { class: "tiles small" }, tile("reward", num(columns.reward[i]), asText(columns.reward[i])),
    tile("advantage", signed(columns.advantage[i]), asText(columns.advantage[i])),
    tile("tokens", num(columns.tokens[i])), tile("end", columns.finish[i] ? "cut off" : "stop"),
      tile("status", shown(asText(data.status_names[columns.status[i]]))),
    tile("largest mismatch", num(columns.mismatch[i], 3), asText(columns.mismatch[i])));
}

/** The samples of a group: those with text side by side, the others as links. */
function groupPanel(data, places, chosen) {
  const withText = places.filter((i) => rolloutAt(data, i));
  const without = places.filter((i) => !rolloutAt(data, i));
  const reference = rolloutAt(data, chosen) ? chosen : withText[0];
  const rewards = known(places.map((i) => data.table.reward[i]));
  const [low, high] = [smallest(rewards), largest(rewards)];
  const parts = withText.map((i) => (i === reference ? null : partingOf(rolloutAt(data, reference),
    rolloutAt(data, i))));
  const first = smallest(known(parts)); // the earliest place at which another sample differs from the opened one
  const card = (i, at) => {
    const rollout = rolloutAt(data, i), isOwn = i === reference;
    const share = high > low && data.table.reward[i] !== null ? (data.table.reward[i] - low) / (high - low) :
      data.table.reward[i] === null ? 0 : 1;
    return el("a", { class: "card", href: addressOf({ rollout: idOf(data, i) }), "aria-current": i === chosen ?
      "true" : null },
      el("span", { class: "card-head" },
        el("b", {}, `sample ${data.table.sample[i]}`), el("span", {}, "reward ", figure(data.table.reward[i], 3)),
        el("span", {}, "adv ", el("span", { class: "num" }, signed(data.table.advantage[i], 3))),
          el("span", {}, `${num(data.table.tokens[i])} tokens`),
        data.table.finish[i] ? el("span", { class: "mark warning" }, "cut off") : null,
          data.status_names[data.table.status[i]] === "ok" ? null :
          statusMark(data.status_names[data.table.status[i]])),
      el("span", { class: "margin" }, el("i", { style: { width: `${100 * share}%` } })),
      partText(rollout, isOwn ? first : parts[at]));
  };
  const chip = (i) => el("a", { class: "chip", href: addressOf({ rollout: idOf(data, i) }),
    "aria-current": i === chosen ? "true" : null },
    `sample ${data.table.sample[i]}: `, figure(data.table.reward[i], 3), `, ${num(data.table.tokens[i])} tokens`);
  return panel(`Group ${data.table.position[chosen]}: ${places.length} samples, mean reward ${num(mean(rewards), 3)}`,
    withText.length > 1 && el("p", { class: "note" },
      first === null ? "All samples with text are the same as " : "Marked: the first token that differs from ",
      el("b", {}, `sample ${data.table.sample[reference]}`),
      first === null ? "." : ", the opened one; in that sample, the first token in which another one differs."),
    el("div", { class: "cards" }, withText.map(card)), without.length > 0 && el("p", { class: "chips" },
      "without text: ", without.map(chip)));
}

/** Returns the index of the first unit (see `unitsOf`) in which two completions differ; null if they are the same. */
function partingOf(one, other) {
  const [a, b] = [unitsOf(one), unitsOf(other)];
  const most = Math.max(a.length, b.length);
  for (let at = 0; at < most; at++) if (a[at] !== b[at]) return at;
  return null;
}

const hasPieces = (rollout) => Array.isArray(rollout.tokens?.pieces);
/** The token ids of a completion, or its characters if the page does not have its tokens. */
const unitsOf = (rollout) => (hasPieces(rollout) ? rollout.tokens.ids : rollout.completion);

/** Shows a completion around its unit `at`, which is marked; from its beginning if `at` is null. */
function partText(rollout, at) {
  const isTokens = hasPieces(rollout);
  const units = isTokens ? rollout.tokens.pieces : rollout.completion;
  const text = (from, to) => (isTokens ? units.slice(from, to).join("") : units.slice(from, to));
  if (at === null) return el("span", { class: "text" }, shown(clip(text(0, units.length), CARD_BEFORE + CARD_BEHIND)));
  const before = text(0, at), unit = text(at, at + 1), behind = text(at + 1, units.length);
  const marked = at >= units.length ? el("mark", { class: "parting" }, "(ends)") : unit === "" ?
    el("mark", { class: "parting" }, "\u00b7") : el("mark", { class: "parting" }, shown(unit));
  return el("span", { class: "text" }, el("span", { class: "muted" }, before.length > CARD_BEFORE ? "\u2026 " : "",
    shown(before.slice(-CARD_BEFORE))), marked, shown(clip(behind, CARD_BEHIND)));
}
