// Routing between views, requests to the server, and live updates.

import { h } from "./dom.js";
import { createComparisonView } from "./compare.js";
import { createListView } from "./list.js";
import { createRunView } from "./run.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const connection = document.getElementById("connection");
let view = null;
let source = null;
let followed = null;
let navigation = 0;

class RequestError extends Error {}

/** Sends a request to the API and returns its JSON; throws RequestError with the server's message. */
export async function request(path, options = {}) {
  const response = await fetch(`/api/${path}`, options);
  if (response.status === 401) {
    showLogin();
    throw new RequestError("the token is missing");
  }
  const answer = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (!response.ok) throw new RequestError(answer.error);
  return answer;
}

/** Calls the view's `onChange` when these runs change, while the page is visible. */
export function follow(ids) {
  followed = ids;
  source?.close();
  source = new EventSource(`/api/follow?ids=${ids.join(",")}`);
  source.onopen = () => { connection.textContent = ""; };
  source.onerror = () => {
    connection.textContent = "Connection lost. Reconnecting …";
    if (source.readyState === EventSource.CLOSED) setTimeout(reconnect, 2000, source);
  };
  source.onmessage = (message) => view?.onChange(JSON.parse(message.data));
}

/** Reconnects after a refusal, which browsers do not do on their own. The token may have changed. */
async function reconnect(closed) {
  try {
    await request("runs?limit=1");
  } catch (error) {
    if (error instanceof RequestError) return;
  }
  if (closed === source && !document.hidden) follow(followed);
}

/** Navigates to an address of this page. */
export function navigate(address, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  show(!replace);
}

async function show(moved = false) {
  const query = new URLSearchParams(location.search);
  const current = (navigation += 1);
  source?.close();
  view?.onEnd?.();
  view = null;
  const createView = query.has("run") ? createRunView : query.has("compare") ? createComparisonView : createListView;
  try {
    const created = await createView(query);
    if (current !== navigation) return;
    view = created;
    crumbs.replaceChildren(...(view.crumb ? [view.crumb] : []));
    document.title = `${view.title} · Fewer`;
    main.replaceChildren(...view.elements);
    if (moved) {
      window.scrollTo(0, 0);
      main.focus({ preventScroll: true });
    }
    view.onStart?.();
  } catch (error) {
    if (current !== navigation || error.message === "the token is missing") return;
    main.replaceChildren(h("h1", {}, "Something went wrong"), h("p", { role: "alert" }, error.message),
      h("p", {}, h("a", { href: "/" }, "Back to the list of runs")));
    if (!(error instanceof RequestError)) throw error;
  }
}

function showLogin() {
  navigation += 1;
  view?.onEnd?.();
  view = null;
  connection.textContent = "";
  const field = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true });
  const message = h("p", { role: "alert" });
  const form = h("form", { class: "login", onsubmit: async (event) => {
    event.preventDefault();
    if (await login(field.value)) show();
    else message.textContent = "Wrong token.";
  } }, h("label", { for: "token" }, "Token printed by fewer dash"), field, h("button", {}, "Log in"), message);
  main.replaceChildren(h("h1", {}, "This dashboard needs a token"), form);
  field.focus();
}

const login = async (token) =>
  (await fetch("/api/login", { method: "POST", body: token })).ok;

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a");
  if (link?.classList.contains("skip")) {
    event.preventDefault();
    main.focus();
  } else if (link && link.pathname === "/" && link.origin === location.origin && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    navigate(link.href);
  }
});
// Browsers limit connections per server, so hidden pages close theirs.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) source?.close();
  else if (view && followed) follow(followed);
});
window.addEventListener("popstate", () => show(true));

const tokenInHash = /^#token=(.+)$/.exec(location.hash);
if (tokenInHash) {
  history.replaceState(null, "", location.pathname + location.search);
  await login(decodeURIComponent(tokenInHash[1]));
}
show();
