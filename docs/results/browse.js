// The page docs/results/browse.md: filters, a scatter plot and a table of the points in points.js.
(() => {
  "use strict";

  const AXES = { rounds: "rounds", mb: "MB, up and down", gflop: "GFLOP of all clients", epsilon: "ε" };
  const known = Object.keys(AXES).filter((name) => points.some((point) => point[name] !== null));
  const LISTS = { method: "Methods", data: "Data" };
  const COLUMNS = {
    row: "row", method: "method", data: "data", column: "column", accuracy: "accuracy, %", paper: "paper, %",
    ...Object.fromEntries(known.map((name) => [name, name === "mb" ? "MB" : name === "gflop" ? "GFLOP" : AXES[name]])),
    seeds: "seeds",
  };
  const TEXTS = ["row", "method", "data", "column"];
  const COLORS = 7; // .browse-0 … .browse-6 in site.css; all others are gray
  const SHAPES = [
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.6-3.6h7.2v7.2h-7.2z", "M0-4.8 4.6 3.4h-9.2z", "M0-5 5 0 0 5-5 0z",
    "M0 4.8 4.6-3.4h-9.2z", "M-1.6-4.8h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2v-3.2h-3.2v-3.2h3.2z",
    "M-4.6-2.5-2.5-4.6 0-2.1 2.5-4.6 4.6-2.5 2.1 0 4.6 2.5 2.5 4.6 0 2.1-2.5 4.6-4.6 2.5-2.1 0z",
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
  ];
  const HEIGHT = 380, LEFT = 52, RIGHT = 16, TOP = 12, BOTTOM = 44, ZERO = 26;

  // --- elements -------------------------------------------------------------------------------------------------

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }
  const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const format = (value) => (value === null ? "–" : value >= 1e4 ? Math.round(value).toLocaleString("en") : String(value));
  const uniques = (name) => [...new Set(points.map((point) => point[name]))].sort();

  // --- what is shown: kept in the address, so that a view can be linked ------------------------------------------

  const DEFAULTS = { x: "mb", color: "data", sort: "accuracy", order: "down", text: "", method: "", data: "" };
  const state = { ...DEFAULTS, ...Object.fromEntries(known.map((name) => [`max_${name}`, ""])) };
  const names = Object.keys(state);
  let shown = [], selected = null, width = 820;

  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const name of names) state[name] = given.get(name) ?? DEFAULTS[name] ?? "";
    if (!known.includes(state.x)) state.x = DEFAULTS.x;
    if (!(state.color in LISTS)) state.color = DEFAULTS.color;
    if (!(state.sort in COLUMNS)) state.sort = DEFAULTS.sort;
  }

  function writeAddress() {
    const changed = names.filter((name) => state[name] !== (DEFAULTS[name] ?? ""));
    const hash = new URLSearchParams(changed.map((name) => [name, state[name]])).toString();
    history.replaceState(null, "", hash ? `#${hash}` : location.href.split("#")[0]);
  }

  const chosen = (name) => new Set(state[name].split(",").filter(Boolean));

  function matches(point) {
    for (const name of Object.keys(LISTS)) if (state[name] && !chosen(name).has(point[name])) return false;
    for (const name of known) {
      const limit = state[`max_${name}`];
      if (limit !== "" && (point[name] === null || point[name] > Number(limit))) return false;
    }
    const text = TEXTS.map((name) => point[name]).concat(point.result).join(" ").toLowerCase();
    return state.text.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  /** Orders points by a column; missing values come last in both directions. */
  function compare(one, other) {
    const a = one[state.sort], b = other[state.sort], sign = state.order === "up" ? 1 : -1;
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (TEXTS.includes(state.sort) ? a.localeCompare(b) : a - b);
  }

  // --- filters --------------------------------------------------------------------------------------------------

  const set = (name) => (event) => { state[name] = event.target.value; update(); };
  const field = (label, control) => h("label", { class: "browse-field" }, h("span", {}, label), control);
  const select = (name, options) =>
    h("select", { name, onchange: set(name) }, ...Object.entries(options).map(([value, text]) => h("option", { value }, text)));

  function checklist(name, title) {
    const boxes = uniques(name).map((value) => {
      const box = h("input", { type: "checkbox", value, onchange: () => {
        state[name] = boxes.filter((other) => other.firstChild.checked).map((other) => other.firstChild.value).join(",");
        update();
      } });
      return h("label", {}, box, ` ${value}`);
    });
    const heading = h("summary", {}, title);
    const list = h("details", { class: "browse-list", name: "browse-list" }, heading, h("div", {}, ...boxes));
    list.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { list.open = false; heading.focus(); }
    });
    list.show = () => {
      const values = chosen(name);
      for (const label of boxes) label.firstChild.checked = values.has(label.firstChild.value);
      heading.textContent = `${title}: ${values.size === 0 ? "all" : values.size <= 2 ? [...values].join(", ") : values.size}`;
    };
    return list;
  }

  const lists = Object.entries(LISTS).map(([name, title]) => checklist(name, title));
  const controls = {
    text: h("input", { type: "search", name: "text", oninput: set("text"), placeholder: "row, column, result" }),
    x: select("x", Object.fromEntries(known.map((name) => [name, AXES[name]]))),
    color: select("color", { data: "data", method: "method" }),
  };
  for (const name of known)
    controls[`max_${name}`] = h("input", { type: "number", name: `max_${name}`, min: 0, step: "any", oninput: set(`max_${name}`) });
  const reset = h("button", { type: "button", onclick: () => { Object.assign(state, Object.fromEntries(names.map((name) => [name, DEFAULTS[name] ?? ""]))); update(); } }, "Reset");
  const count = h("p", { class: "browse-count", role: "status" });
  const form = h("form", { class: "browse-form", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
    ...lists,
    field("Contains", controls.text),
    ...known.map((name) => field(`${COLUMNS[name]} ≤`, controls[`max_${name}`])),
    field("x-axis", controls.x), field("Color", controls.color), reset);

  // --- the plot -------------------------------------------------------------------------------------------------

  const drawing = svg("svg", { height: HEIGHT, "aria-hidden": "true" });
  const legend = h("ul", { class: "browse-legend" });
  const readout = h("div", { class: "browse-readout", "aria-live": "polite" });
  const plot = h("div", {
    class: "browse-plot", tabindex: 0, role: "group", onkeydown: moveSelection,
    "aria-label": "Scatter plot. Arrow keys select a point, Enter opens its page.",
  }, drawing);

  function ticks(low, high, number = 6) {
    const rough = (high - low || 1) / number, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const values = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) values.push(Number((i * step).toPrecision(12)));
    return values;
  }

  /** A scale from values to pixels, logarithmic if values differ a lot; zeros then have their own place at the left. */
  function scaleX(values) {
    const positive = values.filter((value) => value > 0);
    const low = Math.min(...positive), high = Math.max(...positive);
    if (positive.length && high / low > 30) {
      const start = LEFT + (positive.length < values.length ? ZERO : 0) + 10, span = width - RIGHT - 10 - start;
      const place = (value) => value <= 0 ? LEFT + 10 : start + span * Math.log(value / low) / Math.log(high / low);
      const marks = [];
      const steps = high / low > 1e4 || width < 500 ? [1] : high / low > 300 ? [1, 3] : [1, 2, 5];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
        for (const step of steps) marks.push(Number((step * 10 ** power).toPrecision(3)));
      return { place, marks: [...(start > LEFT + 10 ? [0] : []), ...marks.filter((mark) => mark >= low && mark <= high)] };
    }
    const top = Math.max(...values, 0) || 1;
    return { place: (value) => LEFT + 10 + (width - RIGHT - LEFT - 20) * value / top, marks: ticks(0, top, width < 500 ? 4 : 6) };
  }

  function draw() {
    const plotted = shown.filter((point) => point[state.x] !== null);
    drawing.replaceChildren();
    legend.replaceChildren();
    if (!plotted.length) {
      drawing.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "No points match."));
      return;
    }
    const sizes = new Map();
    for (const point of plotted) sizes.set(point[state.color], (sizes.get(point[state.color]) ?? 0) + 1);
    const groups = [...sizes.keys()].sort((a, b) => sizes.get(b) - sizes.get(a) || a.localeCompare(b));
    const style = (point) => Math.min(groups.indexOf(point[state.color]), COLORS);

    const { place, marks } = scaleX(plotted.map((point) => point[state.x]));
    const accuracies = plotted.map((point) => point.accuracy);
    const margin = Math.max(1, (Math.max(...accuracies) - Math.min(...accuracies)) * 0.05);
    const low = Math.max(0, Math.min(...accuracies) - margin), high = Math.min(100, Math.max(...accuracies) + margin);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low);
    const bottom = HEIGHT - BOTTOM;
    for (const mark of ticks(low, high))
      drawing.append(svg("path", { class: "grid", d: `M${LEFT} ${y(mark)}H${width - RIGHT}` }),
        svg("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, format(mark)));
    for (const mark of marks)
      drawing.append(svg("path", { class: "grid", d: `M${place(mark)} ${TOP}V${bottom}` }),
        svg("text", { x: place(mark), y: bottom + 18, "text-anchor": "middle" }, format(mark)));
    drawing.append(
      svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, AXES[state.x]),
      svg("text", { transform: `translate(12 ${(TOP + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "accuracy, %"));
    for (const point of [...plotted].sort((a, b) => style(b) - style(a))) {
      const at = `translate(${place(point[state.x]).toFixed(1)} ${y(point.accuracy).toFixed(1)})`;
      point.mark = svg("path", { class: `mark browse-${style(point)}`, d: SHAPES[style(point)], transform: at, onclick: () => choose(point) },
        svg("title", {}, describe(point)));
      drawing.append(point.mark);
    }
    const listed = groups.slice(0, COLORS).concat(groups.length > COLORS ? [`${groups.length - COLORS} others`] : []);
    legend.append(...listed.map((name, index) => h("li", {}, svg("svg", { viewBox: "-6 -6 12 12", "aria-hidden": "true" },
      svg("path", { class: `mark browse-${index}`, d: SHAPES[index] })), name)));
  }

  const describe = (point) => `${point.row} on ${point.data}, ${point.column}: ${point.text} %`;

  function links(point) {
    const page = h("a", { href: `${point.result}.html` }, "page"), json = h("a", { href: `${point.result}.json` }, "JSON");
    for (const link of [page, json]) link.setAttribute("aria-label", `${link.textContent} of ${point.row}, ${point.column}, ${point.result}`);
    return [page, " ", json];
  }

  function choose(point) {
    selected = point;
    for (const mark of drawing.querySelectorAll(".chosen")) mark.classList.remove("chosen");
    if (!point?.mark) { readout.replaceChildren(h("p", {}, "Click a point, or select one with the arrow keys.")); return; }
    point.mark.classList.add("chosen");
    drawing.append(point.mark); // on top of the others
    const costs = known.filter((name) => point[name] !== null).map((name) => `${format(point[name])} ${COLUMNS[name]}`);
    const paper = point.paper === null ? "" : ` (paper: ${point.paper})`;
    readout.replaceChildren(
      h("p", {}, h("strong", {}, describe(point)), `${paper}, ${costs.join(", ")}, ${point.seeds} ${point.seeds === 1 ? "seed" : "seeds"}. `, ...links(point)),
      h("pre", {}, h("code", {}, commands[point.result])));
  }

  /** Arrow keys go through the points from left to right, or from top to bottom. */
  function moveSelection(event) {
    if (event.key === "Enter" && selected) { location.href = `${selected.result}.html`; return; }
    const steps = { ArrowRight: ["x", 1], ArrowLeft: ["x", -1], ArrowUp: ["y", 1], ArrowDown: ["y", -1], Home: ["x", 0], End: ["x", 0] };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [axis, step] = steps[event.key];
    const key = (point) => (axis === "x" ? [point[state.x], point.accuracy] : [point.accuracy, point[state.x]]);
    const order = shown.filter((point) => point[state.x] !== null).sort((a, b) => key(a)[0] - key(b)[0] || key(a)[1] - key(b)[1]);
    if (!order.length) return;
    const now = order.indexOf(selected);
    const next = event.key === "End" ? order.length - 1 : step === 0 || now < 0 ? 0 : now + step;
    choose(order[Math.max(0, Math.min(order.length - 1, next))]);
  }

  // --- the table ------------------------------------------------------------------------------------------------

  const titles = Object.entries(COLUMNS).map(([name, title]) => {
    const button = h("button", { type: "button", onclick: () => {
      const fresh = TEXTS.includes(name) ? "up" : "down";
      state.order = state.sort !== name ? fresh : state.order === "up" ? "down" : "up";
      state.sort = name;
      update();
    } }, title);
    return h("th", { scope: "col", "data-name": name, class: TEXTS.includes(name) ? null : "number" }, button);
  });
  const body = h("tbody");
  const table = h("div", { class: "browse-scroll", tabindex: 0, role: "region", "aria-label": "Table of results" },
    h("table", { class: "browse-table" }, h("thead", {}, h("tr", {}, ...titles, h("th", { scope: "col" }, h("strong", {}, "links")))), body));

  function fillTable() {
    for (const title of titles) {
      if (title.dataset.name === state.sort) title.setAttribute("aria-sort", state.order === "up" ? "ascending" : "descending");
      else title.removeAttribute("aria-sort");
    }
    body.replaceChildren(...shown.map((point) => h("tr", {},
      ...Object.keys(COLUMNS).map((name) => {
        const text = name === "accuracy" ? point.text : TEXTS.includes(name) ? point[name] : format(point[name]);
        return h("td", { class: TEXTS.includes(name) ? null : "number" }, text);
      }),
      h("td", { class: "links" }, ...links(point), h("details", {}, h("summary", {}, "command"), h("code", {}, commands[point.result]))))));
  }

  // --- together -------------------------------------------------------------------------------------------------

  function update() {
    writeAddress();
    show();
  }

  function show() {
    shown = points.filter(matches).sort(compare);
    for (const list of lists) list.show();
    for (const [name, control] of Object.entries(controls)) if (control !== document.activeElement) control.value = state[name];
    const missing = shown.filter((point) => point[state.x] === null).length;
    count.textContent = `${shown.length} of ${points.length} results` + (missing ? `; ${missing} without ${COLUMNS[state.x]} are only in the table` : "");
    for (const point of points) point.mark = null;
    draw();
    choose(shown.includes(selected) ? selected : null);
    fillTable();
  }

  document.getElementById("browse").append(form, count, plot, legend, readout, table);
  window.addEventListener("hashchange", () => { readAddress(); show(); });
  readAddress();
  show();
  new ResizeObserver(() => {
    if (plot.clientWidth && plot.clientWidth !== width) { width = plot.clientWidth; draw(); choose(selected); }
  }).observe(plot);
})();
