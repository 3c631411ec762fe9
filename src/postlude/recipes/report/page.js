const report = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement, tip = document.getElementById("tip"), tool = id => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = new Map();  // what is drawn: the uPlot of each element
const hidden = new Set();  // runs
let zoom = null, smoothing = tool("smooth").value / 100, colours = {}, pointer = { clientX: 0, clientY: 0 };

function colour(name, alpha = 1) {  // of the style sheet, as the canvas needs it
  if (!colours[name]) {
    tip.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(tip).color;
    tip.style.color = "";
  }
  return colours[name].replace("rgb(", "rgba(").replace(")", `, ${alpha})`);
}
function make(tag, text, style) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (style !== undefined) element.style.setProperty("--c", `var(--c${style % 8})`);
  return element;
}

function show(...lines) {  // in the box beside the pointer
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), right = pointer.clientX + 14, below = pointer.clientY + 16;
  tip.style.left = Math.max(4, right + box.width > innerWidth ? pointer.clientX - box.width - 10 : right) + "px";
  tip.style.top = Math.max(4, below + box.height > innerHeight ? pointer.clientY - box.height - 10 : below) + "px";
}
function line(text, value, style) {
  const row = make("div", "");
  if (style !== undefined) row.append(Object.assign(make("i", "", style), { className: "swatch" }));
  row.append(text, value === undefined ? "" : make("b", value));
  return row;
}

const labels = (u, splits, axis, space, increment) => splits.map(value => value === null ? "" : tickLabel(value, increment));
const whole = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power));
function axes(steps = {}, values = {}) {
  const plain = { stroke: () => colour("soft"), font: "11px system-ui, sans-serif", ticks: { show: false }, gap: 4, values: labels };
  const width = (u, texts) => 10 + 6.2 * Math.max(1, ...(texts || []).map(text => text.length));
  return [
    { ...plain, grid: { show: false }, space: 60, size: 22, incrs: whole, ...steps },
    { ...plain, grid: { stroke: () => colour("grid"), width: 1 }, space: 27, size: width, ...values },
  ];
}

