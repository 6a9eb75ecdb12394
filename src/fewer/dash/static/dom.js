// DOM helpers and formatting. Text from runs is always inserted as text, never as HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A table; a cell is text or an element, and the first cell of a row is its header. */
export function table(caption, heads, rows, numbers = false) {
  const body = rows.map(([first, ...cells]) =>
    h("tr", {}, h("th", { scope: "row" }, first), cells.map((cell) => h("td", {}, cell))));
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 },
    h("table", { class: numbers ? "numbers" : "" }, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, body)));
}

/** The value of a setting as text. */
export const formatValue = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

/** The primary metric of a run; its name too, unless it is accuracy. */
export function formatMetric({ metric, value }) {
  if (value === null || value === undefined) return "–";
  const text = metric.percent ? `${(100 * value).toFixed(2)} %` : String(Number(value.toPrecision(4)));
  return metric.name === "accuracy" ? text : `${metric.name} ${text}`;
}

const formatNumber = (value) => (value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));

export const formatPrivacy = ({ epsilon, delta }) => (epsilon === undefined ? "–" : `ε ${formatNumber(epsilon)} (δ ${delta})`);
export const formatMegabytes = (count) => (count === undefined ? "–" : `${formatNumber(count / 1e6)} MB`);

export const formatCount = (count) => count.toLocaleString("en");

export function formatDuration(seconds) {
  if (seconds === undefined) return "–";
  const total = Math.round(seconds);
  const pad = (number) => String(number).padStart(2, "0");
  if (total < 60) return `${formatNumber(seconds)} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${pad(total % 60)} s`;
  return `${Math.floor(total / 3600)} h ${pad(Math.floor((total % 3600) / 60))} min`;
}

function formatAge(timestamp) {
  const seconds = Math.max(0, Date.now() / 1000 - timestamp);
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.floor(seconds / 5) * 5} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(1000 * timestamp).toLocaleDateString("en", { year: "numeric", month: "short", day: "numeric" });
}

export const formatTime = (timestamp) => new Date(1000 * timestamp).toLocaleString("sv");

export const age = (timestamp) =>
  h("time", { datetime: new Date(1000 * timestamp).toISOString(), title: formatTime(timestamp), "data-timestamp": timestamp }, formatAge(timestamp));

setInterval(() => {
  for (const element of document.querySelectorAll("time[data-timestamp]")) element.textContent = formatAge(Number(element.dataset.timestamp));
}, 5000);

const SYMBOLS = { running: "●", starting: "◌", stopped: "■", crashed: "✕", finished: "✓", damaged: "!" };
export const STATE_TEXTS = {
  running: "a process is running it",
  starting: "a process is starting",
  stopped: "it was stopped, or could not continue",
  crashed: "its process was killed, or the machine went down",
  finished: "all rounds are done",
  damaged: "it cannot be read",
};

export const badge = (state) =>
  h("span", { class: `badge ${state}`, title: STATE_TEXTS[state] }, h("span", { "aria-hidden": "true" }, SYMBOLS[state]), ` ${state}`);

export const formatReason = (text) => (text.startsWith("KeyboardInterrupt") ? "interrupted (Ctrl-C or the Stop button)" : text);
