// Curves and stacked areas as SVG: drawn to the width that there is, and again when that changes.

const MARGIN = { left: 56, right: 10, top: 8, bottom: 22 };

/** Round steps of 1, 2 or 5 between two values, about as many as asked for. */
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

/** Ticks of bytes go by powers of two, so that their labels are round. */
function unitTicks(low, high, wanted, unit) {
  if (unit === "bytes") {
    const [factor] = BYTES.find(([size]) => high >= size) || [1];
    return ticks(low / factor, high / factor, wanted).map((value) => value * factor);
  }
  return ticks(low, high, wanted);
}

function scale(fromLow, fromHigh, toLow, toHigh) {
  const factor = (toHigh - toLow) / (fromHigh - fromLow || 1);
  return (value) => toLow + (value - fromLow) * factor;
}

/** Call `draw(width)` now and whenever the width of `host` changes. */
function onWidth(host, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(host.clientWidth);
    if (now > 0 && now !== width) { width = now; draw(now); }
  }).observe(host);
}

/** The frame of a chart: grid, axes and their labels. */
function frame(width, height, x, y, xRange, yTicks, unit) {
  const plot = make("g");
  for (const value of yTicks) {
    plot.append(
      make("line", { class: "grid-line", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      make("text", { x: MARGIN.left - 7, y: y(value) + 4, "text-anchor": "end" }, tickText(value, unit)));
  }
  const inside = ticks(xRange[0], xRange[1], Math.min(6, width / 90)).filter((value) => Number.isInteger(value));
  for (const value of inside.length ? inside : [xRange[0]]) {
    plot.append(make("text", { x: x(value), y: height - 5, "text-anchor": "middle" }, value.toLocaleString("en-US")));
  }
  return plot;
}

const pathOf = (points, x, y) => {
  let text = "";
  for (let i = 0; i < points.length; i++) {
    text += `${i ? "L" : "M"}${x(points[i][0]).toFixed(1)} ${y(points[i][1]).toFixed(1)}`;
  }
  return text;
};

/** The point whose x is nearest. */
function nearest(points, at) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (points[middle][0] < at) low = middle; else high = middle; }
  return Math.abs(points[low][0] - at) <= Math.abs(points[high][0] - at) ? points[low] : points[high];
}

/**
 * A figure with one curve or several: `series` of {name, points, smooth, color, budget}. Where there is a smooth curve the
 * points are drawn faintly behind it.
 */
function curves({ heading, unit, series, zero, height = 210, note = "" }) {
  const host = make("div");
  const last = series.map((s) => s.points.at(-1)[1]);
  const all = series.flatMap((s) => s.points);
  const summary = series.map((s) => {
    const values = s.points.map((p) => p[1]);
    return `${s.name || heading}: ${written(values[0], unit)} at step ${s.points[0][0]}, ` +
      `${written(values.at(-1), unit)} at step ${s.points.at(-1)[0]}, ` +
      `least ${written(Math.min(...values), unit)}, greatest ${written(Math.max(...values), unit)}`;
  }).join("; ");
  const figure = make("figure", { class: "card" },
    make("figcaption", {}, heading, make("span", { class: "now" }, note || last.map((v) => written(v, unit)).join(" · "))),
    host);
  if (series.length > 1) {
    figure.append(make("div", { class: "legend" }, series.map((s) => make("span", {}, swatch(s.color), s.name))));
  }
  const xs = all.map((p) => p[0]);
  const xRange = [Math.min(...xs), Math.max(...xs)];
  if (xRange[0] === xRange[1]) xRange[1] += 1;
  const yRange = rangeOf(series, zero);
  onWidth(host, (width) => {
    const x = scale(xRange[0], xRange[1], MARGIN.left, width - MARGIN.right);
    const y = scale(yRange[0], yRange[1], height - MARGIN.bottom, MARGIN.top);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": summary },
      frame(width, height, x, y, xRange, unitTicks(yRange[0], yRange[1], 5, unit), unit));
    for (const s of series) {
      if (s.budget && s.budget <= yRange[1]) {
        svg.append(make("line", { class: "budget", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(s.budget), y2: y(s.budget) }));
      }
      svg.append(make("path", { class: s.smooth ? "raw" : "line", d: pathOf(s.points, x, y), style: { stroke: s.color } }));
      if (s.smooth) svg.append(make("path", { class: "line", d: pathOf(s.smooth, x, y), style: { stroke: s.color } }));
      if (s.points.length === 1) {
        svg.append(make("circle", { cx: x(s.points[0][0]), cy: y(s.points[0][1]), r: 3, style: { fill: s.color } }));
      }
    }
    const marks = make("g");
    svg.append(marks);
    svg.addEventListener("pointermove", (event) => {
      const at = scale(MARGIN.left, width - MARGIN.right, xRange[0], xRange[1])(event.clientX - svg.getBoundingClientRect().left);
      const found = series.map((s) => nearest(s.points, at));
      marks.replaceChildren(
        make("line", { class: "cross", x1: x(found[0][0]), x2: x(found[0][0]), y1: MARGIN.top, y2: height - MARGIN.bottom }),
        ...found.map((p, i) => make("circle", { cx: x(p[0]), cy: y(p[1]), r: 3.5, style: { fill: series[i].color } })));
      showTip(event, [`step ${found[0][0].toLocaleString("en-US")}`,
        ...found.map((p, i) => (series.length > 1 ? `${series[i].name}: ` : "") + written(p[1], unit))]);
    });
    svg.addEventListener("pointerleave", () => { marks.replaceChildren(); showTip(null, null); });
    host.replaceChildren(svg);
  });
  return figure;
}

