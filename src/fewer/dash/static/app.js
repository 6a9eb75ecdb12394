// Which view is shown, what the server says, and what it says by itself.

import { h } from "./dom.js";
import { comparison } from "./compare.js";
import { list } from "./list.js";
import { run } from "./run.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const connection = document.getElementById("connection");
let view = null;
let source = null;
let followed = null;
let shown = 0;

class Refused extends Error {}

/** What the server answers; its own words where it refuses. */
export async function ask(path, options = {}) {
  const response = await fetch(`/api/${path}`, options);
  if (response.status === 401) {
    enter();
    throw new Refused("the token is missing");
  }
  const found = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (!response.ok) throw new Refused(found.error);
  return found;
}

/** Be told of changes to these runs by the view's `changed`, while the page is seen. */
export function follow(ids) {
  followed = ids;
  source?.close();
  source = new EventSource(`/api/follow?ids=${ids.join(",")}`);
  source.onopen = () => { connection.textContent = ""; };
  source.onerror = () => {
    connection.textContent = "Not connected: trying again …";
    if (source.readyState === EventSource.CLOSED) setTimeout(again, 2000, source);
  };
  source.onmessage = (message) => view?.changed(JSON.parse(message.data));
}

/** A browser does not try again by itself where it was refused: perhaps the token is another now. */
async function again(refused) {
  try {
    await ask("runs?limit=1");
  } catch (error) {
    if (error instanceof Refused) return;
  }
  if (refused === source && !document.hidden) follow(followed);
}

/** Go to an address of this page. */
export function go(address, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  show(!replace);
}

async function show(moved = false) {
  const asked = new URLSearchParams(location.search);
  const number = (shown += 1);
  source?.close();
  view?.end?.();
  view = null;
  const make = asked.has("run") ? run : asked.has("compare") ? comparison : list;
  try {
    const made = await make(asked);
    if (number !== shown) return;
    view = made;
    crumbs.replaceChildren(...(made.crumb ? [made.crumb] : []));
    document.title = `${made.title} · Fewer`;
    main.replaceChildren(...made.elements);
    if (moved) {
      window.scrollTo(0, 0);
      main.focus({ preventScroll: true });
    }
    made.begin?.();
  } catch (error) {
    if (number !== shown || error.message === "the token is missing") return;
    main.replaceChildren(h("h1", {}, "That did not work"), h("p", { role: "alert" }, error.message),
      h("p", {}, h("a", { href: "/" }, "To the list of runs")));
    if (!(error instanceof Refused)) throw error;
  }
}

function enter() {
  shown += 1;
  view?.end?.();
  view = null;
  connection.textContent = "";
  const field = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true });
  const told = h("p", { role: "alert" });
  const form = h("form", { class: "enter", onsubmit: async (event) => {
    event.preventDefault();
    if (await present(field.value)) show();
    else told.textContent = "This is not the token.";
  } }, h("label", { for: "token" }, "Token, as fewer dash printed it"), field, h("button", {}, "Enter"), told);
  main.replaceChildren(h("h1", {}, "This dashboard asks for a token"), form);
  field.focus();
}

const present = async (token) =>
  (await fetch("/api/enter", { method: "POST", body: token })).ok;

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a");
  if (link?.classList.contains("skip")) {
    event.preventDefault();
    main.focus();
  } else if (link && link.pathname === "/" && link.origin === location.origin && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    go(link.href);
  }
});
// A browser opens few connections to one server: pages that nobody sees do without.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else if (view && followed) follow(followed);
});
window.addEventListener("popstate", () => show(true));

const brought = /^#token=(.+)$/.exec(location.hash);
if (brought) {
  history.replaceState(null, "", location.pathname + location.search);
  await present(decodeURIComponent(brought[1]));
}
show();
