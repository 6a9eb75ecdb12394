// One run: its figures and curve, faults, ledger, settings; and the buttons.

import { ask, follow } from "./app.js";
import { curves, swatch } from "./chart.js";
import { badge, clock, duration, h, megabytes, MEANINGS, percent, plain, reason, table, whole } from "./dom.js";
import { rounds } from "./list.js";

const PAGE = 20;

export async function run(asked) {
  const id = asked.get("run");
  const at = `runs/${encodeURIComponent(id)}`;
  const [about, curve, tally, events] = await Promise.all([
    ask(at), ask(`${at}/curve`), ask(`${at}/tally`), ask(`${at}/events?limit=${PAGE}`),
  ]);
  let row = about.row;
  const log = about.log ? await ask(`${at}/log`) : { lines: [] };
  let alive = true;

  const state = h("div", { class: "state" });
  const told = h("p", { class: "told", role: "status" });
  const tiles = h("dl", { class: "tiles" });
  const drawn = curves();
  const faults = h("div", {});
  const traffic = h("div", {});
  const history = pager(at, "events", { head: ["when", "what", "details"], caption: "Events, the newest first", cells: event, first: events });
  const messages = pager(at, "ledger", { head: ["round", "client", "direction", "kind", "bytes"], caption: "Messages, the newest first", cells: message });
  const said = h("pre", { tabindex: 0, role: "region", "aria-label": "Log of fewer resume" });
  const logged = h("section", {}, h("h2", {}, "Log of fewer resume"), said);
  const stop = button("Stop", "stop", "As Ctrl-C would: it can be resumed");
  const resume = button("Resume", "resume", "Goes on from the last whole round");

  function button(text, action, title) {
    return h("button", { title, onclick: async (event) => {
      if (event.currentTarget.getAttribute("aria-disabled") === "true") return;
      told.textContent = "…";
      try {
        const { process } = await ask(`${at}/${action}`, { method: "POST" });
        told.textContent = action === "stop" ? `Process ${process} was told to stop.` : `Process ${process} was started.`;
      } catch (error) {
        told.textContent = error.message;
      }
    } }, text);
  }

  function figures() {
    state.replaceChildren(badge(row.state), h("span", {}, row.reason ? reason(row.reason) : MEANINGS[row.state]));
    stop.setAttribute("aria-disabled", row.state !== "running");
    resume.setAttribute("aria-disabled", !["stopped", "broken"].includes(row.state) || Boolean(about.hindrance));
    const facts = [
      ["rounds", row.rounds ? rounds(row) : "–"],
      ["accuracy", percent(row.accuracy)],
      ["sent up", megabytes(row.up)],
      ["sent down", megabytes(row.down)],
      ["time", duration(row.seconds)],
    ];
    tiles.replaceChildren(...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  function added(now) {
    const absent = Object.entries(now.absent);
    const part = now.whole ? "" : ` So far ${Math.floor(100 * now.done)} % of the records are read.`;
    faults.replaceChildren(absent.length
      ? table("Absent answers by reason", ["reason", "absent answers"], absent.map(([why, count]) => [why, whole(count)]), true)
      : h("p", {}, "All clients that were asked answered."), h("p", { class: "small" }, part));
    const measuring = (one) => one.kind.startsWith("evaluate/");
    const learning = now.traffic.filter((one) => !measuring(one));
    const sum = (rows, what) => rows.reduce((total, one) => total + one[what], 0);
    const rows = [...learning, ...now.traffic.filter(measuring)].map((one) => [one.kind, one.direction, whole(one.messages), whole(one.bytes)]);
    if (rows.length) rows.push([h("strong", {}, "in all"), "", h("strong", {}, whole(sum(learning, "messages"))), h("strong", {}, whole(sum(learning, "bytes")))]);
    traffic.replaceChildren(rows.length
      ? table("Bytes by kind and direction", ["kind", "direction", "messages", "bytes"], rows, true)
      : h("p", {}, "No message has been sent yet."),
    h("p", { class: "small" }, rows.length > 1 ? `Kinds that begin with evaluate/ are of measuring and not in the sum.${part}` : part));
  }

  async function add() {
    for (let now = await ask(`${at}/tally`); alive; now = await ask(`${at}/tally`)) {
      added(now);
      if (now.whole) return;
    }
  }

  function write(lines) {
    said.textContent = lines.join("\n") || "(nothing yet)";
    said.scrollTop = said.scrollHeight;
  }

  let busy = false;
  let again = false;
  async function refresh() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    do {
      again = false;
      drawn.update([{ ...row, label: row.method, points: (await ask(`${at}/curve`)).points }]);
      await add();
      await history.refresh();
      if (about.log) write((await ask(`${at}/log`)).lines);
    } while (again && alive);
    busy = false;
  }

  figures();
  added(tally);
  write(log.lines);
  logged.hidden = !about.log;
  drawn.update([{ ...row, label: row.method, points: curve.points }]);
  const acting = about.read_only ? h("p", { class: "small" }, "Read only: it can be neither stopped nor resumed from here.")
    : h("div", { class: "acts" }, stop, resume);
  const cannot = !about.read_only && about.hindrance && row.state !== "finished" ? `It cannot be resumed from here: ${about.hindrance}` : "";
  return {
    title: row.name,
    crumb: h("a", { href: "/" }, "all runs"),
    elements: [
      h("div", { class: "top" }, h("div", {}, h("h1", {}, row.name), h("p", { class: "lead" }, swatch(row), ` ${row.method} on ${row.data}`,
        row.clients ? `, ${whole(row.clients)} clients, seed ${row.seed}` : "", row.runtime === "flower" ? ", between machines" : "")), acting),
      state, told, cannot ? h("p", { class: "note" }, cannot) : null, tiles, drawn.element,
      about.report ? h("p", {}, h("a", { href: `/api/${at}/report`, target: "_blank", rel: "noopener" }, "Its report, with all pictures")) : null,
      h("div", { class: "halves" }, h("section", {}, h("h2", {}, "Faults"), faults), h("section", {}, h("h2", {}, "Ledger"), traffic, messages.element)),
      h("section", {}, h("h2", {}, "What happened"), history.element),
      logged,
      h("section", {}, h("h2", {}, "Settings"), pairs("The method's own", about.method, true), pairs("All settings", about.settings),
        pairs("Where and with what", { directory: about.path, ...about.environment })),
    ].filter((one) => one !== null),
    begin() {
      follow([id]);
      if (!tally.whole) add();
    },
    changed({ rows: [now] }) {
      if (!now) return;
      const started = now.state === "starting" || now.state === "running";
      if (now.state !== row.state && now.state !== "starting" && told.textContent.startsWith("Process")) told.textContent = "";
      row = now;
      figures();
      if (started && !about.log) {
        ask(at).then((found) => { about.log = found.log; logged.hidden = !found.log; });
      }
      refresh();
    },
    end() { alive = false; },
  };
}

/** Lines of a record, the newest first; older ones are fetched when asked for. */
function pager(at, what, { head, caption, cells, first = null }) {
  const shown = h("div", {});
  const older = h("button", { class: "plain" });
  let found = [];
  let before = null;
  const rows = (page) => page[what === "events" ? "events" : "rows"].map(cells);
  function fill() {
    shown.replaceChildren(found.length ? table(caption, head, found, what === "ledger") : "");
    older.textContent = found.length ? "Show older" : "Show messages";
    older.hidden = before === 0;
  }
  async function more() {
    const page = await ask(`${at}/${what}?limit=${PAGE}${before === null ? "" : `&before=${before}`}`);
    found = [...found, ...rows(page)];
    before = page.before;
    fill();
  }
  older.addEventListener("click", more);
  if (first) {
    found = rows(first);
    before = first.before;
  }
  fill();
  return {
    element: h("div", {}, shown, older),
    async refresh() {
      if (found.length > PAGE) return; // whoever reads older lines is left in peace
      const page = await ask(`${at}/${what}?limit=${PAGE}`);
      found = rows(page);
      before = page.before;
      fill();
    },
  };
}

const message = ([round, client, direction, kind, bytes]) => [round, client, direction, kind, whole(Number(bytes))];

function event({ time, event: what, ...details }) {
  const words = {
    start: () => "from the beginning",
    resume: () => `after round ${details.round}${Object.keys(details.changed ?? {}).length ? `, with ${JSON.stringify(details.changed)}` : ""}`,
    absent: () => `round ${details.round}, client ${details.client}: ${details.why} (${details.handler})${details.detail ? `: ${details.detail}` : ""}`,
    stop: () => `after round ${details.round}: ${reason(String(details.reason))}`,
    finish: () => `after round ${details.round}`,
  }[what];
  return [clock(time ?? 0), what ?? "?", words ? words() : JSON.stringify(details)];
}

function pairs(title, values, open = false) {
  const rows = Object.entries(values ?? {}).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, plain(value))));
  return h("details", { open }, h("summary", {}, title), h("dl", { class: "pairs" }, rows));
}
