// Several runs side by side: their curves, and the settings in which they differ.

import { follow, request } from "./app.js";
import { curves, swatch } from "./chart.js";
import { badge, formatDuration, formatMegabytes, formatMetric, formatPrivacy, formatValue, h, table } from "./dom.js";

export async function createComparisonView(query) {
  const ids = query.get("compare").split(",").filter(Boolean);
  const { runs, differing, max_runs: maxRuns, report } = await request(`compare?ids=${ids.map(encodeURIComponent).join(",")}`);
  if (!runs.length) throw new Error("No such runs: they may have been moved or deleted.");
  const points = new Map(await Promise.all(runs.map(async ({ id }) => [id, (await request(`runs/${id}/curve`)).points])));
  const rows = new Map(runs.map((row) => [row.id, row]));
  const chart = curves();
  const results = h("div", {});

  // The last part of a name is enough if all runs are in the same folder.
  const folders = new Set(runs.map(({ name }) => name.split("/").slice(0, -1).join("/")));
  const label = ({ name }) => (folders.size === 1 ? name.split("/").at(-1) : name);

  function show() {
    chart.update([...rows.values()].map((row) => ({ ...row, label: label(row), points: points.get(row.id) })));
    const isPrivate = [...rows.values()].some((row) => row.epsilon !== undefined);
    const heads = ["run", "state", "round", "metric", "sent", "time", ...(isPrivate ? ["privacy"] : [])];
    results.replaceChildren(table("Compared runs", heads, [...rows.values()].map((row) => [
      h("span", { class: "key" }, swatch(row), " ", h("a", { href: `/?run=${row.id}` }, label(row))),
      badge(row.state),
      `${row.round}/${row.rounds}`,
      formatMetric(row),
      formatMegabytes(row.up + row.down),
      formatDuration(row.seconds),
      ...(isPrivate ? [formatPrivacy(row)] : []),
    ]), true));
  }

  async function onChange({ rows: changedRows }) {
    for (const row of changedRows) {
      const { marker, dash } = rows.get(row.id); // these differ between runs of one method
      rows.set(row.id, { ...row, marker, dash });
      points.set(row.id, (await request(`runs/${row.id}/curve`)).points);
    }
    if (changedRows.length) show();
  }

  show();
  return {
    title: "Compare",
    crumb: h("a", { href: "/" }, "all runs"),
    elements: [
      h("h1", {}, runs.length === 1 ? "One run" : `${runs.length} runs compared`),
      ids.length > runs.length ? h("p", { class: "note" }, `${runs.length} of ${ids.length} selected runs are shown: at most ${maxRuns}, without damaged or deleted ones. `,
        "To see all of them, use ", h("code", {}, "fewer report RUN…")) : "",
      chart.element, results,
      report ? h("p", {}, h("a", { href: `/api/runs/${runs[0].id}/report?together=1`, target: "_blank", rel: "noopener" },
        "Report of this comparison, with means over seeds")) : "",
      h("section", {}, h("h2", {}, "Differences"), differing.length
        ? table("Settings that differ", ["run", ...differing.map(({ name }) => name)], runs.map((row, index) => [label(row), ...differing.map(({ values }) => formatValue(values[index]))]))
        : h("p", {}, "All settings that these runs share are the same."), h("p", { class: "small" },
        "Settings that only one run has, such as most method options, are on its page.")),
    ],
    onStart: () => follow(runs.map(({ id }) => id)),
    onChange,
  };
}
