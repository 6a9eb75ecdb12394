// Elements and words. Text from runs is only ever put in as text.

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

/** Rows under heads; a cell is text or an element, and the first of a row is its head. */
export function table(caption, heads, rows, numbers = false) {
  const body = rows.map(([first, ...cells]) =>
    h("tr", {}, h("th", { scope: "row" }, first), cells.map((cell) => h("td", {}, cell))));
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 },
    h("table", { class: numbers ? "numbers" : "" }, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, body)));
}

/** A setting's value as text. */
export const plain = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(2)} %`);

const digits = (value) => (value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));

export const megabytes = (count) => (count === undefined ? "–" : `${digits(count / 1e6)} MB`);

export const whole = (count) => count.toLocaleString("en");

export function duration(seconds) {
  if (seconds === undefined) return "–";
  const all = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (all < 60) return `${digits(seconds)} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${two(all % 60)} s`;
  return `${Math.floor(all / 3600)} h ${two(Math.floor((all % 3600) / 60))} min`;
}

export function ago(stamp) {
  const seconds = Math.max(0, Date.now() / 1000 - stamp);
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.floor(seconds / 5) * 5} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(1000 * stamp).toLocaleDateString("en", { year: "numeric", month: "short", day: "numeric" });
}

export const clock = (stamp) => new Date(1000 * stamp).toLocaleString("sv");

export const since = (stamp) =>
  h("time", { datetime: new Date(1000 * stamp).toISOString(), title: clock(stamp), "data-stamp": stamp }, ago(stamp));

setInterval(() => {
  for (const each of document.querySelectorAll("time[data-stamp]")) each.textContent = ago(Number(each.dataset.stamp));
}, 5000);

const SIGNS = { running: "●", starting: "◌", stopped: "■", broken: "✕", finished: "✓", damaged: "!" };
export const MEANINGS = {
  running: "a process is at it",
  starting: "a process is being started",
  stopped: "it was stopped, or could not go on",
  broken: "its process ended without a word: killed, or the machine went down",
  finished: "all rounds are done",
  damaged: "it cannot be read",
};

export const badge = (state) =>
  h("span", { class: `badge ${state}`, title: MEANINGS[state] }, h("span", { "aria-hidden": "true" }, SIGNS[state]), ` ${state}`);

export const reason = (text) => (text.startsWith("KeyboardInterrupt") ? "interrupted (Ctrl-C, or the stop button)" : text);
