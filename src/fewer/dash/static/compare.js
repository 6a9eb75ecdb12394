// Some runs side by side: curves with one color for each method, and what they differ in.

import { ask, follow } from "./app.js";
import { curves, swatch } from "./chart.js";
import { badge, duration, h, megabytes, percent, plain, table } from "./dom.js";

export async function comparison(asked) {
  const ids = asked.get("compare").split(",").filter(Boolean);
  const { runs, differing, most, report } = await ask(`compare?ids=${ids.map(encodeURIComponent).join(",")}`);
  if (!runs.length) throw new Error("There are no such runs here.");
  const points = new Map(await Promise.all(runs.map(async ({ id }) => [id, (await ask(`runs/${id}/curve`)).points])));
  const rows = new Map(runs.map((row) => [row.id, row]));
  const drawn = curves();
  const figures = h("div", {});

  // Of names in the same folders the last part says enough.
  const folders = new Set(runs.map(({ name }) => name.split("/").slice(0, -1).join("/")));
  const label = ({ name }) => (folders.size === 1 ? name.split("/").at(-1) : name);

  function show() {
    drawn.update([...rows.values()].map((row) => ({ ...row, label: label(row), points: points.get(row.id) })));
    figures.replaceChildren(table("The runs that are compared", ["run", "state", "round", "accuracy", "sent", "time"], [...rows.values()].map((row) => [
      h("span", { class: "key" }, swatch(row), " ", h("a", { href: `/?run=${row.id}` }, label(row))),
      badge(row.state),
      `${row.round}/${row.rounds}`,
      percent(row.accuracy),
      megabytes(row.up + row.down),
      duration(row.seconds),
    ]), true));
  }

  async function changed({ rows: some }) {
    for (const row of some) {
      const { marker, dash } = rows.get(row.id);
      rows.set(row.id, { ...row, marker, dash });
      points.set(row.id, (await ask(`runs/${row.id}/curve`)).points);
    }
    if (some.length) show();
  }

  show();
  return {
    title: "Compare",
    crumb: h("a", { href: "/" }, "all runs"),
    elements: [
      h("h1", {}, runs.length === 1 ? "One run" : `${runs.length} runs compared`),
      ids.length > runs.length ? h("p", { class: "note" }, `Of ${ids.length} chosen runs ${runs.length} are shown: ${most} at most, and none that is damaged or gone. `,
        "For all of them: ", h("code", {}, "fewer report RUN…")) : "",
      drawn.element, figures,
      report ? h("p", {}, h("a", { href: `/api/runs/${runs[0].id}/report?together=1`, target: "_blank", rel: "noopener" },
        "The report of their comparison, with means over seeds")) : "",
      h("section", {}, h("h2", {}, "What they differ in"), differing.length
        ? table("Settings that differ", ["setting", ...runs.map(label)], differing.map(({ name, values }) => [name, ...values.map(plain)]))
        : h("p", {}, "In no setting that more than one of them has."), h("p", { class: "small" },
        "Settings that only one of them has, as most of a method's own, are on its page.")),
    ],
    begin: () => follow(runs.map(({ id }) => id)),
    changed,
  };
}
