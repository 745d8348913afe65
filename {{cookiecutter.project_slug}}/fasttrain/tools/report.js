"use strict";
// Two things that the page can't do alone: read values under a cursor that all charts share, and show its next version.

// ---- values under the cursor ----------------------------------------------------------------------------------------

const charts = new Map(); // stage -> what is needed to read it

function readCharts() {
  charts.clear();
  for (const figure of document.querySelectorAll("figure.chart")) {
    const block = figure.querySelector(".values");
    const stage = figure.querySelector(".stage");
    if (!block || !stage) continue;
    const cursor = document.createElement("div");
    const when = document.createElement("div");
    cursor.className = "cursor";
    when.className = "when";
    cursor.hidden = when.hidden = true;
    stage.append(cursor, when);
    const outputs = figure.querySelectorAll(".legend .value");
    charts.set(stage, { ...JSON.parse(block.textContent), cursor, when, outputs, at: null });
  }
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function plot(stage, chart) { // the plot's left edge and width in pixels of the screen
  const svg = [...stage.querySelectorAll("svg")].find((each) => each.clientWidth > 0);
  const scale = svg ? svg.clientWidth / svg.viewBox.baseVal.width : 1;
  const width = svg ? (svg.viewBox.baseVal.width - chart.left - chart.right) * scale : 1;
  return { left: chart.left * scale, width };
}

function show(x) { // a time, in the page's unit; null hides it
  for (const [stage, chart] of charts) {
    chart.at = x;
    chart.cursor.hidden = chart.when.hidden = x === null;
    chart.outputs.forEach((output, i) => {
      const line = chart.lines[i];
      if (!("last" in output.dataset)) output.dataset.last = output.textContent;
      if (x === null || !line.x.length) {
        output.textContent = output.dataset.last;
        return;
      }
      const value = line.y[nearest(line.x, x)];
      output.textContent = value === null ? "n/a" : String(Number(value.toPrecision(4)));
    });
    if (x === null) continue;
    const { left, width } = plot(stage, chart);
    chart.cursor.style.left = `${left + (width * x) / chart.end}px`;
    chart.when.textContent = `${Number(x.toPrecision(4))} ${chart.unit}`;
  }
}

function stageOf(event) {
  const stage = event.target instanceof Element ? event.target.closest(".stage") : null;
  return stage && charts.has(stage) ? stage : null;
}

document.addEventListener("pointermove", (event) => {
  const stage = stageOf(event);
  if (!stage) return;
  const chart = charts.get(stage);
  const { left, width } = plot(stage, chart);
  const part = (event.clientX - stage.getBoundingClientRect().left - left) / width;
  show(Math.min(1, Math.max(0, part)) * chart.end);
});
document.addEventListener("pointerout", (event) => {
  if (event.pointerType === "mouse" && stageOf(event)) show(null);
});
document.addEventListener("keydown", (event) => {
  const stage = stageOf(event);
  if (!stage || event.ctrlKey || event.metaKey || event.altKey) return;
  const chart = charts.get(stage);
  const steps = { ArrowLeft: -0.01, ArrowRight: 0.01, PageDown: -0.1, PageUp: 0.1, Home: -2, End: 2 };
  if (event.key === "Escape") show(null);
  if (!(event.key in steps)) return;
  event.preventDefault();
  const now = chart.at === null ? chart.end / 2 : chart.at;
  show(Math.min(chart.end, Math.max(0, now + steps[event.key] * chart.end)));
  const words = [...chart.outputs].map((output) => output.parentElement.textContent.trim());
  document.getElementById("spoken").textContent = `${chart.when.textContent}: ${words.join(", ")}`;
});
document.addEventListener("focusout", (event) => { if (stageOf(event)) show(null); });

// ---- the next version -----------------------------------------------------------------------------------------------
// Served: the page is asked for again and its parts are exchanged. As a file it can't read itself, so it is loaded anew;
// the browser keeps the place it is scrolled to, this script what is unfolded.

const KEPT = "fasttrain-report-unfolded";

function unfolded() { return [...document.querySelectorAll("details[open]")].map((each) => each.id); }

function unfold(ids) {
  for (const id of ids) {
    const found = document.getElementById(id);
    if (found instanceof HTMLDetailsElement) found.open = true;
  }
}

function store(value) {
  try {
    if (value === undefined) return JSON.parse(sessionStorage.getItem(KEPT) || "[]");
    sessionStorage.setItem(KEPT, JSON.stringify(value));
  } catch { /* storage is switched off: folds are closed again then */ }
  return [];
}

function busy() { // somebody reads or selects: not now
  const chosen = document.getSelection();
  return document.hidden || (chosen !== null && !chosen.isCollapsed);
}

let tag = null;

async function exchange() {
  const answer = await fetch(location.pathname, tag ? { headers: { "If-None-Match": tag } } : {});
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  tag = answer.headers.get("ETag");
  const next = new DOMParser().parseFromString(await answer.text(), "text/html");
  const open = unfolded();
  const focused = document.activeElement && document.activeElement.closest("figure.chart");
  const at = [...charts.values()].map((chart) => chart.at).find((each) => each !== null);
  for (const part of ["main", "header.top", "nav"]) {
    const fresh = next.querySelector(part);
    if (fresh) document.querySelector(part).replaceWith(document.importNode(fresh, true));
  }
  document.body.dataset.live = next.body.dataset.live || "";
  readCharts();
  unfold(open);
  if (focused) document.querySelector(`#${CSS.escape(focused.id)} .stage`)?.focus({ preventScroll: true });
  if (at !== undefined) show(at);
}

function stopped() {
  document.getElementById("stamp").textContent += ", no longer updated";
}

function wait() {
  const seconds = Number(document.body.dataset.live);
  if (!(seconds > 0)) return;
  setTimeout(async () => {
    if (busy()) return wait();
    if (location.protocol === "file:") {
      store(unfolded());
      return location.reload();
    }
    try {
      await exchange();
    } catch {
      return stopped();
    }
    wait();
  }, seconds * 1000);
}

readCharts();
if (document.body.dataset.live) unfold(store());
wait();
