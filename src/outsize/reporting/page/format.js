// Numbers as people read them, and elements without innerHTML: nothing that a run has written is ever parsed as HTML.

const SECONDS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const RATES = [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]];
const COUNTS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

function digits(value, places = 3) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(places - 1).replace(/\.?0*e\+?/, "e");
  const whole = Math.floor(Math.log10(size)) + 1;
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.max(0, Math.min(6, places - whole)) });
}

function scaled(value, scales, rest) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const scale = scales.find(([factor]) => Math.abs(value) >= factor);
  return scale ? `${digits(value / scale[0])} ${scale[1]}` : `${digits(value)}${rest ? " " + rest : ""}`;
}

const seconds = (value) => (value === 0 ? "0 s" : scaled(value, SECONDS, "s"));
const bytes = (value) => scaled(value, BYTES, "bytes");
const rate = (value) => (value === 0 ? "0" : scaled(value, RATES, "B/s"));
const count = (value) => scaled(value, COUNTS, "").replace(/ (?=[TBMk]$)/, "");
const percent = (value) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(value && Math.abs(value) < 0.0995 ? 1 : 0)} %`;

const BY_UNIT = {
  s: seconds, bytes, "bytes/s": rate, share: percent, "tokens/s": (v) => `${digits(v, 4)} tokens/s`,
  nats: (v) => digits(v, 4),
};
const written = (value, unit) => (BY_UNIT[unit] || ((v) => digits(v)))(value);

/** On an axis, where the heading says what is drawn. */
const tickText = (value, unit) => ({ share: `${Math.round(1000 * value) / 10} %`, "tokens/s": count(value) })[unit] ?? written(value, unit);

const isMapping = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** Make an element: attributes by name, `style` as an object, and children that are elements or texts. */
function make(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const SVG_TAGS = new Set(["svg", "g", "path", "line", "text", "circle", "rect"]);

const tip = document.getElementById("tip");

/** Show lines near the pointer, the first in bold; nothing hides it. */
function showTip(event, lines) {
  if (!lines) { tip.hidden = true; return; }
  tip.replaceChildren(make("b", {}, lines[0]), ...lines.slice(1).map((line) => make("span", {}, ...[line].flat())));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
  tip.style.left = `${Math.max(6, left)}px`;
  tip.style.top = `${Math.max(6, Math.min(innerHeight - box.height - 6, event.clientY + 14))}px`;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const CAUSE_COLORS = {
  compute: "--c-compute", weights: "--c-weights", gradients: "--c-gradients", activations: "--c-activations",
  optimizer: "--c-optimizer", disk: "--c-disk", commit: "--c-commit", checkpoint: "--c-checkpoint",
  workers: "--c-workers", loader: "--c-loader", "between steps": "--c-between", python: "--c-python",
};
const CAUSE_TEXTS = {
  compute: "compute", weights: "weights to arrive", gradients: "gradients to move", activations: "activations to move",
  optimizer: "the optimizer", disk: "the disk", commit: "the commit of a step", checkpoint: "a checkpoint",
  workers: "another worker", loader: "the next batch", "between steps": "what happens between steps",
  python: "Python to hand out work",
};
const causeColor = (cause) => `var(${CAUSE_COLORS[cause] || "--c-python"})`;
const RUN_COLORS = ["var(--accent)", "var(--second)"];
const swatch = (fill) => make("i", { class: "swatch", style: { background: fill }, "aria-hidden": true });
