const root = document.documentElement, button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const showTheme = () => { button.textContent = dark() ? "Light" : "Dark"; };
button.hidden = false;
button.onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; showTheme(); };
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const details of closed) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of closed) details.open = false;
});
showTheme();
