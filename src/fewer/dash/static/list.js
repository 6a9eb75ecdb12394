// The list of runs: filtered, sorted, in pages. Rows update in place while runs progress.

import { follow, navigate, request } from "./app.js";
import { swatch } from "./chart.js";
import { age, badge, formatCount, formatDuration, formatMegabytes, formatMetric, h, STATE_TEXTS } from "./dom.js";

const LIMIT = 50;
const selected = new Map(); // runs to compare, by id, across all pages

const COLUMNS = [
  ["name", "run", ""],
  ["method", "method", "wide"],
  [null, "data", "wide"],
  [null, "state", ""],
  [null, "round", ""],
  ["metric", "metric", "number"],
  ["bytes", "sent", "number wide"],
  ["seconds", "time", "number wide"],
  ["changed", "changed", "wide"],
];

export async function createListView(query) {
  const settings = {
    find: query.get("find") ?? "",
    state: query.get("state") ?? "",
    sort: query.get("sort") ?? "changed",
    down: query.get("down") ?? "1",
    from: Number(query.get("from") ?? 0) || 0,
  };
  const load = () => request(`runs?${new URLSearchParams({ ...settings, limit: LIMIT })}`);
  let page = await load();
  const rows = new Map();

  const address = (changes) => {
    const next = new URLSearchParams();
    for (const [name, value] of Object.entries({ ...settings, from: 0, ...changes })) {
      if (value && !(name === "sort" && value === "changed") && !(name === "down" && value === "1")) next.set(name, value);
    }
    return `/?${next}`.replace(/\?$/, "");
  };

  const show = h("button", { class: "plain", onclick: reload, hidden: true });
  const updates = h("p", { class: "updates", role: "status" }, show);
  const body = h("tbody", {});
  const pages = h("nav", { class: "pages", "aria-label": "Pages" });
  const compare = h("a", { class: "button" });
  const states = h("select", { id: "state", onchange: (event) => navigate(address({ state: event.target.value })) });
  const search = h("input", { id: "find", type: "search", value: settings.find, placeholder: "method, data, name …" });
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      settings.find = search.value;
      settings.from = 0;
      history.replaceState(null, "", address({}));
      await reload();
    }, 200);
  });

  function showStates() {
    const options = [["", `all (${formatCount(page.total)})`], ...Object.entries(page.counts)
      .filter(([state, number]) => number || state === settings.state)
      .map(([state, number]) => [state, `${state} (${formatCount(number)})`])];
    states.replaceChildren(...options.map(([value, text]) =>
      h("option", { value, selected: value === settings.state, title: STATE_TEXTS[value] }, text)));
  }

  function showSelection() {
    const ids = [...selected.keys()];
    compare.textContent = ids.length ? `Compare ${ids.length}` : "Compare …";
    compare.setAttribute("aria-disabled", !ids.length);
    if (ids.length) {
      compare.href = `/?compare=${ids.join(",")}`;
      compare.removeAttribute("title");
    } else {
      compare.removeAttribute("href");
      compare.title = "Select runs in the list first";
    }
    clear.hidden = !ids.length;
  }
  const clear = h("button", { class: "plain", onclick: () => {
    selected.clear();
    for (const box of body.querySelectorAll("input")) box.checked = false;
    showSelection();
  } }, "Clear selection");

  function createRow(row) {
    const checkbox = h("input", { type: "checkbox", checked: selected.has(row.id), "aria-label": `Compare ${row.name}`,
      disabled: row.state === "damaged", onchange: (event) => {
        if (event.target.checked) selected.set(row.id, row);
        else selected.delete(row.id);
        showSelection();
      } });
    const cells = COLUMNS.map(([, head, kind]) => h(head === "run" ? "th" : "td", { class: kind || null, scope: head === "run" ? "row" : null }));
    const element = h("tr", {}, h("td", { class: "tick" }, checkbox), cells);
    const [last, ...folders] = row.name.split("/").reverse();
    const folder = folders.reverse().join("/");
    const link = h("a", { href: `/?run=${row.id}`, class: "open", "aria-label": row.name }, last);
    const subline = h("span", { class: "subline narrow" });
    cells[0].append(link, subline, folder ? h("span", { class: "subline folder" }, `in ${folder}`) : "");
    const update = (now) => {
      const sent = now.up === undefined ? undefined : now.up + now.down;
      subline.replaceChildren(swatch(now), ` ${now.method}, ${now.data}`);
      cells[1].replaceChildren(swatch(now), ` ${now.method}`);
      cells[2].replaceChildren(now.clients ? `${now.data}, ${formatCount(now.clients)} clients` : now.data);
      cells[3].replaceChildren(badge(now.state));
      cells[4].replaceChildren(now.rounds ? progress(now) : "–");
      cells[5].replaceChildren(formatMetric(now));
      cells[6].replaceChildren(formatMegabytes(sent));
      cells[7].replaceChildren(formatDuration(now.seconds));
      cells[8].replaceChildren(age(now.changed));
    };
    update(row);
    return { element, update };
  }

  function fill() {
    rows.clear();
    for (const row of page.rows) rows.set(row.id, createRow(row));
    body.replaceChildren(...[...rows.values()].map(({ element }) => element));
    if (!page.rows.length) {
      const text = page.total ? "No matching runs." : `No runs under ${page.root} yet. Start one with: fewer run fedavg`;
      body.append(h("tr", {}, h("td", { colspan: COLUMNS.length + 1, class: "none" }, text)));
    }
    const last = Math.min(settings.from + LIMIT, page.matches);
    const turn = (text, from, enabled) => enabled ? h("a", { href: address({ from }) }, text) : h("span", { class: "off" }, text);
    pages.replaceChildren(turn("Newer", Math.max(0, settings.from - LIMIT), settings.from > 0),
      h("span", {}, page.matches ? `${formatCount(settings.from + 1)} to ${formatCount(last)} of ${formatCount(page.matches)}` : "none"),
      turn("Older", settings.from + LIMIT, last < page.matches));
    if (settings.sort !== "changed") for (const [index, text] of [[0, "Previous"], [2, "Next"]]) pages.children[index].textContent = text;
    showStates();
    showSelection();
    show.hidden = true;
  }

  async function reload() {
    page = await load();
    fill();
    follow(page.rows.map((row) => row.id));
  }

  const heads = COLUMNS.map(([sort, head, kind]) => {
    const active = sort && settings.sort === sort;
    const down = active ? settings.down !== "1" : !["name", "method"].includes(sort);
    const order = active ? (settings.down === "1" ? "descending" : "ascending") : sort ? "none" : null;
    const arrow = active ? (settings.down === "1" ? " ↓" : " ↑") : "";
    const content = sort ? h("a", { href: address({ sort, down: down ? "1" : "0" }) }, head, h("span", { "aria-hidden": "true" }, arrow)) : head;
    return h("th", { scope: "col", class: kind || null, "aria-sort": order }, content);
  });
  body.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = step && event.target.closest("tr");
    const next = row && (step > 0 ? row.nextElementSibling : row.previousElementSibling);
    if (!step || !next) return;
    event.preventDefault();
    next.querySelector(event.target.type === "checkbox" ? "input" : "a.open")?.focus();
  });

  return {
    title: "Runs",
    elements: [
      h("h1", {}, "Runs"),
      h("p", { class: "root" }, page.root, page.read_only ? " (read-only)" : ""),
      h("div", { class: "tools" },
        h("span", { class: "field" }, h("label", { for: "find" }, "Search"), search),
        h("span", { class: "field" }, h("label", { for: "state" }, "State"), states),
        h("span", { class: "grow" }), clear, compare),
      updates,
      h("table", { class: "runs" }, h("caption", { class: "hidden" }, "Runs. Use the arrow keys to move between them."),
        h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "tick" }, h("span", { class: "hidden" }, "compare")), heads)), body),
      pages,
    ],
    onStart() {
      fill();
      follow(page.rows.map((row) => row.id));
    },
    onChange(message) {
      for (const row of message.rows) rows.get(row.id)?.update(row);
      const more = Math.max(message.discovered - page.discovered, message.total - page.total);
      const same = JSON.stringify(message.counts) === JSON.stringify(page.counts);
      page.counts = message.counts;
      show.hidden = more <= 0 && message.total === page.total;
      show.textContent = more > 0 ? `Show ${formatCount(more)} new ${more === 1 ? "run" : "runs"}` : "Some runs were removed: reload";
      if (!same && document.activeElement !== states) showStates();
    },
  };
}

/** Completed rounds, as a bar and as text. */
export function progress(row) {
  return h("span", { class: "rounds" }, h("progress", { max: row.rounds, value: row.round, "aria-label": "completed rounds" }),
    ` ${row.round}/${row.rounds}`);
}
