// The timeline of a step on a canvas: lanes as rows, ops as bars. Zoom, pan, hover, and search by unit.

const OP_COLORS = {
  F: "--o-forward", FA: "--o-forward", FP: "--o-forward", FK: "--o-forward", FB: "--o-backward", B: "--o-backward", R: "--o-forward", NORM: "--c-compute", LOAD: "--c-weights",
  READ: "--c-disk", WRITE: "--c-commit", GRAD: "--c-gradients", SUM: "--c-gradients", SAVE: "--c-activations",
  FETCH: "--c-activations", OFFLOAD: "--c-activations", ONLOAD: "--c-activations", SEND: "--c-activations", RECV: "--c-activations", STEP: "--c-optimizer", CLIP: "--c-optimizer",
  COMMIT: "--c-commit", STORE: "--c-checkpoint", FREE: "--c-between", ACC: "--c-between",
};
const OP_TEXTS = {
  F: "forward", FA: "forward whose attention is kept", FP: "forward whose products are kept",
  FK: "forward whose intermediates are kept", FB: "forward and backward of the last unit", B: "backward", R: "recompute", NORM: "gradient norm",
  LOAD: "weights to the device", READ: "read from disk", WRITE: "write to disk", GRAD: "gradient from the device",
  SUM: "gradient sum to the device", SAVE: "activation from the device", FETCH: "activation to the device",
  OFFLOAD: "intermediates from the device", ONLOAD: "intermediates to the device",
  SEND: "gradient of an activation from the device", RECV: "gradient of an activation to the device",
  STEP: "optimizer", CLIP: "clipping", COMMIT: "commit", STORE: "checkpoint", FREE: "slot freed", ACC: "accumulator taken",
};
const ROW = 26, BAR = 18, AXIS = 24, GUTTER = 96, LEAST_SPAN = 2;

/** Ops of a timeline as objects, with their unit. */
function readOps({ ops, texts, units }) {
  return ops.map(([lane, start, length, text, waited, waitedFor]) => {
    const op = texts[text];
    const unit = /^[A-Z]+ (\d+)/.exec(op);
    return { lane, start, length, op, kind: op.split(" ")[0], waited, waitedFor: texts[waitedFor],
      unit: unit ? Number(unit[1]) : null, unitName: unit ? units[Number(unit[1])] || "" : "" };
  });
}

/** Whether an op is what was searched for: a unit's number, part of its name, or part of the op. */
function matches(op, wanted) {
  if (/^\d+$/.test(wanted)) return op.unit === Number(wanted);
  return op.unitName.toLowerCase().includes(wanted) || op.op.toLowerCase().includes(wanted);
}

