// Line charts, drawn as SVG at the size they have on the screen.

import { h, svg } from "./dom.js";

const DASHES = { "-": "none", "--": "7 4", ":": "2 4", "-.": "8 4 2 4" };
const MARKS = {
  o: "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
  s: "M-3.2-3.2h6.4v6.4h-6.4z",
  "^": "M0-4.2 4 3h-8z",
  v: "M0 4.2 4-3h-8z",
  D: "M0-4.5 4.5 0 0 4.5-4.5 0z",
  P: "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
  X: "M-4-2.2-2.2-4 0-1.8 2.2-4 4-2.2 1.8 0 4 2.2 2.2 4 0 1.8-2.2 4-4 2.2-1.8 0z",
};
const HEIGHT = 300;
const EDGE = { left: 56, right: 16, top: 12, bottom: 44 };
const CROWDED = 40;

function inked(drawn, look) {
  drawn.style.setProperty("--light", look.color);
  drawn.style.setProperty("--dark", look.dark);
  return drawn;
}

function mark(look, x, y) {
  return inked(svg("path", { d: MARKS[look.marker], class: "mark", transform: `translate(${x} ${y})` }), look);
}

function stroke(look, path) {
  return inked(svg("path", { d: path, class: "line", "stroke-dasharray": DASHES[look.dash] }), look);
}

/** A piece of a line, as in the chart: by it a method is known everywhere. */
export function swatch(look) {
  if (!look.color) return h("span", { class: "swatch" });
  const drawn = svg("svg", { viewBox: "0 0 28 12", class: "swatch", "aria-hidden": "true" });
  drawn.append(stroke(look, "M0 6H28"), mark(look, 14, 6));
  return drawn;
}

