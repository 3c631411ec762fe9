"use strict";
const tip = document.getElementById("tip");
const names = JSON.parse(document.getElementById("names").textContent);

function show(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect(), right = event.clientX + 14, below = event.clientY + 16;
  tip.style.left = Math.max(4, right + box.width > innerWidth ? event.clientX - box.width - 10 : right) + "px";
  tip.style.top = Math.max(4, below + box.height > innerHeight ? event.clientY - box.height - 10 : below) + "px";
}
function hide() { tip.style.display = "none"; }
function nearest(steps, step) {  // index of the closest of sorted steps
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

const figures = [...document.querySelectorAll("figure[data-curve]")].map(figure => ({
  svg: figure.querySelector("svg"), now: figure.querySelector(".now"), rest: figure.querySelector(".now").innerHTML,
  crosses: [...figure.querySelectorAll(".cross")], data: figure.querySelector("script"), plots: null, dots: [],
}));
const hidden = run => document.body.classList.contains("hide" + run);
const plots = figure => figure.plots ??= JSON.parse(figure.data.textContent);

function pointed(figure, event) {  // the plot under the pointer, or the nearest, and the step that is meant
  const box = figure.svg.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * figure.svg.viewBox.baseVal.width;
  let best = null;
  for (const plot of plots(figure)) {
    const [left, right, first, last] = plot.x, held = Math.min(Math.max(x, left), right);
    if (best && best.off <= Math.abs(x - held)) continue;
    best = { plot, off: Math.abs(x - held), step: first + (held - left) / (right - left) * (last - first) };
  }
  return best;
}
function at(plot, step) {  // what each shown run has nearest to a step: [run, index] pairs, and the closest step of all
  let closest = null;
  const found = [];
  for (const run of plot.runs) {
    if (hidden(run.run)) continue;
    const index = nearest(run.steps, step);
    if (closest === null || Math.abs(run.steps[index] - step) < Math.abs(closest - step)) closest = run.steps[index];
    found.push([run, index]);
  }
  return { found, closest };
}
function clear(figure) {
  for (const dot of figure.dots) dot.remove();
  figure.dots = [];
  for (const cross of figure.crosses) cross.style.visibility = "hidden";
}
function mark(figure, step) {  // one figure at a step: a line, a dot on every run, and their values in the caption
  clear(figure);
  const said = [];
  plots(figure).forEach((plot, place) => {
    const [left, right, first, last] = plot.x;
    if (step < first - 0.5 || step > last + 0.5) return;
    const { found, closest } = at(plot, step), cross = figure.crosses[place];
    if (closest === null) return;
    const across = value => left + (right - left) * (last > first ? (value - first) / (last - first) : 0.5);
    cross.setAttribute("x1", across(closest));
    cross.setAttribute("x2", across(closest));
    cross.style.visibility = "visible";
    for (const [run, index] of found) {
      const dot = document.createElementNS(figure.svg.namespaceURI, "circle");
      dot.setAttribute("class", "dot");
      dot.setAttribute("style", "--c:var(--c" + run.run % 8 + ")");
      dot.setAttribute("cx", across(run.steps[index]));
      dot.setAttribute("cy", run.places[index]);
      dot.setAttribute("r", 3);
      figure.svg.append(dot);
      figure.dots.push(dot);
      said.push([run.run, run.values[index] + (run.steps[index] === step ? "" : " (step " + run.steps[index] + ")")]);
    }
  });
  figure.now.replaceChildren(...said.slice(0, 4).map(([run, value]) => {
    const part = document.createElement("b");
    part.textContent = value + " ";
    if (names.length > 1) part.setAttribute("style", "--c:var(--c" + run % 8 + ")");
    return part;
  }));
}
for (const figure of figures) {
  figure.svg.addEventListener("pointermove", event => {
    const meant = pointed(figure, event);
    if (!meant) return;
    const { found, closest } = at(meant.plot, meant.step);
    if (closest === null) return;
    for (const other of figures) mark(other, closest);
    const lines = found.map(([run, index]) =>
      (names.length > 1 ? names[run.run] + " " : "") + (run.steps[index] === closest ? "" : "(step " + run.steps[index] + ") ") + run.values[index]);
    show(event, "step " + closest + "\n" + lines.join("\n"));
  });
  figure.svg.addEventListener("pointerleave", () => {
    for (const other of figures) { clear(other); other.now.innerHTML = other.rest; }
    hide();
  });
}

document.addEventListener("pointerover", event => {
  const from = event.target.closest("[data-tip], [data-p]");
  if (!from) { if (!event.target.closest("figure[data-curve] svg")) hide(); return; }
  if (from.dataset.tip !== undefined) { if (!from.dataset.tip) { hide(); return; } show(event, from.dataset.tip);
    return;
  }
  const logprob = Number(from.dataset.p), id = from.dataset.i;
  const chance = Number.isFinite(logprob) ? "\nprobability " + (100 * Math.exp(logprob)).toPrecision(3) + " %" : "";
  show(event, JSON.stringify(from.textContent.replace("↵\n", "\n")) + (id ? "  token " + id : "") + "\nlog-prob " + from.dataset.p + chance);
});

for (const box of document.querySelectorAll(".legend input")) {
  box.addEventListener("change", () => {
    document.body.classList.toggle("hide" + box.value, !box.checked);
    for (const part of document.querySelectorAll(".r" + box.value)) part.classList.toggle("off", !box.checked);
  });
}
