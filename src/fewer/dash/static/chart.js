// Line charts, drawn as SVG at their size on the screen.

import { h, svg } from "./dom.js";

const DASHES = { "-": "none", "--": "7 4", ":": "2 4", "-.": "8 4 2 4" };
const MARKERS = {
  o: "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
  s: "M-3.2-3.2h6.4v6.4h-6.4z",
  "^": "M0-4.2 4 3h-8z",
  v: "M0 4.2 4-3h-8z",
  D: "M0-4.5 4.5 0 0 4.5-4.5 0z",
  P: "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
  X: "M-4-2.2-2.2-4 0-1.8 2.2-4 4-2.2 1.8 0 4 2.2 2.2 4 0 1.8-2.2 4-4 2.2-1.8 0z",
};
const HEIGHT = 300;
const MARGIN = { left: 56, right: 16, top: 12, bottom: 44 };
const MAX_MARKERS = 40;

function setColors(element, style) {
  element.style.setProperty("--light", style.color);
  element.style.setProperty("--dark", style.dark);
  return element;
}

function drawMarker(style, x, y) {
  return setColors(svg("path", { d: MARKERS[style.marker], class: "mark", transform: `translate(${x} ${y})` }), style);
}

function drawLine(style, path) {
  return setColors(svg("path", { d: path, class: "line", "stroke-dasharray": DASHES[style.dash] }), style);
}

/** A short piece of a method's line, as in the chart. */
export function swatch(style) {
  if (!style.color) return h("span", { class: "swatch" });
  const drawing = svg("svg", { viewBox: "0 0 28 12", class: "swatch", "aria-hidden": "true" });
  drawing.append(drawLine(style, "M0 6H28"), drawMarker(style, 14, 6));
  return drawing;
}

function ticks(low, high, count) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const values = [];
  for (let index = Math.floor(low / step); values.length < 2 || (index - 1) * step < high; index += 1) values.push(Number((index * step).toPrecision(12)));
  return values;
}

const format = (value) => (Math.abs(value) >= 1e4 ? value.toLocaleString("en") : String(Number(value.toPrecision(4))));

/**
 * A chart of `series` ({label, color, marker, dash, points: [[x, y]…]}); `update` replaces them.
 * The pointer or the arrow keys select an x; the values there are shown below.
 */
