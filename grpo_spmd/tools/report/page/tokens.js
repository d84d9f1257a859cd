"use strict";
// A completion: its tokens, coloured by one of their figures; all figures of the chosen token; the turns of an episode;
// and the columns of its data row.

// name: [button, explanation]. If possible the scale is the same for all of a step, so that completions compare.
const COLOURINGS = {
  difference: ["engine / policy",
    "the policy's logprob before the update minus the engine's when it sampled; it should be rounding noise"],
  advantage: ["advantage", "the token's weight in the loss"],
  logprob: ["logprob", "by the engine: the darker, the less likely the token was"],
  entropy: ["entropy", "of the policy's distribution over the next token, in nats"],
  mask: ["mask", "tokens that do not count in the loss are struck"],
  none: ["plain", "no colours"],
};
const WHYS = {
  best: "In this page as one of the step's best", worst: "In this page as one of the step's worst",
  failed: "In this page since it failed", "engine differs": "In this page since engine and policy differ most on it",
  group: "In this page with its whole group", sampled: "In this page as one of a sample spread evenly",
};
const BINS = 5; // shades of one direction
const FIRST_TOKENS = 3000; // drawn at once; more on demand
let colouring = "difference"; // stays from one completion to the next

/** Returns the figures of a colouring, one for each sampled token; null if they are not known. */
function valuesOf(name, rollout) {
  const tokens = rollout.tokens;
  if (!tokens || name === "none") return null;
  if (name === "advantage") return tokens.advantage ?? (rollout.advantage === null ? null :
    tokens.ids.map(() => rollout.advantage));
  if (name === "mask") return tokens.mask ?? tokens.ids.map(() => 1);
  return tokens[name] ?? null;
}

/** Returns the size of a figure at which its colour is full. */
function limitOf(name, data, values) {
  const size = (list) => largest(known(list).map(Math.abs)) || 0;
  if (name === "logprob") return 5;
  if (name === "entropy") return Math.max(1, size(values));
  if (name === "advantage") return Math.max(size(data.table.advantage), size(values));
  return Math.max(size(data.table.mismatch), size(values));
}

/** Returns the CSS class for the colour of a figure. */
function shadeOf(name, value, limit) {
  if (value === null || value === undefined || name === "none") return "";
  if (name === "mask") return value ? "" : "masked";
  const size = limit ? Math.min(BINS, Math.ceil((BINS * Math.abs(value)) / limit - 0.5)) : 0;
  return size > 0 ? (value < 0 && name !== "logprob" ? "minus" : "plus") + size : "";
}

/** Explains the colours: their scale and what the figures are. */
function legendOf(name, limit, numKnown) {
  if (name === "none") return el("p", { class: "legend" });
  if (!numKnown) return el("p", { class: "legend" }, "Not recorded for this rollout: ", COLOURINGS[name][1], ".");
  const swatch = (shade) => el("i", { class: "swatch " + shade });
  const range = Array.from({ length: BINS }, (_, i) => i + 1);
  const end = (value) => el("span", { class: "num", title: String(value) }, num(value, 3));
  const scale = name === "mask" ? [el("span", { class: "masked" }, "struck"), " does not count"] :
    name === "logprob" ? [end(0), swatch(""), range.map((i) => swatch("plus" + i)), "\u2264 ", end(-limit)] :
    name === "entropy" ? [end(0), swatch(""), range.map((i) => swatch("plus" + i)), end(limit)] :
    [end(-limit), range.toReversed().map((i) => swatch("minus" + i)), swatch(""), range.map((i) => swatch("plus" + i)),
      "+", end(limit)];
  return el("p", { class: "legend" }, el("span", { class: "scale" }, scale), el("span", { class: "muted" },
    COLOURINGS[name][1]),
    ["difference", "advantage"].includes(name) && el("span", { class: "muted" },
      "Full colour: the largest of the step."));
}

