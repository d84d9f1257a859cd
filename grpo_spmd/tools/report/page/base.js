"use strict";
// Helpers of all views: DOM elements, safe display of recorded text, numbers, and the chunks of the file.

const FORMAT = 1; // of the data that these scripts show

/** Makes an element. In `attributes`, a function is an event listener, `style` is an object of CSS properties, and an
 * attribute that is null or false is left out. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const byId = (id) => document.getElementById(id);

/** A field of parsed JSON, but none that every object inherits: a reward may be named "constructor". */
const own = (object, key) => (object && Object.hasOwn(object, key) ? object[key] : undefined);

// Characters that are shown as marks: controls, those that turn the direction of text, invisible ones, halves of
// surrogate pairs (with the flag u, whole pairs do not match), and seven or more combining marks on one letter, which
// would cover the lines above.
const ODD = new RegExp(
  String.raw`[\0-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b` +
  String.raw`\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff` +
  String.raw`\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e007f}]|\p{M}{7,}`, "gu");

const CONTROLS = ("NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI " +
  "DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US")
  .split(" ");

/** Makes the mark of an odd character, with its code as title. */
function oddMark(character) {
  const code = character.codePointAt(0);
  const times = character.length > 2 ? ` \u00d7 ${character.length}` : "";
  const name = "U+" + code.toString(16).toUpperCase().padStart(4, "0") + times;
  const isHalf = code >= 0xd800 && code <= 0xdfff;
  const picture = CONTROLS[code] ?? (code === 0x7f ? "DEL" : isHalf ? "\ufffd" : name);
  return el("span", { class: "odd", title: isHalf ? name + ", half a surrogate pair" : name }, picture);
}

/** Returns a recorded text as DOM nodes: odd characters become marks, and nothing is ever parsed as HTML. */
function shown(text) {
  const all = document.createDocumentFragment();
  let from = 0;
  for (const match of text.matchAll(ODD)) {
    if (match.index > from) all.append(text.slice(from, match.index));
    all.append(oddMark(match[0]));
    from = match.index + match[0].length;
  }
  if (from < text.length) all.append(text.slice(from));
  return all;
}

const asText = (value) =>
  value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);

/** A block of recorded text, which stays in its box and does not turn the direction of the text beside it. */
const textBlock = (text, name = "") => el("div", { class: "text " + name }, shown(text));

const clip = (text, most) => (text.length > most ? text.slice(0, most) + " \u2026" : text);

/** Formats a number with `digits` significant digits; a value that is not known is a dash. */
function num(value, digits = 4) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(Math.max(0, digits - 2));
  return String(Number(value.toPrecision(digits)));
}

/** The same in an element whose title is the exact value. */
const figure = (value, digits) => el("span", { class: "num", title: asText(value) || null }, num(value, digits));
const signed = (value, digits) => (value > 0 ? "+" : "") + num(value, digits);
const percent = (part) => num(100 * part, 3) + " %";

/** Formats a time: seconds, or minutes or hours if it is longer. */
function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value < 60) return num(value, 3) + " s";
  const minutes = Math.round(value / 60);
  if (minutes < 60) return Math.floor(value / 60) + " min " + Math.floor(value % 60) + " s";
  return Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

const known = (values) => values.filter((value) => value !== null && value !== undefined);
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const largest = (values) => values.reduce((most, value) => (most === null || value > most ? value : most), null);
const smallest = (values) => values.reduce((least, value) => (least === null || value < least ? value : least), null);

/** Returns the index of the value that is nearest to `wanted`; -1 if there are no values. */
function nearest(values, wanted) {
  let best = -1;
  for (let i = 0; i < values.length; i++)
    if (best < 0 || Math.abs(values[i] - wanted) < Math.abs(values[best] - wanted)) best = i;
  return best;
}

/** Makes a table: `heads` are texts or elements, and each of `rows` is a list with the contents of its cells. */
function table(heads, rows, attributes = {}) {
  const cells = (row) => row.map((cell) => (cell instanceof HTMLTableCellElement ? cell : el("td", {}, cell)));
  return el("div", { class: "wide" },
    el("table", attributes,
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, cells(row))))));
}

const panel = (title, ...children) => el("section", { class: "panel" }, title && el("h2", {}, title), children);

/** Returns a colour of the style sheet, for the present theme, in a form that a canvas accepts. */
function colour(name) {
  const probe = byId("end");
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** The colour of the i-th line of a chart: one of eight that colour-blind people can tell apart. */
const lineColour = (i) => "c" + (i % 8);

/** The colour mark beside the name of the i-th of several runs, in views that show curves. */
const runKey = (i) => main.runs.length > 1 && ["verdict", "curves"].includes(state.view) &&
  el("i", { class: "key " + (i ? "dashed" : ""), style: { color: `var(--${lineColour(i)})` } });

/** Draws values as a small curve (100 x 20); null values are gaps. */
function spark(values, low = smallest(known(values)), high = largest(known(values))) {
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawing.setAttribute("viewBox", "0 0 100 20");
  drawing.setAttribute("class", "spark");
  drawing.setAttribute("aria-hidden", "true");
  const y = (value) => (high > low ? 18 - (16 * (value - low)) / (high - low) : 10);
  const x = (i) => (values.length > 1 ? (98 * i) / (values.length - 1) + 1 : 50);
  let path = "", isDrawing = false;
  values.forEach((value, i) => {
    if (value === null) return void (isDrawing = false);
    path += `${isDrawing ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    isDrawing = true;
  });
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path.includes("L") ? path : path + "h.01");
  drawing.append(line);
  return drawing;
}

// ---- chunks: JSON that is compressed (raw deflate) and base64-encoded, unpacked when it is first shown

const unpacked = new Map(); // the chunks that were used last, in the order of their use
const MOST_UNPACKED = 12;

const chunkElement = (name) => document.querySelector(`script[data-chunk="${name}"]`);

/** Returns a chunk, unpacked if it is not among those that were used last. */
async function chunk(name) {
  if (unpacked.has(name)) {
    const value = unpacked.get(name);
    unpacked.delete(name);
    unpacked.set(name, value);
    return value;
  }
  const value = await unpack(name);
  if (name !== "main") unpacked.set(name, value);
  if (unpacked.size > MOST_UNPACKED) unpacked.delete(unpacked.keys().next().value);
  return value;
}

/** Unpacks a chunk without keeping it: a search reads all of them. */
async function unpack(name) {
  const element = chunkElement(name);
  if (!element) throw new Error(`the file has no part ${name}`);
  const packed = element.textContent;
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(packed) : Uint8Array.from(atob(packed),
    (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return JSON.parse(await new Response(stream).text());
}