function options(element, spec, more) {
  return {
    width: element.clientWidth, height: element.clientHeight, legend: { show: false }, padding: [8, 16, 0, 0], ...more,
    cursor: {
      move: (u, left, top) => left > u.over.clientWidth ? [-10, -10] : [left, top],  // another chart's step, beyond this one's
      y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 },
      sync: { key: "steps", scales: ["x", null], setSeries: false, filters: { pub: type => type === "mousemove" || type === "mouseleave" } },
      bind: { dblclick: () => () => { setZoom(null); } },
      ...more.cursor,
    },
    hooks: {
      setCursor: [u => hover(u, element, spec)],
      setSelect: [u => {
        if (u.select.width > 3) setZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
      ...more.hooks,
    },
  };
}

function lines(element, spec) {  // a raw and a smoothed line for every run, each in the run's colour
  const log = element.dataset.log === "on";
  const drawn = series => series.raw ??= [report.steps[series.steps], series.values];
  const limits = valueRange(spec.series.flatMap(series => series.values)) ?? [0, 1];
  const smooth = series => {
    const calm = values => values.map(value => Math.min(Math.max(value, limits[0]), limits[1]));  // so that no outlier moves the mean
    if (!smoothing || !isNoisy(calm(series.values))) return [[], []];
    const [steps, values] = series.means ?? drawn(series);
    return [steps, runningMean(calm(values), smoothing)];
  };
  const data = uPlot.join(spec.series.flatMap(series => [drawn(series), series.smoothed = smooth(series)]));
  return new uPlot(options(element, spec, {
    axes: axes({}, log ? {
      splits: (u, axis, low, high) => logTicks(low, high), filter: (u, splits) => splits, values: (u, splits) => splits.map(formatNumber),
    } : {}),
    scales: {
      x: { time: false, range: (u, low, high) => [low, high] },
      y: { distr: log ? 3 : 1, range: u => visibleRange(u, spec, log) },
    },
    series: [{}, ...spec.series.flatMap(series => {
      const name = "c" + series.run % 8, dash = series.run >= 8 ? [5, 3] : undefined, shown = !hidden.has(series.run);
      const calm = () => series.smoothed[0].length > 0;
      return [
        {
          show: shown, spanGaps: true, dash, width: 1.6, stroke: () => colour(name, calm() ? 0.28 : 1),
          points: { show: series.values.length <= 24, size: 5, fill: () => colour(name) },
        },
        { show: shown, spanGaps: true, dash, width: 2, stroke: () => colour(name), points: { show: false } },
      ];
    })],
    hooks: { drawClear: [u => bands(u, spec)], draw: [u => odd(u, spec)] },
  }), data, element);
}
function visibleRange(u, spec, log) {
  const [first, last] = u.series[0].idxs ?? [0, u.data[0].length - 1], values = [];
  spec.series.forEach((series, place) => {
    if (!hidden.has(series.run)) for (const value of u.data[2 * place + 1].slice(first, last + 1)) if (value !== undefined && value !== null) values.push(value);
  });
  if (!log || !values.length) return valueRange(values) ?? [0, 1];
  const low = Math.min(...values), high = Math.max(...values), margin = Math.max(1.1, (high / low) ** 0.05);
  return [low / margin, high * margin];
}
function bands(u, spec) {  // the phases behind the lines
  const { left, top, width, height } = u.bbox, context = u.ctx;
  const shown = (spec.bands ?? []).filter(([, first, last]) => last > u.scales.x.min && first < u.scales.x.max);
  if (shown.length > 1) shown.forEach(([name, first, last], place) => {
    const start = Math.max(left, u.valToPos(first - 0.5, "x", true)), end = Math.min(left + width, u.valToPos(last + 0.5, "x", true));
    context.fillStyle = colour("soft", place % 2 ? 0.09 : 0.03);
    context.fillRect(start, top, end - start, height);
    context.fillStyle = colour("soft");
    context.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    context.textAlign = "left";
    context.textBaseline = "top";
    if (context.measureText(name).width < end - start - 8) context.fillText(name, start + 4 * devicePixelRatio, top + 3 * devicePixelRatio);
  });
}
function odd(u, spec) {  // a cross at the bottom for each step without a finite value
  const context = u.ctx, size = 3 * devicePixelRatio, bottom = u.bbox.top + u.bbox.height - 2 * size;
  context.strokeStyle = colour("warn");
  context.lineWidth = 1.5 * devicePixelRatio;
  for (const series of spec.series) for (const step of hidden.has(series.run) ? [] : series.odd ?? []) {
    const at = u.valToPos(step, "x", true);
    if (at < u.bbox.left || at > u.bbox.left + u.bbox.width) continue;
    context.beginPath();
    context.moveTo(at - size, bottom - size); context.lineTo(at + size, bottom + size);
    context.moveTo(at + size, bottom - size); context.lineTo(at - size, bottom + size);
    context.stroke();
  }
}

function stack(element, spec) {  // areas one above another; the largest sum is drawn first
  const sums = [], steps = report.steps[spec.series[0].steps];
  spec.series.forEach((series, place) => sums.unshift(series.values.map((value, column) => value + (place ? sums[0][column] : 0))));
  return new uPlot(options(element, spec, {
    axes: axes(), scales: { x: { time: false, range: (u, least, most) => [least, most] }, y: { range: (u, low, high) => [0, high * 1.05 || 1] } },
    series: [{}, ...[...spec.series].reverse().map(series => ({ width: 0, fill: () => colour("c" + series.run % 8), points: { show: false } }))],
    cursor: { points: { show: false } },
  }), [steps, ...sums], element);
}

function heat(element, spec) {  // cells of colour: rows of named layers or experts from the top, or of values from the bottom
  const { edges, rows, names } = spec, columns = edges.length - 1, middles = edges.slice(1).map((edge, column) => (edge + edges[column] - 1) / 2);
  const [low, high] = spec.range ?? [0, rows.length], every = Math.ceil(rows.length / (element.clientHeight / 18));
  const height = (high - low) / rows.length, name = "c" + spec.run % 8;
  const named = names && {
    splits: () => names.map((_, row) => row + 0.5).filter((_, row) => row % every === 0),
    values: (u, splits) => splits.map(split => names[Math.floor(split)]), grid: { show: false },
  };
  return new uPlot(options(element, spec, {
    axes: axes({}, named),
    scales: { x: { time: false, range: (u, least, most) => [least, most] }, y: { range: [low, high], dir: names ? -1 : 1 } },
    series: [{}, { stroke: () => colour("text"), width: 1.5, points: { show: false } }],
    cursor: { points: { show: false } },
    hooks: {
      drawAxes: [u => {
        const context = u.ctx, { left, top, width } = u.bbox;
        context.save();
        context.beginPath();
        context.rect(left, top, width, u.bbox.height);
        context.clip();
        for (let row = 0; row < rows.length; row++) {
          const ends = [u.valToPos(low + height * row, "y", true), u.valToPos(low + height * (row + 1), "y", true)].map(Math.round);
          for (let column = 0; column < columns; column++) {
            const level = rows[row][column];
            if (level === ".") continue;
            const start = Math.round(u.valToPos(edges[column] - 0.5, "x", true)), end = Math.round(u.valToPos(edges[column + 1] - 0.5, "x", true));
            context.fillStyle = level === "0" ? colour("warn") : colour(name, 0.05 + 0.1 * level);
            context.fillRect(start, Math.min(...ends), columns === 1 && !names ? width * level / 9 : end - start, Math.max(1, Math.abs(ends[1] - ends[0])));
          }
        }
        context.restore();
      }],
    },
  }), [middles, columns > 1 && spec.line || middles.map(() => null)], element);
}

function hover(u, element, spec) {  // values at the pointed step: in the caption of every curve, and beside the pointer
  const { idx, idxs, left } = u.cursor, now = element.parentElement.querySelector(".now");
  element.rest ??= [...now.childNodes];
  if (idx === null || idx === undefined || left < 0) { now.replaceChildren(...element.rest); return; }
  let step = spec.edges ? spec.edges[idx] : u.data[0][idx];
  const found = [], several = report.names.length > 1, last = spec.edges ? spec.edges[idx + 1] - 1 : step;
  if (spec.kind === "heat") found.push(...spec.tips[idx].split("\n").map(text => line(text)));
  if (spec.kind === "stack") for (const series of [...spec.series].reverse()) found.push(line(series.name + " ", formatSeconds(series.values[idx]), series.run));
  if (spec.kind === "lines") {
    const near = spec.series.map((series, place) => {
      return { run: series.run, at: hidden.has(series.run) ? null : idxs[2 * place + 1], values: u.data[2 * place + 1] };
    }).filter(({ at }) => Number.isInteger(at));
    const texts = near.map(({ run, at, values }) => {
      const text = formatNumber(values[at]), far = Math.abs(u.data[0][at] - step) > (u.scales.x.max - u.scales.x.min) / 100;
      const words = far ? `${text} (step ${u.data[0][at]})` : text;
      found.push(line(several ? report.names[run] + " " : "", words, run));
      return make("b", words + " ", several ? run : undefined);
    });
    if (near.length) step = u.data[0][near[0].at];
    now.replaceChildren(...texts.slice(0, 4));
  }
  if (element.matches(":hover")) show(line("step " + (spec.edges && last > step ? `${step} to ${last}` : step)), ...found);
}

const kinds = { lines, stack, heat };
function draw(element) {
  const spec = report.charts[element.dataset.chart];
  charts.get(element)?.destroy();
  const chart = kinds[spec.kind](element, spec);
  const steps = chart.data[0], margin = spec.edges || steps.length < 2 ? 0.5 : 0;
  chart.first = (spec.edges?.[0] ?? steps[0] ?? 0) - margin;
  chart.last = (spec.edges ? spec.edges[spec.edges.length - 1] - 1 : steps[steps.length - 1] ?? 0) + margin;
  charts.set(element, chart);
  applyZoom(chart);
}
function applyZoom(chart) {
  const overlaps = zoom && zoom[0] <= chart.last && zoom[1] >= chart.first;
  chart.setScale("x", overlaps ? { min: zoom[0], max: zoom[1] } : { min: chart.first, max: chart.last });
}
function setZoom(range) {
  zoom = range;
  tool("reset").hidden = !range;
  charts.forEach(applyZoom);
}
function redraw() {  // in the colours of the theme
  colours = {};
  charts.forEach(chart => chart.redraw(false));
}

const elements = [...document.querySelectorAll(".chart")];
const visible = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) { visible.unobserve(entry.target); if (!charts.has(entry.target)) draw(entry.target); }
}, { rootMargin: "400px" });
const resized = new ResizeObserver(entries => {
  for (const { target } of entries) if (target.clientWidth) charts.get(target)?.setSize({ width: target.clientWidth, height: target.clientHeight });
});
function button(text, help, press) {
  const made = Object.assign(make("button", text), { onclick: () => press(made) });
  made.dataset.tip = help;
  return made;
}
for (const element of elements) {
  visible.observe(element);
  resized.observe(element);
  const spec = report.charts[element.dataset.chart], buttons = Object.assign(make("span", ""), { className: "buttons" });
  const positive = spec.kind === "lines" && spec.series.every(series => series.values.every(value => value > 0));
  if (positive) buttons.append(button("log", "logarithmic scale", made => {
    element.dataset.log = made.classList.toggle("on") ? "on" : "";
    draw(element);
  }));
  buttons.append(button("⤢", "larger, or as before", () => { element.parentElement.classList.toggle("large"); }));
  element.parentElement.querySelector(".now").before(buttons);
}