/** A rollout with its text: prompt, tokens or completion, rewards and columns. */
function completionPanel(data, i, rollout) {
  const body = el("div", { id: "tokens" });
  const readout = el("p", { class: "said", id: "said", "aria-live": "polite" });
  const legend = el("div", { id: "legend" });
  const choose = (name) => {
    colouring = name;
    drawTokens(data, rollout, body, legend, readout);
    buttons.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed",
      String(button.dataset.name === name)));
  };
  const buttons = el("div", { class: "bar", role: "group", "aria-label": "colour tokens by", id: "colourings" },
    "colour by ",
    Object.entries(COLOURINGS).map(([name, [head, what]]) => el("button", { "data-name": name, title: what,
      "aria-pressed": String(name === colouring), click: () => choose(name) }, head)));
  const prompt = asText(data.prompts[data.table.prompt[i]]);
  const result = panel(titleOf(data, i), figuresOf(data, i),
    el("p", { class: "note" }, shown(own(WHYS, rollout.why) ?? asText(rollout.why)), ". ",
      linkTo({ view: "prompts", row: data.table.row[i], rollout: null }, "all steps of this prompt")),
    el("div", { class: "completion" },
      el("div", {}, el("details", { open: prompt.length < 1200 }, el("summary", {}, "prompt"), textBlock(prompt)),
        rollout.tokens ? [buttons, legend, readout] :
          el("p", { class: "note" }, "The tokens of this rollout are not in this page."),
        body,
        rollout.cut > 0 && el("p", { class: "note" },
          `${num(rollout.cut)} further characters are not in this page.`), messagesOf(rollout)),
      el("aside", {}, rewardsOf(rollout), columnsOf("columns of the row", rollout.columns),
        columnsOf("logged by rewards", rollout.extra), columnsOf("environment", rollout.environment))));
  drawTokens(data, rollout, body, legend, readout);
  return result;
}

/** Chooses the next way to colour tokens. */
function nextColouring() {
  const names = Object.keys(COLOURINGS);
  document.querySelector(`#colourings [data-name=${names[(names.indexOf(colouring) + 1) % names.length]}]`)?.click();
}

/** Shows the tokens, or the plain text if their pieces are not known; an episode is shown turn by turn. */
function drawTokens(data, rollout, body, legend, readout) {
  const values = valuesOf(colouring, rollout);
  const limit = values ? limitOf(colouring, data, values) : 0;
  legend.replaceChildren(legendOf(colouring, limit, values ? known(values).length : 0));
  readout.replaceChildren("Point at a token, or step through them with the arrow keys: its figures are shown here.");
  const boxOf = (pieces, from) => tokenBox(rollout, pieces, from, values, limit, readout);
  if (!rollout.turns?.length) {
    const isPlain = !hasPieces(rollout);
    if (!isPlain) return void body.replaceChildren(boxOf(rollout.tokens.pieces, 0));
    body.replaceChildren(textBlock(asText(rollout.completion)));
    if (rollout.tokens) body.append(el("h3", {}, "its token ids (the run's tokenizer is not known)"),
      boxOf(rollout.tokens.ids.map((id) => id + " "), 0));
    return;
  }
  let at = 0, number = 0, segment = rollout.turns[0].segment;
  const turns = rollout.turns.flatMap((turn) => {
    const from = at;
    if (turn.sampled) { at += turn.num_tokens; number += 1; }
    const head = turn.sampled ?
      [`turn ${number}, sampled: ${num(turn.num_tokens)} tokens`,
        turn.reward === null || turn.reward === undefined ? null : [", reward ", figure(turn.reward)]] :
      [`given: ${num(turn.num_tokens)} tokens`];
    const text = turn.sampled && turn.pieces && rollout.tokens ? boxOf(turn.pieces, from) :
      textBlock(turn.pieces ? turn.pieces.join("") : asText(turn.text));
    const cut = turn.segment === segment ? null : el("p", { class: "cut" },
      `a new context begins (segment ${turn.segment + 1})`);
    segment = turn.segment;
    return [cut, el("div", { class: "turn " + (turn.sampled ? "sampled" : "given") }, el("p", { class: "turn-head" },
      head), text)];
  });
  body.replaceChildren(...turns.filter(Boolean));
}

/** Makes a box of tokens: one stop of the Tab key, in which the arrow keys go from token to token. `from` is the index
 * of the first token in the completion. */
