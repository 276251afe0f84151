"use strict";

const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// Filters: one button of each group is pressed; what does not match every group is hidden.

const chosen = () =>
  Object.fromEntries(all("[data-filter]").map((group) =>
    [group.dataset.filter, group.querySelector("[aria-pressed=true]").value]));

function applyFilters() {
  const wanted = chosen();
  const matches = (element) =>
    Object.entries(wanted).every(([name, value]) => !value || !(name in element.dataset) || element.dataset[name] === value);
  for (const element of all("main [data-topology], main [data-cache]")) element.hidden = !matches(element);
  for (const head of all(".matrix thead th[colspan]")) head.hidden = !matches(head);
  const claims = all("[data-claim]");
  const shown = claims.filter((claim) => !claim.hidden).length;
  document.querySelector(".count").textContent =
    shown === claims.length ? `all ${claims.length} claims shown` : `${shown} of ${claims.length} claims shown`;
}

for (const group of all("[data-filter]")) {
  group.addEventListener("click", ({ target }) => {
    if (target.tagName !== "BUTTON") return;
    for (const button of all("button", group)) button.setAttribute("aria-pressed", String(button === target));
    applyFilters();
  });
}
applyFilters();

// Decisions: a table is made when it is first asked for.

const { columns, runs } = JSON.parse(document.getElementById("decisions").textContent);

function row(cells, kind) {
  const line = document.createElement("tr");
  for (const text of cells) {
    const cell = line.appendChild(document.createElement(kind));
    if (kind === "th") cell.scope = "col";
    cell.textContent = text;
  }
  return line;
}

function fillDecisions(details) {
  const place = details.querySelector("div");
  if (place.firstChild) return;
  const table = place.appendChild(document.createElement("table"));
  table.createTHead().append(row(columns, "th"));
  const body = table.createTBody();
  const [verdict, rule] = [columns.indexOf("verdict"), columns.indexOf("rule in the twin")];
  for (const cells of runs[details.dataset.run]) {
    const line = body.appendChild(row(cells, "td"));
    line.className = cells[verdict];
    if (cells[rule] && cells[rule] !== cells[verdict]) line.classList.add("differs");
  }
}

for (const details of all(".decisions")) details.addEventListener("toggle", () => details.open && fillDecisions(details));

// Videos: those of one run play together; the first one leads, and the others are put right when they drift.

for (const player of all(".player")) {
  const [button, slider, output] = ["button", "input", "output"].map((tag) => player.querySelector(tag));
  const videos = all("video", player);
  const [leader, ...others] = videos;
  const fps = Number(player.dataset.fps);
  const seek = (seconds) => videos.forEach((video) => { video.currentTime = seconds; });

  function show() {
    const frame = Math.min(Math.floor(leader.currentTime * fps + 0.01), Number(slider.max));
    slider.value = frame;
    output.textContent = `frame ${frame + 1} of ${Number(slider.max) + 1}`;
    slider.setAttribute("aria-valuetext", output.textContent);
    button.textContent = leader.paused ? "Play" : "Pause";
  }

  function follow() {
    for (const video of others) {
      if (Math.abs(video.currentTime - leader.currentTime) > 1 / fps) video.currentTime = leader.currentTime;
    }
    show();
    if (!leader.paused) requestAnimationFrame(follow);
  }

  function ready() {
    slider.max = Math.max(Math.round(leader.duration * fps) - 1, 0);
    show();
  }
  if (leader.readyState >= 1) ready();
  leader.addEventListener("loadedmetadata", ready);
  leader.addEventListener("seeked", show);
  leader.addEventListener("play", follow);
  leader.addEventListener("pause", show);
  leader.addEventListener("ended", () => {
    seek(0);
    videos.forEach((video) => video.play());
  });
  slider.addEventListener("input", () => seek((Number(slider.value) + 0.5) / fps)); // the middle of a frame
  button.addEventListener("click", () =>
    videos.forEach((video) => (button.textContent === "Play" ? video.play() : video.pause())));
}

// Paper has no controls: everything is opened for it, and closed again behind it.

let opened = [];

function openAll() {
  opened = opened.concat(all("details:not([open])"));
  for (const details of opened) {
    if (details.matches(".decisions")) fillDecisions(details);
    details.open = true;
  }
}

function closeAgain() {
  for (const details of opened) details.open = false;
  opened = [];
}

const paper = matchMedia("print");
paper.addEventListener("change", () => (paper.matches ? openAll() : closeAgain()));
addEventListener("beforeprint", openAll);
addEventListener("afterprint", closeAgain);