function rangeOf(series, zero) {
  const values = series.flatMap((s) => s.points.map((p) => p[1]));
  let low = Math.min(...values), high = Math.max(...values);
  const budgets = series.map((s) => s.budget).filter((b) => b && b < 3 * high);
  if (budgets.length) high = Math.max(high, ...budgets) * 1.02;
  if (zero) low = Math.min(0, low);
  if (high === low) high = low + (Math.abs(low) || 1);
  const room = (high - low) * 0.05;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

/** Shares of a step over time, stacked to one. */
function stackedShares(heading, { steps, causes, rows }, height = 230) {
  const host = make("div");
  const mean = rows.map((row) => row.reduce((sum, v) => sum + v, 0) / row.length);
  const figure = make("figure", { class: "card" },
    make("figcaption", {}, heading, make("span", { class: "now" }, `compute ${percent(mean[causes.indexOf("compute")])}`)),
    host,
    make("div", { class: "legend" }, causes.map((cause) => make("span", {}, swatch(causeColor(cause)), cause))));
  onWidth(host, (width) => {
    const xRange = [steps[0], steps.length > 1 ? steps.at(-1) : steps[0] + 1];
    const x = scale(xRange[0], xRange[1], MARGIN.left, width - MARGIN.right);
    const y = scale(0, 1, height - MARGIN.bottom, MARGIN.top);
    const label = causes.map((cause, i) => `${cause} ${percent(mean[i])}`).join(", ");
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Mean shares of a step: ${label}` });
    svg.append(frame(width, height, x, y, xRange, [0, 0.25, 0.5, 0.75, 1], "share"));
    const base = steps.map(() => 0);
    const at = steps.length > 1 ? steps : [steps[0], steps[0] + 1];
    causes.forEach((cause, row) => {
      const low = base.map((v) => v);
      rows[row].forEach((v, i) => { base[i] = Math.min(1, base[i] + v); });
      const top = at.map((s, i) => [s, base[Math.min(i, base.length - 1)]]);
      const under = at.map((s, i) => [s, low[Math.min(i, low.length - 1)]]).reverse();
      svg.append(make("path", { d: `${pathOf(top, x, y)}${pathOf(under, x, y).replace("M", "L")}Z`, style: { fill: causeColor(cause) } }));
    });
    const marks = make("g");
    svg.append(marks);
    svg.addEventListener("pointermove", (event) => {
      const value = scale(MARGIN.left, width - MARGIN.right, xRange[0], xRange[1])(event.clientX - svg.getBoundingClientRect().left);
      const step = nearest(steps.map((s) => [s]), value)[0];
      const index = steps.indexOf(step);
      marks.replaceChildren(make("line", { class: "cross", y1: MARGIN.top, y2: height - MARGIN.bottom, x1: x(step), x2: x(step) }));
      showTip(event, [`step ${step.toLocaleString("en-US")}`,
        ...causes.map((cause, row) => [cause, rows[row][index]]).filter(([, v]) => v >= 0.0005)
          .map(([cause, v]) => [swatch(causeColor(cause)), ` ${cause} ${percent(v)}`])]);
    });
    svg.addEventListener("pointerleave", () => { marks.replaceChildren(); showTip(null, null); });
    host.replaceChildren(svg);
  });
  return figure;
}
