// One run: metrics and curve, faults, ledger, settings, and the buttons to stop and resume it.

import { follow, request } from "./app.js";
import { curves, swatch } from "./chart.js";
import {
  badge, formatCount, formatDuration, formatMegabytes, formatMetric, formatPrivacy, formatReason, formatTime, formatValue, h, STATE_TEXTS, table,
} from "./dom.js";
import { progress } from "./list.js";

const PAGE = 20;

export async function createRunView(query) {
  const id = query.get("run");
  const path = `runs/${encodeURIComponent(id)}`;
  const [about, curve, firstFigures, tally, events] = await Promise.all([
    request(path), request(`${path}/curve`), request(`${path}/figures`), request(`${path}/tally`), request(`${path}/events?limit=${PAGE}`),
  ]);
  let row = about.row;
  let figures = firstFigures;
  const log = about.log ? await request(`${path}/log`) : { lines: [] };
  let active = true;

  const state = h("div", { class: "state" });
  const message = h("p", { class: "message", role: "status" });
  const tiles = h("dl", { class: "tiles" });
  const shortfall = h("p", { class: "note" });
  const chart = curves();
  const tables = h("div", { class: "columns" });
  const faults = h("div", {});
  const traffic = h("div", {});
  const history = pager(path, "events", { head: ["time", "event", "details"], caption: "Events, newest first", cells: eventCells, first: events });
  const messages = pager(path, "ledger", { head: ["round", "client", "direction", "kind", "bytes"], caption: "Messages, newest first", cells: messageCells });
  const output = h("pre", { tabindex: 0, role: "region", "aria-label": "Log of fewer resume" });
  const logSection = h("section", {}, h("h2", {}, "Log of fewer resume"), output);
  const stop = button("Stop", "stop", "Stop the run, as Ctrl-C does; it can be resumed");
  const resume = button("Resume", "resume", "Continue after the last completed round");

  function button(text, action, title) {
    return h("button", { title, onclick: async (event) => {
      if (event.currentTarget.getAttribute("aria-disabled") === "true") return;
      message.textContent = "…";
      try {
        const { process } = await request(`${path}/${action}`, { method: "POST" });
        message.textContent = action === "stop" ? `Stopping process ${process}.` : `Started process ${process}.`;
      } catch (error) {
        message.textContent = error.message;
      }
    } }, text);
  }

  function showState() {
    state.replaceChildren(badge(row.state), h("span", {}, row.reason ? formatReason(row.reason) : STATE_TEXTS[row.state]));
    stop.setAttribute("aria-disabled", row.state !== "running");
    resume.setAttribute("aria-disabled", !["stopped", "crashed"].includes(row.state) || Boolean(about.why_not_resumable));
    const facts = [
      ["rounds", row.rounds ? progress(row) : "–"],
      ["metric", formatMetric(row)],
      ...figures.metrics.map(({ name, value, percent }) => [name, formatMetric({ metric: { name: "accuracy", percent }, value })]),
      ["sent up", formatMegabytes(row.up)],
      ["sent down", formatMegabytes(row.down)],
      ["time", formatDuration(row.seconds)],
      ...(row.epsilon === undefined ? [] : [["privacy", formatPrivacy(row)]]),
    ];
    tiles.replaceChildren(...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    shortfall.textContent = row.state === "finished" ? figures.shortfall : "";
    shortfall.hidden = !shortfall.textContent;
  }

  function showTables() {
    const titles = { classes: "Classes", clients: "Clients, on their own test samples" };
    tables.replaceChildren(...Object.entries(titles).filter(([part]) => figures[part].length).map(([part, title]) =>
      h("section", {}, h("h2", {}, title), recordTable(title, figures[part]))));
  }

  function showTally(totals) {
    const absent = Object.entries(totals.absent);
    const note = totals.complete ? "" : ` ${Math.floor(100 * totals.fraction_read)} % of the records have been read so far.`;
    faults.replaceChildren(absent.length
      ? table("Absent answers by reason", ["reason", "absent answers"], absent.map(([reason, count]) => [reason, formatCount(count)]), true)
      : h("p", {}, "All clients answered."), h("p", { class: "small" }, note));
    const isEvaluation = ({ kind }) => kind.startsWith("evaluate/");
    const training = totals.traffic.filter((entry) => !isEvaluation(entry));
    const sum = (field) => formatCount(training.reduce((total, entry) => total + entry[field], 0));
    const rows = [...training, ...totals.traffic.filter(isEvaluation)]
      .map(({ kind, direction, messages: count, bytes }) => [kind, direction, formatCount(count), formatCount(bytes)]);
    if (rows.length) rows.push([h("strong", {}, "total"), "", h("strong", {}, sum("messages")), h("strong", {}, sum("bytes"))]);
    traffic.replaceChildren(rows.length
      ? table("Bytes by kind and direction", ["kind", "direction", "messages", "bytes"], rows, true)
      : h("p", {}, "No message has been sent yet."),
    h("p", { class: "small" }, rows.length > 1 ? `The total excludes evaluation (kinds that start with evaluate/).${note}` : note));
  }

  async function readTally() {
    for (let totals = await request(`${path}/tally`); active; totals = await request(`${path}/tally`)) {
      showTally(totals);
      if (totals.complete) return;
    }
  }

  function showLog(lines) {
    output.textContent = lines.join("\n") || "(nothing yet)";
    output.scrollTop = output.scrollHeight;
  }

  let busy = false;
  let pending = false;
  async function refresh() {
    if (busy) {
      pending = true;
      return;
    }
    busy = true;
    do {
      pending = false;
      chart.update([{ ...row, label: row.method, points: (await request(`${path}/curve`)).points }]);
      figures = await request(`${path}/figures`);
      showState();
      showTables();
      await readTally();
      await history.refresh();
      if (about.log) showLog((await request(`${path}/log`)).lines);
    } while (pending && active);
    busy = false;
  }

  showState();
  showTables();
  showTally(tally);
  showLog(log.lines);
  logSection.hidden = !about.log;
  chart.update([{ ...row, label: row.method, points: curve.points }]);
  const actions = about.read_only ? h("p", { class: "small" }, "Read-only: runs cannot be stopped or resumed here.")
    : h("div", { class: "actions" }, stop, resume);
  const obstacle = !about.read_only && about.why_not_resumable && row.state !== "finished"
    ? `This run cannot be resumed here: ${about.why_not_resumable}` : "";
  return {
    title: row.name,
    crumb: h("a", { href: "/" }, "all runs"),
    elements: [
      h("div", { class: "top" }, h("div", {}, h("h1", {}, row.name), h("p", { class: "lead" }, swatch(row), ` ${row.method} on ${row.data}`,
        row.clients ? `, ${formatCount(row.clients)} clients, seed ${row.seed}` : "", row.runtime === "flower" ? ", between machines" : "")), actions),
      state, message, obstacle ? h("p", { class: "note" }, obstacle) : null, tiles, shortfall, chart.element,
      about.report ? h("p", {}, h("a", { href: `/api/${path}/report`, target: "_blank", rel: "noopener" }, "Report with all pictures")) : null,
      h("div", { class: "columns" }, h("section", {}, h("h2", {}, "Faults"), faults), h("section", {}, h("h2", {}, "Ledger"), traffic, messages.element)),
      tables,
      h("section", {}, h("h2", {}, "Events"), history.element),
      logSection,
      h("section", {}, h("h2", {}, "Settings"), pairs("Method options", about.method, true), pairs("All settings", about.settings),
        pairs("Environment", { directory: about.path, ...about.environment })),
    ].filter((element) => element !== null),
    onStart() {
      follow([id]);
      if (!tally.complete) readTally();
    },
    onChange({ rows: [changed] }) {
      if (!changed) return;
      const started = changed.state === "starting" || changed.state === "running";
      const done = changed.state !== row.state && changed.state !== "starting";
      if (done && /^(Stopping|Started) process/.test(message.textContent)) message.textContent = "";
      row = changed;
      showState();
      if (started && !about.log) {
        request(path).then(({ log: hasLog }) => { about.log = hasLog; logSection.hidden = !hasLog; });
      }
      refresh();
    },
    onEnd() { active = false; },
  };
}

/** Lines of a record, newest first; older ones are loaded on request. */
function pager(path, record, { head, caption, cells, first = null }) {
  const shown = h("div", {});
  const older = h("button", { class: "plain" });
  let lines = [];
  let before = null;
  const toLines = (page) => page[record === "events" ? "events" : "rows"].map(cells);
  function fill() {
    shown.replaceChildren(lines.length ? table(caption, head, lines, record === "ledger") : "");
    older.textContent = lines.length ? "Show older" : "Show messages";
    older.hidden = before === 0;
  }
  async function loadOlder() {
    const page = await request(`${path}/${record}?limit=${PAGE}${before === null ? "" : `&before=${before}`}`);
    lines = [...lines, ...toLines(page)];
    before = page.before;
    fill();
  }
  older.addEventListener("click", loadOlder);
  if (first) {
    lines = toLines(first);
    before = first.before;
  }
  fill();
  return {
    element: h("div", {}, shown, older),
    async refresh() {
      if (lines.length > PAGE) return; // the user is reading older lines
      const page = await request(`${path}/${record}?limit=${PAGE}`);
      lines = toLines(page);
      before = page.before;
      fill();
    },
  };
}

/** Records as a table, folded if it is long. */
function recordTable(title, records) {
  const names = Object.keys(records[0]);
  const format = (name, value) => (typeof value !== "number" ? formatValue(value)
    : ["client", "samples", "support"].includes(name) ? formatCount(value) : value.toFixed(4));
  const rows = records.map((record) => names.map((name) => format(name, record[name])));
  const element = table(title, names.map((name) => name.replaceAll("_", " ")), rows, true);
  element.classList.add("records");
  return records.length > PAGE ? h("details", {}, h("summary", {}, `${formatCount(records.length)} rows`), element) : element;
}

const messageCells = ([round, client, direction, kind, bytes]) => [round, client, direction, kind, formatCount(bytes)];

function eventCells({ time, event: kind, ...details }) {
  const describe = {
    start: () => "from round 1",
    resume: () => `after round ${details.round}${Object.keys(details.changed ?? {}).length ? `, with ${JSON.stringify(details.changed)}` : ""}`,
    absent: () => `round ${details.round}, client ${details.client}: ${details.reason} (${details.handler})${details.detail ? `: ${details.detail}` : ""}`,
    stop: () => `after round ${details.round}: ${formatReason(String(details.reason))}`,
    finish: () => `after round ${details.round}${details.reason ? `: ${details.reason}` : ""}`,
  }[kind];
  return [formatTime(time ?? 0), kind ?? "?", describe ? describe() : JSON.stringify(details)];
}

function pairs(title, values, open = false) {
  const rows = Object.entries(values ?? {}).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, formatValue(value))));
  return h("details", { open }, h("summary", {}, title), h("dl", { class: "pairs" }, rows));
}
