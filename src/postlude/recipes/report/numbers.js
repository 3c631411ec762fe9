"use strict";  // numbers of the charts, without the page
function formatNumber(value) {  // as format_number in formatting.py
  const size = Math.abs(value);
  if (!Number.isFinite(value) || value === 0) return String(value);
  if (size >= 1e4 && size < 1e7) return Math.round(value).toLocaleString("en");
  if (size >= 1e7 || size < 1e-3) return exponential(value, size >= 1e7 ? 2 : 1);
  return String(Number(value.toPrecision(4)));
}
function exponential(value, digits) { return value.toExponential(digits).replace(/e([+-])(\d)$/, "e$10$2"); }
function formatSeconds(value) { return value < 60 ? formatNumber(value) + " s" : Math.floor(value / 60) + ":" + String(Math.floor(value % 60)).padStart(2, "0"); }
function tickLabel(value, increment) {  // the fewest digits that distinguish ticks an increment apart
  const size = Math.abs(value), power = Math.floor(Math.log10(increment) + 1e-9), first = increment / 10 ** power;
  if (!size) return "0";
  const after = Math.abs(first - Math.round(first)) > 1e-6 ? 1 : 0;  // 2.5 has a digit more than 2
  const digits = Math.min(17, Math.max(1, Math.floor(Math.log10(size) + 1e-9) - power + 1 + after));
  if (size >= 1e15 || size < 1e-3) return exponential(value, digits - 1).replace(/\.?0+e/, "e");
  if (size >= 1e4 && power + 1 > after) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits }).replace("K", "k");
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(20, Math.max(0, after - power)), useGrouping: false });
}
function valueRange(values) {  // of all, or of the inner 98 % if outliers would flatten the rest; a few more at each end
  const sorted = Float64Array.from(values).sort(), count = sorted.length;
  if (!count) return null;
  let low = sorted[0], high = sorted[count - 1];
  const innerLow = sorted[Math.floor((count - 1) * 0.01)], innerHigh = sorted[Math.ceil((count - 1) * 0.99)], inner = innerHigh - innerLow;
  if (inner > 0 && high - low > 5 * inner) {
    low = Math.max(low, innerLow - inner / 4);
    high = Math.min(high, innerHigh + inner / 4);
  }
  if (low === high) return [Math.min(1.25 * low, 0), Math.max(1.25 * high, low ? 0 : 1)];
  const margin = high / 20 - low / 20;
  return [low - margin, high + margin];
}
function isNoisy(values) {  // whether a smoothed line says more than the values; a short or smooth series has none
  let travelled = 0, low = values[0], high = values[0];
  for (let index = 1; index < values.length; index++) {
    travelled += Math.abs(values[index] - values[index - 1]);
    low = Math.min(low, values[index]);
    high = Math.max(high, values[index]);
  }
  return values.length >= 20 && travelled > 3 * (high - low);
}
function runningMean(values, share) {  // over a share of the series
  const half = Math.max(1, Math.round(share * values.length / 2)), sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, index) => {
    const first = Math.max(0, index - half), last = Math.min(values.length, index + half + 1);
    return (sums[last] - sums[first]) / (last - first);
  });
}
function logTicks(low, high) {  // round numbers of a logarithmic axis; none is farther than its neighbours need
  const ratio = high / low, digits = ratio < 20 ? [1, 2, 3, 5, 7] : ratio < 1000 ? [1, 3] : [1];
  const ticks = [], every = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / 6));
  if (ratio < 5) {
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find(digit => digit * power >= rough) * power;
    for (let tick = Math.ceil(low / step); tick * step <= high; tick++) ticks.push(tick * step);
    return ticks;
  }
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) for (const digit of digits) {
    if (digit * 10 ** power >= low && digit * 10 ** power <= high) ticks.push(digit * 10 ** power);
  }
  return ticks;
}