function tokenBox(rollout, pieces, from, values, limit, readout) {
  const box = el("div", { class: "text tokens", tabindex: 0, role: "group",
    "aria-label": "tokens; the arrow keys lead through them" });
  const add = (first, last) => {
    for (let i = first; i < last; i++) {
      const piece = el("span", { class: "t " + shadeOf(colouring, values?.[from + i], limit) +
        (pieces[i] === "" ? " nothing" : "") }, shown(pieces[i]));
      piece.dataset.at = from + i;
      box.append(piece);
    }
    if (last < pieces.length) {
      const more = el("button", { click: () => { more.remove(); add(last, pieces.length); } },
        `show ${num(pieces.length - last)} further tokens`);
      box.append(more);
    }
  };
  add(0, Math.min(pieces.length, FIRST_TOKENS));
  let chosen = null;
  const choose = (piece) => {
    if (!piece) return;
    chosen?.classList.remove("chosen");
    chosen = piece;
    chosen.classList.add("chosen");
    const at = Number(piece.dataset.at);
    readout.replaceChildren(figuresOfToken(rollout, at, pieces[at - from]));
  };
  box.addEventListener("mouseover", (event) => choose(event.target.closest(".t")));
  box.addEventListener("click", (event) => choose(event.target.closest(".t")));
  box.addEventListener("focus", () => box.matches(":focus-visible") && choose(chosen ?? box.querySelector(".t")));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!by || !chosen) return;
    event.preventDefault(); // so that the key does not go to another step
    const next = chosen[by];
    if (next?.matches(".t")) choose(next);
    chosen.scrollIntoView({ block: "nearest" });
  });
  return box;
}

/** All figures of one token. */
function figuresOfToken(rollout, at, piece) {
  const { ids, logprob } = rollout.tokens;
  const exact = (name, value) => (value === null || value === undefined ? null : el("span", {}, name + " ",
    el("b", { class: "num", "data-figure": name }, String(value))));
  const of = (name) => valuesOf(name, rollout)?.[at];
  return el("span", { class: "figures-of-token" },
    el("span", {}, `token ${at + 1} of ${ids.length} `, el("code", {}, shown(JSON.stringify(clip(piece, 40))))),
    exact("id", ids[at]), exact("logprob", logprob?.[at]),
    logprob?.[at] === undefined || logprob[at] === null ? null : exact("probability", num(Math.exp(logprob[at]), 3)),
    exact("difference", of("difference")), exact("advantage", of("advantage")), exact("entropy", of("entropy")),
      of("mask") === 0 ? el("span", { class: "mark warning" }, "does not count") : null);
}

// ---- beside the text

/** A table of the rollout's rewards by name. */
function rewardsOf(rollout) {
  const rows = Object.entries(rollout.rewards ?? {}).map(([name, value]) => [shown(name), figure(value),
    statusMark(own(rollout.statuses, name) ?? "ok")]);
  return rows.length ? [el("h3", {}, "rewards"), table(["name", "reward", "status"], rows)] : null;
}

/** A list of named values. */
function columnsOf(title, columns) {
  const entries = Object.entries(columns ?? {}).filter(([, value]) => value !== null);
  if (!entries.length) return null;
  const short = (value) => (JSON.stringify(value).length < 80 ? JSON.stringify(value) : JSON.stringify(value, null, 1));
  return [el("h3", {}, title),
    el("dl", {}, entries.flatMap(([name, value]) => [el("dt", {}, shown(name)),
    el("dd", {}, textBlock(typeof value === "object" ? short(value) : asText(value)))]))];
}

/** The chat messages of an episode after its prompt. */
function messagesOf(rollout) {
  if (!rollout.messages?.length) return null;
  const message = (one) => el("div", { class: "turn " + (one.role === "assistant" ? "sampled" : "given") },
    el("p", { class: "turn-head" }, shown(asText(one.role))), textBlock(asText(one.content)),
    Object.entries(one).filter(([name]) => !["role", "content"].includes(name)).map(([name, value]) =>
      [el("p", { class: "turn-head" }, shown(name)), textBlock(JSON.stringify(value, null, 1))]));
  return el("details", {}, el("summary", {}, `${rollout.messages.length} messages`), rollout.messages.map(message));
}