tool("smooth").addEventListener("input", event => {
  smoothing = event.target.value / 100;
  for (const [element] of charts) if (report.charts[element.dataset.chart].kind === "lines") draw(element);
});
tool("filter").addEventListener("input", event => {
  for (const section of document.querySelectorAll("section")) {
    const figures = [...section.querySelectorAll("figure")];
    const words = event.target.value.toLowerCase();
    for (const figure of figures) {
      const name = `${figure.dataset.curve ?? figure.dataset.heat} ${figure.querySelector("figcaption").textContent}`;
      figure.classList.toggle("filtered", !name.toLowerCase().includes(words));
    }
    section.classList.toggle("filtered", figures.every(figure => figure.classList.contains("filtered")));
  }
});
tool("reset").addEventListener("click", () => { setZoom(null); });
tool("theme").addEventListener("click", () => { root.dataset.theme = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark"; redraw(); });
dark.addEventListener("change", redraw);
let screenTheme;
addEventListener("beforeprint", () => {
  screenTheme = root.dataset.theme;
  root.dataset.theme = "light";
  for (const element of elements) if (!charts.has(element) && element.clientWidth) draw(element);
  redraw();
});
addEventListener("afterprint", () => { if (screenTheme) root.dataset.theme = screenTheme; else delete root.dataset.theme; redraw(); });
for (const box of document.querySelectorAll(".tools input[type=checkbox]")) {
  box.addEventListener("change", () => {
    hidden[box.checked ? "delete" : "add"](Number(box.value));
    for (const part of document.querySelectorAll(".r" + box.value)) part.classList.toggle("off", !box.checked);
    for (const [element] of charts) if (report.charts[element.dataset.chart].kind === "lines") draw(element);
  });
}

document.addEventListener("pointermove", event => { pointer = event; }, true);
document.addEventListener("pointerover", event => {
  const from = event.target.closest?.("[data-tip], [data-p]");
  if (!from) { if (!event.target.closest?.(".u-over")) tip.hidden = true; return; }
  pointer = event;
  if (from.dataset.tip !== undefined) { tip.hidden = true; if (from.dataset.tip) show(...from.dataset.tip.split("\n").map(text => line(text))); return; }
  const logprob = Number(from.dataset.p), id = from.dataset.i;
  show(line(JSON.stringify(from.textContent.replace("↵\n", "\n")) + (id ? "  token " + id : "")), line("log-prob ", from.dataset.p),
    ...Number.isFinite(logprob) ? [line("probability ", (100 * Math.exp(logprob)).toPrecision(3) + " %")] : []);
});
