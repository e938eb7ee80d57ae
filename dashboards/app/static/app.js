"use strict";
// Draws the figures of a page, and shows another page in place of this one when a choice or a link asks for it. The URL
// holds every choice, so without scripts the forms and links do the same, but for the figures.

// Nothing leaves the machine: plotly's button that uploads a chart is taken away, and its address with it.
const CONFIG = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
  modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "toImage"],
};

function draw() {
  for (const plot of document.querySelectorAll(".plot")) {
    const figure = JSON.parse(document.getElementById(plot.id.replace("plot-", "data-")).textContent);
    Plotly.newPlot(plot, figure.data, figure.layout, CONFIG).then(() => { plot.dataset.drawn = "yes"; });
    if (plot.dataset.choice) {
      plot.on("plotly_click", (event) => {
        const chosen = event.points[0].customdata;
        if (chosen !== undefined && chosen !== null) choose(plot.dataset.choice, Array.isArray(chosen) ? chosen[0] : chosen);
      });
    }
  }
  for (const canvas of document.querySelectorAll("[data-walk]")) prepareWalk(canvas);
  scrollTogether(document.querySelectorAll(".text"));
}

// The same text twice, side by side: scrolling one shows the same place of the other.
function scrollTogether(texts) {
  for (const text of texts) {
    text.addEventListener("scroll", () => texts.forEach((other) => { other.scrollTop = text.scrollTop; }));
  }
}

// A choice is a name of this page's, or "page:name" of another one's.
async function choose(choice, value) {
  const [page, name] = choice.includes(":") ? choice.split(":") : [null, choice];
  const url = page ? new URL(`/${page}`, location.href) : new URL(location.href);
  url.searchParams.set(name, value);
  await show(url);
  const detail = document.getElementById("detail");
  if (detail) detail.scrollIntoView({ block: "nearest" });
}

// The drawing of a lineage: a click on a node goes where the page says.
function prepareWalk(canvas) {
  const targets = JSON.parse(document.getElementById(canvas.dataset.walk).textContent);
  const go = (node) => { if (targets[node.dataset.group]) show(new URL(targets[node.dataset.group], location.href)); };
  for (const node of canvas.querySelectorAll("[data-group]")) {
    node.addEventListener("click", () => go(node));
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go(node); }
    });
  }
  const root = canvas.querySelector(".root");
  if (root) {
    const place = root.getBoundingClientRect(), frame = canvas.getBoundingClientRect();
    canvas.scrollLeft = place.left - frame.left - (frame.width - place.width) / 2;
    canvas.scrollTop = place.top - frame.top - (frame.height - place.height) / 2;
  }
}

// The URL of a form's choices; boxes that are all ticked are the default, and so need no place in it.
function urlOf(form, changed) {
  const url = new URL(form.action);
  const dropped = new Set((changed && changed.dataset.resets || "").split(" ").filter(Boolean));
  for (const boxes of form.querySelectorAll("[data-several]")) {
    const all = Array.from(boxes.querySelectorAll("input"));
    if (all.every((box) => box.checked)) dropped.add(boxes.dataset.several);
  }
  for (const [name, value] of new FormData(form)) {
    if (value !== "" && !dropped.has(name)) url.searchParams.append(name, value);
  }
  return url;
}

let newest = 0;
async function show(url, { remember = true } = {}) {
  const mine = ++newest, app = document.getElementById("app");
  app.classList.add("loading");
  let text;
  try {
    text = await (await fetch(url)).text();
  } catch {
    app.classList.remove("loading");
    return say("The dashboard no longer answers. Start it again with kvp dashboard, then reload this page.");
  }
  if (mine !== newest) return;  // a later choice was quicker
  const found = new DOMParser().parseFromString(text, "text/html");
  const focused = document.activeElement && document.activeElement.name;
  const value = document.activeElement && document.activeElement.value;
  const samePage = found.getElementById("app").dataset.page === app.dataset.page;
  document.querySelectorAll(".plot").forEach((plot) => Plotly.purge(plot));
  app.replaceWith(found.getElementById("app"));
  document.title = found.title;
  if (remember) history.pushState(null, "", url);
  if (!samePage) scrollTo(0, 0);
  if (samePage && focused) {
    const again = Array.from(document.getElementsByName(focused));
    (again.find((one) => one.type !== "checkbox" || one.value === value) || document.body).focus({ preventScroll: true });
  }
  draw();
}

function say(words) {
  document.querySelectorAll(".notice.of-script").forEach((old) => old.remove());
  const notice = document.createElement("p");
  notice.className = "notice of-script";
  notice.setAttribute("role", "alert");
  notice.textContent = words;
  document.querySelector("main").prepend(notice);
}

document.addEventListener("change", (event) => {
  const form = event.target.closest("form.menus");
  if (form) show(urlOf(form, event.target));
});
document.addEventListener("submit", (event) => {
  const form = event.target.closest("form");
  if (form) { event.preventDefault(); show(urlOf(form)); }
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-download]");
  if (button) {
    const plot = document.getElementById(`plot-${button.dataset.plot}`);
    const size = { width: plot.clientWidth, height: plot.clientHeight };
    Plotly.downloadImage(plot, { format: button.dataset.download, filename: button.dataset.plot, scale: button.dataset.download === "png" ? 2 : 1, ...size });
    return;
  }
  const link = event.target.closest("a[href]");
  const plain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
  if (link && plain && link.origin === location.origin && !link.hasAttribute("download")) {
    event.preventDefault();
    show(new URL(link.href));
  }
});
window.addEventListener("popstate", () => show(new URL(location.href), { remember: false }));
draw();
