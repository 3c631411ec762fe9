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
function number(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(3) : String(+value.toPrecision(5));
}
function nearest(steps, step) {  // index of the closest of sorted steps
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

for (const figure of document.querySelectorAll("figure[data-curve]")) {
  const svg = figure.querySelector("svg"), cross = svg.querySelector(".cross");
  let data = null;
  svg.addEventListener("pointermove", event => {
    data ??= JSON.parse(figure.querySelector("script").textContent);
    const box = svg.getBoundingClientRect(), [left, right, first, last] = data.x;
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = first + (x - left) / (right - left) * (last - first);
    const lines = [];
    let at = null;
    for (const run of data.runs) {
      if (document.body.classList.contains("hide" + run.run)) continue;
      const index = nearest(run.steps, wanted), step = run.steps[index];
      if (at === null || Math.abs(step - wanted) < Math.abs(at - wanted)) at = step;
      lines.push((names.length > 1 ? names[run.run] + ", " : "") + "step " + step + ": " + number(run.values[index]));
    }
    if (at === null) return;
    const place = left + (right - left) * (last > first ? (at - first) / (last - first) : 0.5);
    cross.setAttribute("x1", place);
    cross.setAttribute("x2", place);
    cross.style.visibility = "visible";
    show(event, lines.join("\n"));
  });
  svg.addEventListener("pointerleave", () => { cross.style.visibility = "hidden"; hide(); });
}

document.addEventListener("pointerover", event => {
  const from = event.target.closest("[data-tip], [data-p]");
  if (!from) { if (!event.target.closest("figure[data-curve] svg")) hide(); return; }
  if (from.dataset.tip) { show(event, from.dataset.tip); return; }
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
