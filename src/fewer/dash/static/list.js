// The list of runs: sifted, sorted, in pages; rows change in place while runs go on.

import { ask, follow, go } from "./app.js";
import { swatch } from "./chart.js";
import { badge, duration, h, megabytes, MEANINGS, percent, since, whole } from "./dom.js";

const LIMIT = 50;
export const chosen = new Map(); // runs to compare, by id, on whatever page they are

const COLUMNS = [
  ["name", "run", ""],
  ["method", "method", "wide"],
  [null, "data", "wide"],
  [null, "state", ""],
  [null, "round", ""],
  ["accuracy", "accuracy", "number"],
  ["bytes", "sent", "number wide"],
  ["seconds", "time", "number wide"],
  ["changed", "changed", "wide"],
];

export async function list(asked) {
  const settings = {
    find: asked.get("find") ?? "",
    state: asked.get("state") ?? "",
    sort: asked.get("sort") ?? "changed",
    down: asked.get("down") ?? "1",
    from: Number(asked.get("from") ?? 0) || 0,
  };
  const load = () => ask(`runs?${new URLSearchParams({ ...settings, limit: LIMIT })}`);
  let page = await load();
  const lines = new Map();

  const address = (changes) => {
    const next = new URLSearchParams();
    for (const [name, value] of Object.entries({ ...settings, from: 0, ...changes })) {
      if (value && !(name === "sort" && value === "changed") && !(name === "down" && value === "1")) next.set(name, value);
    }
    return `/?${next}`.replace(/\?$/, "");
  };

  const look = h("button", { class: "plain", onclick: reload, hidden: true });
  const news = h("p", { class: "news", role: "status" }, look);
  const body = h("tbody", {});
  const pages = h("nav", { class: "pages", "aria-label": "Pages of the list" });
  const compare = h("a", { class: "button" });
  const states = h("select", { id: "state", onchange: (event) => go(address({ state: event.target.value })) });
  const search = h("input", { id: "find", type: "search", value: settings.find, placeholder: "method, data, name …" });
  let typing = 0;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(async () => {
      settings.find = search.value;
      settings.from = 0;
      history.replaceState(null, "", address({}));
      await reload();
    }, 200);
  });

  function count() {
    const options = [["", `all (${whole(page.total)})`], ...Object.entries(page.counts)
      .filter(([state, number]) => number || state === settings.state)
      .map(([state, number]) => [state, `${state} (${whole(number)})`])];
    states.replaceChildren(...options.map(([value, text]) =>
      h("option", { value, selected: value === settings.state, title: MEANINGS[value] }, text)));
  }

  function choose() {
    const ids = [...chosen.keys()];
    compare.textContent = ids.length ? `Compare ${ids.length}` : "Compare …";
    compare.setAttribute("aria-disabled", !ids.length);
    if (ids.length) {
      compare.href = `/?compare=${ids.join(",")}`;
      compare.removeAttribute("title");
    } else {
      compare.removeAttribute("href");
      compare.title = "Tick runs in the list first";
    }
    forget.hidden = !ids.length;
  }
  const forget = h("button", { class: "plain", onclick: () => {
    chosen.clear();
    for (const box of body.querySelectorAll("input")) box.checked = false;
    choose();
  } }, "Choose none");

  function line(row) {
    const tick = h("input", { type: "checkbox", checked: chosen.has(row.id), "aria-label": `Compare ${row.name}`,
      disabled: row.state === "damaged", onchange: (event) => {
        if (event.target.checked) chosen.set(row.id, row);
        else chosen.delete(row.id);
        choose();
      } });
    const cells = COLUMNS.map(([, head, kind]) => h(head === "run" ? "th" : "td", { class: kind || null, scope: head === "run" ? "row" : null }));
    const element = h("tr", {}, h("td", { class: "tick" }, tick), cells);
    const [last, ...folders] = row.name.split("/").reverse();
    const folder = folders.reverse().join("/");
    const link = h("a", { href: `/?run=${row.id}`, class: "open", "aria-label": row.name }, last);
    const beneath = h("span", { class: "beneath narrow" });
    cells[0].append(link, beneath, folder ? h("span", { class: "beneath folder" }, `in ${folder}`) : "");
    const update = (now) => {
      const sent = now.up === undefined ? undefined : now.up + now.down;
      beneath.replaceChildren(swatch(now), ` ${now.method}, ${now.data}`);
      cells[1].replaceChildren(swatch(now), ` ${now.method}`);
      cells[2].replaceChildren(now.clients ? `${now.data}, ${whole(now.clients)} clients` : now.data);
      cells[3].replaceChildren(badge(now.state));
      cells[4].replaceChildren(now.rounds ? rounds(now) : "–");
      cells[5].replaceChildren(percent(now.accuracy));
      cells[6].replaceChildren(megabytes(sent));
      cells[7].replaceChildren(duration(now.seconds));
      cells[8].replaceChildren(since(now.changed));
    };
    update(row);
    return { element, update };
  }

  function fill() {
    lines.clear();
    for (const row of page.rows) lines.set(row.id, line(row));
    body.replaceChildren(...[...lines.values()].map((one) => one.element));
    if (!page.rows.length) {
      const words = page.total ? "No run is like that." : `There are no runs under ${page.root} yet. One begins with: fewer run fedavg`;
      body.append(h("tr", {}, h("td", { colspan: COLUMNS.length + 1, class: "none" }, words)));
    }
    const last = Math.min(settings.from + LIMIT, page.found);
    const turn = (text, from, there) => there ? h("a", { href: address({ from }) }, text) : h("span", { class: "off" }, text);
    pages.replaceChildren(turn("Newer", Math.max(0, settings.from - LIMIT), settings.from > 0),
      h("span", {}, page.found ? `${whole(settings.from + 1)} to ${whole(last)} of ${whole(page.found)}` : "none"),
      turn("Older", settings.from + LIMIT, last < page.found));
    if (settings.sort !== "changed") for (const [each, text] of [[0, "Before"], [2, "After"]]) pages.children[each].textContent = text;
    count();
    choose();
    look.hidden = true;
  }

  async function reload() {
    page = await load();
    fill();
    follow(page.rows.map((row) => row.id));
  }

  const heads = COLUMNS.map(([sort, head, kind]) => {
    const now = sort && settings.sort === sort;
    const down = now ? settings.down !== "1" : !["name", "method"].includes(sort);
    const order = now ? (settings.down === "1" ? "descending" : "ascending") : sort ? "none" : null;
    const arrow = now ? (settings.down === "1" ? " ↓" : " ↑") : "";
    const inside = sort ? h("a", { href: address({ sort, down: down ? "1" : "0" }) }, head, h("span", { "aria-hidden": "true" }, arrow)) : head;
    return h("th", { scope: "col", class: kind || null, "aria-sort": order }, inside);
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
      h("p", { class: "root" }, page.root, page.read_only ? " (read only)" : ""),
      h("div", { class: "tools" },
        h("span", { class: "field" }, h("label", { for: "find" }, "Find"), search),
        h("span", { class: "field" }, h("label", { for: "state" }, "State"), states),
        h("span", { class: "grow" }), forget, compare),
      news,
      h("table", { class: "runs" }, h("caption", { class: "hidden" }, "Runs. Arrow keys go from one to the next."),
        h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "tick" }, h("span", { class: "hidden" }, "compare")), heads)), body),
      pages,
    ],
    begin() {
      fill();
      follow(page.rows.map((row) => row.id));
    },
    changed(message) {
      for (const row of message.rows) lines.get(row.id)?.update(row);
      const more = Math.max(message.came - page.came, message.total - page.total);
      const same = JSON.stringify(message.counts) === JSON.stringify(page.counts);
      page.counts = message.counts;
      look.hidden = more <= 0 && message.total === page.total;
      look.textContent = more > 0 ? `${whole(more)} new ${more === 1 ? "run" : "runs"}: show` : "Some runs are gone: look again";
      if (!same && document.activeElement !== states) count();
    },
  };
}

/** How far a run has come, in words and as a bar. */
export function rounds(row) {
  return h("span", { class: "rounds" }, h("progress", { max: row.rounds, value: row.round, "aria-label": "rounds done" }),
    ` ${row.round}/${row.rounds}`);
}