export function chart({ empty }) {
  const drawing = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const figure = h("figure", { class: "chart", tabindex: 0, role: "group" }, drawing, readout);
  let content = { series: [], x: {}, y: {} };
  let scale = null;
  let selected = null;

  function draw() {
    const width = figure.clientWidth || 600;
    drawing.setAttribute("width", width);
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren();
    const all = content.series.flatMap(({ points }) => points);
    scale = null;
    if (!all.length) {
      drawing.append(svg("text", { x: width / 2, y: HEIGHT / 2, class: "empty" }, empty));
      return;
    }
    const xs = all.map(([x]) => x);
    const ys = all.map(([, y]) => y);
    const high = Math.max(...xs);
    const low = content.x.integer && Math.min(...xs) < high ? Math.min(...xs) : 0; // rounds start at the first one
    const xTicks = ticks(low, high, width < 500 ? 4 : 8).filter((tick) => tick >= low && (!content.x.integer || Number.isInteger(tick)));
    const yTicks = ticks(Math.min(...ys), Math.max(...ys), 5);
    const [right, bottom] = [width - MARGIN.right, HEIGHT - MARGIN.bottom];
    const px = (x) => MARGIN.left + ((right - MARGIN.left) * (x - low)) / (high - low || 1);
    const py = (y) => bottom - ((bottom - MARGIN.top) * (y - yTicks[0])) / (yTicks.at(-1) - yTicks[0]);
    for (const tick of yTicks) {
      drawing.append(
        svg("path", { d: `M${MARGIN.left} ${py(tick)}H${right}`, class: "grid" }),
        svg("text", { x: MARGIN.left - 8, y: py(tick) + 4, class: "up" }, format(tick)),
      );
    }
    for (const tick of xTicks.filter((value) => value <= high * 1.001)) {
      drawing.append(svg("text", { x: px(tick), y: bottom + 18, class: "across" }, format(tick)));
    }
    drawing.append(
      svg("path", { d: `M${MARGIN.left} ${bottom}H${right}`, class: "axis" }),
      svg("text", { x: (MARGIN.left + right) / 2, y: HEIGHT - 6, class: "across" }, content.x.title),
      svg("text", { transform: `translate(13 ${(MARGIN.top + bottom) / 2}) rotate(-90)`, class: "across" }, content.y.title),
    );
    for (const line of content.series) {
      const path = line.points.map(([x, y], index) => `${index ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
      drawing.append(drawLine(line, path));
      const marked = line.points.length > MAX_MARKERS ? line.points.slice(-1) : line.points;
      drawing.append(...marked.map(([x, y]) => drawMarker(line, px(x), py(y))));
    }
    const positions = [...new Set(xs)].sort((a, b) => a - b);
    const cursor = svg("path", { class: "cursor", d: "" });
    drawing.append(cursor);
    scale = { px, positions, cursor, top: MARGIN.top, bottom, left: MARGIN.left, span: right - MARGIN.left, low, high };
    select(selected);
  }

  function select(index) {
    selected = index;
    if (index === null || !scale) {
      readout.textContent = "";
      scale?.cursor.setAttribute("d", "");
      return;
    }
    selected = Math.max(0, Math.min(scale.positions.length - 1, index));
    const x = scale.positions[selected];
    scale.cursor.setAttribute("d", `M${scale.px(x)} ${scale.top}V${scale.bottom}`);
    const values = content.series
      .map(({ label, points }) => [label, points.findLast(([pointX]) => pointX <= x)?.[1]])
      .filter(([, y]) => y !== undefined)
      .map(([label, y]) => `${content.series.length > 1 ? `${label} ` : ""}${format(y)}${content.y.unit}`);
    readout.textContent = `${content.x.name} ${format(x)}: ${values.join(", ")}`;
  }

  figure.addEventListener("pointermove", (event) => {
    if (!scale) return;
    const x = ((event.clientX - drawing.getBoundingClientRect().left - scale.left) / scale.span) * (scale.high - scale.low) + scale.low;
    const distances = scale.positions.map((position) => Math.abs(position - x));
    select(distances.indexOf(Math.min(...distances)));
  });
  figure.addEventListener("pointerleave", () => select(null));
  figure.addEventListener("blur", () => select(null));
  figure.addEventListener("keydown", (event) => {
    const last = scale ? scale.positions.length - 1 : 0;
    const target = { ArrowLeft: (selected ?? last + 1) - 1, ArrowRight: (selected ?? -1) + 1, Home: 0, End: last }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    select(target);
  });
  new ResizeObserver(draw).observe(figure);
  return {
    element: figure,
    update(series, x, y) {
      content = { series: series.filter(({ points }) => points.length), x, y };
      const ends = content.series.map(({ label, points }) => `${label} ${format(points.at(-1)[1])}${y.unit}`).join(", ");
      figure.setAttribute("aria-label", `Line chart of ${y.name} by ${x.name}. ${ends ? `Last: ${ends}.` : empty} Use the arrow keys to read values.`);
      draw();
    },
  };
}

const X = {
  round: { name: "round", title: "round", integer: true, value: (point) => point.round },
  megabyte: { name: "megabyte", title: "MB sent, up and down", value: (point) => (point.up + point.down) / 1e6 },
  second: { name: "second", title: "seconds", value: (point) => point.seconds },
};
const Y = {
  metric: ({ name, percent }) => ({
    name, title: percent ? `${name} %` : name, unit: percent ? " %" : "", value: (point) => point.value, factor: percent ? 100 : 1,
  }),
  loss: () => ({ name: "loss", title: "loss", unit: "", value: (point) => point.loss, factor: 1 }),
};
const ACCURACY = { name: "accuracy", percent: true };

function choice(legend, name, options, chosen, onChoice) {
  return h("fieldset", { class: "choice" }, h("legend", {}, legend), Object.keys(options).map((option) =>
    h("label", {}, h("input", { type: "radio", name, value: option, checked: option === chosen, onchange: () => onChoice(option) }), option)));
}

/** A chart of runs with a choice of both axes. `update` takes [{label, color, marker, dash, points: metrics by round}]. */
export function curves() {
  const lineChart = chart({ empty: "No round has been evaluated yet." });
  const chosen = { x: "round", y: "metric" };
  let runs = [];
  const show = () => {
    const [x, y] = [X[chosen.x], Y[chosen.y](runs[0]?.metric ?? ACCURACY)];
    lineChart.update(runs.map((run) => ({
      ...run,
      points: run.points
        .filter((point) => Number.isFinite(x.value(point)) && Number.isFinite(y.value(point)))
        .map((point) => [x.value(point), y.factor * y.value(point)]),
    })), x, y);
  };
  const change = (axis) => (value) => { chosen[axis] = value; show(); };
  return {
    element: h("div", {}, h("div", { class: "choices" }, choice("Show", "y", Y, chosen.y, change("y")),
      choice("by", "x", X, chosen.x, change("x"))), lineChart.element),
    update(next) { runs = next; show(); },
  };
}