function steps(low, high, count) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  const found = [];
  for (let at = Math.floor(low / step); found.length < 2 || (at - 1) * step < high; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

const short = (value) => (Math.abs(value) >= 1e4 ? value.toLocaleString("en") : String(Number(value.toPrecision(4))));

/**
 * A chart of `series` ({label, color, marker, dash, points: [[x, y]…]}); `update` draws others in its place.
 * With the pointer, or the arrow keys, the values at one x are read out below.
 */
export function chart({ empty }) {
  const drawing = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const figure = h("figure", { class: "chart", tabindex: 0, role: "group" }, drawing, readout);
  let now = { series: [], x: {}, y: {} };
  let scale = null;
  let at = null;

  function draw() {
    const width = figure.clientWidth || 600;
    drawing.setAttribute("width", width);
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren();
    const all = now.series.flatMap((one) => one.points);
    scale = null;
    if (!all.length) {
      drawing.append(svg("text", { x: width / 2, y: HEIGHT / 2, class: "empty" }, empty));
      return;
    }
    const xs = all.map(([x]) => x);
    const ys = all.map(([, y]) => y);
    const high = Math.max(...xs);
    const across = steps(0, high, width < 500 ? 4 : 8).filter((each) => !now.x.whole || Number.isInteger(each));
    const up = steps(Math.min(...ys), Math.max(...ys), 5);
    const [right, bottom] = [width - EDGE.right, HEIGHT - EDGE.bottom];
    const px = (x) => EDGE.left + ((right - EDGE.left) * x) / (high || 1);
    const py = (y) => bottom - ((bottom - EDGE.top) * (y - up[0])) / (up.at(-1) - up[0]);
    for (const each of up) {
      drawing.append(
        svg("path", { d: `M${EDGE.left} ${py(each)}H${right}`, class: "grid" }),
        svg("text", { x: EDGE.left - 8, y: py(each) + 4, class: "up" }, short(each)),
      );
    }
    for (const each of across.filter((one) => one <= high * 1.001)) {
      drawing.append(svg("text", { x: px(each), y: bottom + 18, class: "across" }, short(each)));
    }
    drawing.append(
      svg("path", { d: `M${EDGE.left} ${bottom}H${right}`, class: "axis" }),
      svg("text", { x: (EDGE.left + right) / 2, y: HEIGHT - 6, class: "across" }, now.x.title),
      svg("text", { transform: `translate(13 ${(EDGE.top + bottom) / 2}) rotate(-90)`, class: "across" }, now.y.title),
    );
    for (const one of now.series) {
      const path = one.points.map(([x, y], place) => `${place ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
      drawing.append(stroke(one, path));
      const marked = one.points.length > CROWDED ? one.points.slice(-1) : one.points;
      drawing.append(...marked.map(([x, y]) => mark(one, px(x), py(y))));
    }
    const places = [...new Set(xs)].sort((a, b) => a - b);
    const cursor = svg("path", { class: "cursor", d: "" });
    drawing.append(cursor);
    scale = { px, places, cursor, top: EDGE.top, bottom, left: EDGE.left, span: right - EDGE.left, high };
    read(at);
  }

  function read(place) {
    at = place;
    if (place === null || !scale) {
      readout.textContent = "";
      scale?.cursor.setAttribute("d", "");
      return;
    }
    at = Math.max(0, Math.min(scale.places.length - 1, place));
    const x = scale.places[at];
    scale.cursor.setAttribute("d", `M${scale.px(x)} ${scale.top}V${scale.bottom}`);
    const values = now.series
      .map((one) => [one.label, one.points.findLast(([each]) => each <= x)?.[1]])
      .filter(([, y]) => y !== undefined)
      .map(([label, y]) => `${now.series.length > 1 ? `${label} ` : ""}${short(y)}${now.y.unit}`);
    readout.textContent = `${now.x.name} ${short(x)}: ${values.join(", ")}`;
  }

  figure.addEventListener("pointermove", (event) => {
    if (!scale) return;
    const x = ((event.clientX - drawing.getBoundingClientRect().left - scale.left) / scale.span) * scale.high;
    const distances = scale.places.map((each) => Math.abs(each - x));
    read(distances.indexOf(Math.min(...distances)));
  });
  figure.addEventListener("pointerleave", () => read(null));
  figure.addEventListener("blur", () => read(null));
  figure.addEventListener("keydown", (event) => {
    const last = scale ? scale.places.length - 1 : 0;
    const to = { ArrowLeft: (at ?? last + 1) - 1, ArrowRight: (at ?? -1) + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    read(to);
  });
  new ResizeObserver(draw).observe(figure);
  return {
    element: figure,
    update(series, x, y) {
      now = { series: series.filter((one) => one.points.length), x, y };
      const ends = now.series.map((one) => `${one.label} ${short(one.points.at(-1)[1])}${y.unit}`).join(", ");
      figure.setAttribute("aria-label", `Line chart of ${y.name} by ${x.name}. ${ends ? `Last: ${ends}.` : empty} Arrow keys read values.`);
      draw();
    },
  };
}

const X = {
  round: { name: "round", title: "round", whole: true, of: (point) => point.round },
  megabyte: { name: "megabyte", title: "MB sent, both ways", of: (point) => (point.up + point.down) / 1e6 },
  second: { name: "second", title: "seconds", of: (point) => point.seconds },
};
const Y = {
  accuracy: { name: "accuracy", title: "accuracy %", unit: " %", of: (point) => point.accuracy, factor: 100 },
  loss: { name: "loss", title: "loss", unit: "", of: (point) => point.loss, factor: 1 },
};

function choice(legend, name, options, chosen, changed) {
  return h("fieldset", { class: "choice" }, h("legend", {}, legend), Object.keys(options).map((each) =>
    h("label", {}, h("input", { type: "radio", name, value: each, checked: each === chosen, onchange: () => changed(each) }), each)));
}

/** A chart of runs with a choice of what is drawn by what. `update` takes [{label, look…, points: figures by round}]. */
export function curves() {
  const drawn = chart({ empty: "No round has been measured yet." });
  const chosen = { x: "round", y: "accuracy" };
  let runs = [];
  const show = () => {
    const [x, y] = [X[chosen.x], Y[chosen.y]];
    drawn.update(runs.map((run) => ({
      ...run,
      points: run.points
        .filter((point) => Number.isFinite(x.of(point)) && Number.isFinite(y.of(point)))
        .map((point) => [x.of(point), y.factor * y.of(point)]),
    })), x, y);
  };
  const change = (axis) => (value) => { chosen[axis] = value; show(); };
  return {
    element: h("div", {}, h("div", { class: "choices" }, choice("Show", "y", Y, chosen.y, change("y")),
      choice("by", "x", X, chosen.x, change("x"))), drawn.element),
    update(next) { runs = next; show(); },
  };
}