function timelineFigure(data, label) {
  const all = readOps(data);
  const rows = data.lanes.map((_, lane) => all.filter((op) => op.lane === lane));
  const span = Math.max(data.span_s * 1e6, LEAST_SPAN);
  const state = { from: 0, to: span, wanted: "", found: [], at: -1, width: 0 };
  const height = AXIS + ROW * data.lanes.length + 4;
  const canvas = make("canvas", { tabindex: 0, role: "img", style: { height: `${height}px` },
    "aria-label": `${label}: ${all.length} ops in ${data.lanes.length} lanes over ${seconds(data.span_s)}` +
      (data.rounds.length > 1 ? `, in ${data.rounds.length} rounds. ` : ". ") +
      data.lanes.map((lane, i) => `${lane} busy ${percent(data.busy[i] / data.span_s)}`).join(", ") +
      ". Arrow keys move, plus and minus zoom, 0 shows all." });
  const output = make("output", { "aria-live": "polite" });
  const search = make("input", { type: "search", placeholder: "Unit: its number or part of its name",
    "aria-label": "Search the timeline by unit", list: `units-${label}` });
  const button = (text, name, act) => { const b = make("button", { type: "button", "aria-label": name }, text); b.addEventListener("click", act); return b; };
  const tools = make("div", { class: "tools" }, search,
    button("‹", "Previous match", () => jump(-1)), button("›", "Next match", () => jump(1)),
    button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)), button("All", "Show all", () => show(0, span)), output);

  function show(from, to) {
    const width = Math.min(span, Math.max(LEAST_SPAN, to - from));
    state.from = Math.min(Math.max(0, from), span - width);
    state.to = state.from + width;
    draw();
  }
  const place = () => scale(state.from, state.to, GUTTER, state.width - 6);
  function zoom(factor, around = (state.from + state.to) / 2) {
    show(around - (around - state.from) * factor, around + (state.to - around) * factor);
  }
  function jump(by) {
    if (!state.found.length) return;
    state.at = (state.at + by + state.found.length) % state.found.length;
    const op = state.found[state.at], room = Math.max(op.length * 4, (state.to - state.from) / 2, LEAST_SPAN);
    const width = Math.min(room, Math.max(span / 10, op.length * 4));
    show(op.start + op.length / 2 - width / 2, op.start + op.length / 2 + width / 2);
    say();
  }
  function say() {
    const total = state.found.reduce((sum, op) => sum + op.length, 0) / 1e6;
    output.textContent = state.wanted === "" ? "" : state.found.length === 0 ? "no such unit or op"
      : `${state.found.length} ops, ${seconds(total)} in all` + (state.at >= 0 ? ` · ${state.found[state.at].op}` : "");
  }
  search.addEventListener("input", () => {
    state.wanted = search.value.trim().toLowerCase();
    state.found = state.wanted === "" ? [] : all.filter((op) => matches(op, state.wanted));
    state.at = -1;
    say(); draw();
  });
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); jump(event.shiftKey ? -1 : 1); } });

  function draw() {
    if (!state.width) return;
    const ratio = devicePixelRatio || 1, x = place();
    canvas.width = state.width * ratio; canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    const ink = { faint: color("--faint"), line: color("--line"), grid: color("--grid"), text: color("--ink"), mark: color("--accent") };
    const fills = Object.fromEntries(Object.entries(OP_COLORS).map(([kind, name]) => [kind, color(name)]));
    pen.fillStyle = ink.faint; pen.textAlign = "center";
    for (const at of ticks(state.from / 1e6, state.to / 1e6, state.width / 110)) {
      const left = x(at * 1e6);
      if (left < GUTTER - 1) continue;
      pen.fillText(seconds(at), Math.min(left, state.width - 24), AXIS / 2 - 2);
      pen.fillStyle = ink.grid; pen.fillRect(left, AXIS - 4, 1, height - AXIS); pen.fillStyle = ink.faint;
    }
    data.lanes.forEach((lane, row) => {
      const top = AXIS + row * ROW;
      pen.globalAlpha = 1;
      pen.fillStyle = ink.grid; pen.fillRect(0, top + ROW - 1, state.width, 1);
      pen.fillStyle = ink.text; pen.textAlign = "left"; pen.fillText(lane, 2, top + ROW / 2, GUTTER - 8);
      drawRow(pen, rows[row], top + (ROW - BAR) / 2, x, fills, ink);
    });
    pen.globalAlpha = 1;
    if (data.rounds.length > 1) data.rounds.forEach((start, index) => drawRound(pen, x(start), index + 1, ink));
  }
  function drawRound(pen, left, number, ink) {
    if (left < GUTTER - 1 || left > state.width - 4) return;
    pen.fillStyle = ink.mark; pen.fillRect(left, AXIS - 8, 1, height - AXIS + 8);
    pen.textAlign = "left"; pen.fillText(`round ${number}`, left + 3, AXIS - 5);
  }
  function drawRow(pen, ops, top, x, fills, ink) {
    let drawn = -1;
    pen.save(); pen.beginPath(); pen.rect(GUTTER, 0, state.width - GUTTER - 4, height); pen.clip();
    for (const op of ops) {
      if (op.start + op.length < state.from || op.start > state.to) continue;
      const left = x(op.start), right = Math.max(left + 0.7, x(op.start + op.length) - 0.5);
      const wanted = state.wanted === "" || matches(op, state.wanted);
      if (right < drawn + 0.4 && !(wanted && state.wanted !== "")) continue; // hidden behind what is drawn
      drawn = right;
      pen.globalAlpha = wanted ? 1 : 0.16;
      pen.fillStyle = fills[op.kind] || ink.faint;
      pen.fillRect(left, top, right - left, BAR);
      if (wanted && state.found[state.at] === op) { pen.strokeStyle = ink.text; pen.lineWidth = 1.5; pen.strokeRect(left, top, right - left, BAR); }
      if (right - left > 9 + 6.2 * op.op.length) {
        pen.fillStyle = "#fff"; pen.textAlign = "left";
        if (["F", "FA", "FP", "FK", "R"].includes(op.kind)) pen.fillStyle = "#10203c";
        pen.fillText(op.op, left + 4, top + BAR / 2 + 0.5);
      }
    }
    pen.restore();
  }

  function opAt(event) {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - AXIS) / ROW);
    const time = scale(GUTTER, state.width - 6, state.from, state.to)(event.clientX - box.left);
    const reach = (2 * (state.to - state.from)) / state.width; // two pixels: very short ops can be hit, too
    if (event.clientX - box.left < GUTTER) return null;
    let best = null;
    for (const op of rows[row] || []) {
      if (op.start > time + reach) break;
      if (op.start + op.length >= time - reach && (!best || op.length > 0)) best = op;
    }
    return best;
  }
  const pointers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event); canvas.setPointerCapture(event.pointerId); canvas.classList.add("held");
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    const perPixel = (state.to - state.from) / (state.width - GUTTER);
    if (before && pointers.size === 1) {
      const by = (before.clientX - event.clientX) * perPixel;
      pointers.set(event.pointerId, event);
      show(state.from + by, state.to + by);
    } else if (before && pointers.size === 2) {
      const [other] = [...pointers.values()].filter((p) => p.pointerId !== event.pointerId);
      const factor = Math.abs(before.clientX - other.clientX) / Math.max(20, Math.abs(event.clientX - other.clientX));
      pointers.set(event.pointerId, event);
      zoom(Math.min(2, Math.max(0.5, factor)));
    }
    const op = opAt(event);
    showTip(event, op && [op.op, OP_TEXTS[op.kind] || op.kind, op.unitName && `unit ${op.unitName}`, data.lanes[op.lane],
      `${seconds(op.length / 1e6)}, from ${seconds(op.start / 1e6)}`,
      op.waitedFor && `its lane waited ${seconds(op.waited / 1e6)} for ${op.waitedFor}`].filter(Boolean));
  });
  const release = (event) => { pointers.delete(event.pointerId); canvas.classList.remove("held"); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => showTip(null, null));
  canvas.addEventListener("dblclick", (event) => {
    const time = scale(GUTTER, state.width - 6, state.from, state.to)(event.clientX - canvas.getBoundingClientRect().left);
    zoom(0.4, time);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a page must scroll past
    event.preventDefault();
    const time = scale(GUTTER, state.width - 6, state.from, state.to)(event.clientX - canvas.getBoundingClientRect().left);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, time);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const by = (state.to - state.from) / 5;
    const act = { ArrowLeft: () => show(state.from - by, state.to - by), ArrowRight: () => show(state.from + by, state.to + by),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, span) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  const host = make("div", { class: "timeline" }, canvas);
  onWidth(host, (width) => { state.width = width; draw(); });
  addEventListener("themechange", draw);
  const kinds = [...new Set(all.map((op) => op.kind))].filter((kind) => !["FREE", "ACC", "NORM"].includes(kind));
  return make("div", { class: "card" }, tools, host,
    make("div", { class: "legend" }, kinds.map((kind) => make("span", {}, swatch(`var(${OP_COLORS[kind] || "--faint"})`), `${kind} ${OP_TEXTS[kind] || ""}`))),
    make("p", { class: "hint" }, "Drag to move, Ctrl and wheel or a double click to zoom, arrow keys and + − 0 on the keyboard." +
      (data.left_out ? ` ${data.left_out.toLocaleString("en-US")} ops, the shortest, are left out; timeline.json has them all.` : "")));
}
