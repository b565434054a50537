// The sections of a page, each made of the data of one run or of two beside each other. A section without data is null.

const nameOf = (run, runs) => (runs.length > 1 ? run.name : "");
const titled = (run, runs) => (runs.length > 1 ? make("h3", {}, swatch(RUN_COLORS[runs.indexOf(run)]), ` ${run.name}`) : null);

function head(runs) {
  const about = (run) => {
    const { about: a, status: s } = run;
    return make("div", { class: "sub" },
      make("span", { class: `pill ${s.state}` }, s.state),
      make("span", {}, `step ${s.done.toLocaleString("en-US")}${s.total ? ` of ${s.total.toLocaleString("en-US")}` : ""}`),
      a.model ? make("span", {}, `${a.model}, ${count(a.num_parameters)} parameters`) : null,
      a.dtype ? make("span", {}, a.dtype) : null,
      a.device_names ? make("span", {}, [...new Set(a.device_names)].join(", ")) : null,
      s.started ? make("span", {}, `begun ${new Date(1000 * s.started).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" })}`) : null);
  };
  if (runs.length === 1) return make("div", {}, make("h1", {}, runs[0].name), about(runs[0]));
  return make("div", {}, make("h1", {}, runs.map((run) => run.name).join(" and ")),
    ...runs.map((run) => make("div", { style: { "margin-top": ".5rem" } }, titled(run, runs), about(run))));
}

const FIGURES = [
  ["Loss", (f) => digits(f.last_loss, 4), (f) => `from ${digits(f.first_loss, 4)}, least ${digits(f.least_loss, 4)}`, "last_loss", -1],
  ["Throughput", (f) => `${digits(f.tokens_per_s)} tokens/s`, (f) => `over ${f.typical_steps} typical steps; ${count(f.tokens)} tokens in all`, "tokens_per_s", 1],
  ["Step", (f) => seconds(f.step_s), (f) => `median; ${seconds(f.total_s)} in all`, "step_s", -1],
  ["Compute busy", (f) => percent(f.compute_share), () => "of a typical step", "compute_share", 1],
  ["MFU", (f) => percent(f.mfu), () => "of what the device promises", "mfu", 1],
  ["Peak memory", (f) => bytes(f.peak_rss_bytes), () => "resident, imports included", "peak_rss_bytes", -1],
];

const TOKENS_PER_STEP = ["Tokens per step", (f) => count(f.tokens_per_step), null, "tokens_per_step", 0];

function figures(runs) {
  if (runs.length > 1) return comparison(runs);
  const f = runs[0].figures;
  return make("div", { class: "figures" }, FIGURES.filter(([, , , key]) => f[key] !== null).map(([name, value, note]) => {
    const [amount, ...unit] = value(f).split(" ");
    return make("div", { class: "card figure" }, make("div", { class: "name" }, name),
      make("div", { class: "value" }, amount, " ", make("small", {}, unit.join(" "))),
      make("div", { class: "note" }, note(f)));
  }));
}

/** Figures of two runs side by side, and what the second has made of the first. */
function comparison(runs) {
  const [a, b] = runs.map((run) => run.figures);
  // Steps of other sizes are no better for being shorter, nor a loss after other tokens for being lower.
  const alike = (key) => Math.abs((b[key] || 0) - (a[key] || 0)) <= 0.02 * (a[key] || 0);
  const judged = { step_s: alike("tokens_per_step"), last_loss: alike("tokens") };
  const rows = [...FIGURES, TOKENS_PER_STEP].filter(([, , , key]) => a[key] !== null || b[key] !== null).map(([name, value, , key, better]) => {
    const ratio = a[key] && b[key] ? b[key] / a[key] : null;
    const gained = ratio === null || judged[key] === false || Math.abs(ratio - 1) < 0.02 ? 0 : better * Math.sign(ratio - 1);
    const tone = gained ? (gained > 0 ? "var(--good)" : "var(--bad)") : "var(--soft)";
    const why = judged[key] === false ? make("span", { class: "owner" }, key === "step_s" ? " of another size" : " after other tokens") : null;
    return make("tr", {}, make("td", {}, name, why), make("td", { class: "num" }, a[key] === null ? "–" : value(a)),
      make("td", { class: "num" }, b[key] === null ? "–" : value(b)),
      make("td", { class: "num", style: { color: tone } }, ratio === null ? "–" : `${digits(ratio)} ×`));
  });
  return make("div", { class: "card scroll", style: { "margin-top": "1.1rem" } }, make("table", {},
    make("thead", {}, make("tr", {}, make("th", {}), ...runs.map((run) => make("th", { class: "num" }, run.name)), make("th", { class: "num" }, "second over first"))),
    make("tbody", {}, rows)));
}

function verdicts(runs) {
  return make("div", { class: runs.length > 1 ? "runs two" : "runs" }, runs.map((run) => {
    const found = run.verdict.bottleneck;
    if (!found) {
      return make("div", { class: "card verdict" }, titled(run, runs), make("p", { class: "lead" }, "No verdict"),
        make("p", {}, "The heartbeat is of a version that does not tell what lanes did."));
    }
    const good = found.severity === "good";
    const others = run.verdict.findings.filter((f) => f.id !== found.id);
    return make("div", { class: `card verdict ${good ? "good" : ""}` }, titled(run, runs),
      make("p", { class: "lead" }, good ? "Limited by compute, as it should be" : `Limited by ${found.limits}`),
      make("p", {}, `${found.evidence[0].toUpperCase()}${found.evidence.slice(1)}.`),
      make("dl", {}, ...[["To gain", good ? null : found.gain], ["First try", found.fix], ["Likely cause", found.causes[0]], ["To check", found.verify]]
        .filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])),
      others.length ? make("div", { style: { "margin-top": ".8rem" } }, others.map(finding)) : null, signs(run));
  }));
}

function finding(f) {
  return make("details", { class: "finding" },
    make("summary", {}, make("span", { class: `pill ${f.severity}` }, f.severity), f.id.replaceAll("-", " "),
      make("span", { class: "gain" }, f.gain_share === null ? "" : f.gain)),
    make("div", { class: "text" }, make("p", {}, `${f.evidence}. Expected: ${f.expected}.`), make("p", {}, `Fix: ${f.fix}`), make("p", {}, `Check: ${f.verify}`)));
}

/** What did not go as asked, beside doctor's findings. */
function signs(run) {
  const told = Object.entries(run.fallbacks).map(([name, times]) => `${name.replaceAll("_", " ")}: ${times}`);
  if (run.figures.skipped_steps) told.push(`steps skipped, not finite: ${run.figures.skipped_steps}`);
  return told.length ? make("p", { class: "hint" }, `Did not go as asked: ${told.join(", ")}.`) : null;
}

/** Where the time of a typical step goes: one bar, and the waits ranked. */
function stepTime(runs) {
  if (runs.every((run) => !run.waits.length)) return null;
  return make("div", { class: "runs" + (runs.length > 1 ? " two" : "") }, runs.map((run) => {
    const lanes = [...new Set(run.waits.map((w) => w.lane))].sort();
    const byCause = new Map();
    for (const w of run.waits) byCause.set(w.cause, (byCause.get(w.cause) || 0) + w.share / Math.max(1, lanes.length));
    const waited = [...byCause.values()].reduce((sum, v) => sum + v, 0);
    const parts = [["compute", Math.max(0, 1 - waited)], ...[...byCause].sort((a, b) => b[1] - a[1])];
    const label = parts.map(([cause, share]) => `${cause} ${percent(share)}`).join(", ");
    const ranked = run.waits.filter((w) => w.share >= 0.0005).slice(0, 14);
    return make("div", { class: "card" }, titled(run, runs),
      make("div", { class: "stack", role: "img", "aria-label": `A typical step: ${label}` },
        parts.map(([cause, share]) => {
          const part = make("span", { style: { flex: `${share} 0 0`, background: causeColor(cause) } });
          part.addEventListener("pointermove", (event) => showTip(event, [cause, percent(share) + " of a step"]));
          part.addEventListener("pointerleave", () => showTip(null, null));
          return part;
        })),
      make("div", { class: "legend" }, parts.filter(([, share]) => share >= 0.0005).map(([cause, share]) => make("span", {}, swatch(causeColor(cause)), `${cause} ${percent(share)}`))),
      make("details", { open: true }, make("summary", {}, `What compute waited for, by owner${lanes.length > 1 ? "; all workers" : ""}`),
        make("div", { class: "scroll" }, make("table", {},
          make("thead", {}, make("tr", {}, make("th", {}, "waited for"), make("th", {}, "owner"), lanes.length > 1 ? make("th", {}, "lane") : null, make("th", { class: "num" }, "per step"), make("th", { class: "num" }, "share"), make("th", {}))),
          make("tbody", {}, ranked.map((w) => make("tr", {}, make("td", {}, CAUSE_TEXTS[w.cause] || w.cause),
            make("td", { class: "owner" }, w.owner === "none" ? "no lane" : w.owner), lanes.length > 1 ? make("td", { class: "owner" }, w.lane) : null,
            make("td", { class: "num" }, seconds(w.seconds)), make("td", { class: "num" }, percent(w.share)),
            make("td", { class: "bar" }, make("i", { style: { width: `${100 * w.share}%`, background: causeColor(w.cause) } })))))))));
  }));
}

function predicted(runs) {
  if (runs.every((run) => !run.prediction.parts)) return null;
  return make("div", { class: "runs" + (runs.length > 1 ? " two" : "") }, runs.filter((run) => run.prediction.parts).map((run) => {
    const p = run.prediction, off = p.measured_step_s / p.predicted_step_s - 1;
    const parts = p.parts.filter((part) => Math.max(part.predicted_s, part.measured_s) >= 0.002 * p.measured_step_s);
    const most = Math.max(...parts.flatMap((part) => [part.predicted_s, part.measured_s]), 1e-12);
    const main = [...parts].sort((a, b) => Math.abs(b.measured_s - b.predicted_s) - Math.abs(a.measured_s - a.predicted_s))[0];
    const why = main ? ` Most of the difference is ${main.name}: ${signed(main.measured_s - main.predicted_s)}.` : "";
    return make("div", { class: "card" }, titled(run, runs),
      make("p", {}, `A step was predicted to take ${seconds(p.predicted_step_s)} and takes ${seconds(p.measured_step_s)} (${off >= 0 ? "+" : "−"}${percent(Math.abs(off))}).${why}`),
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, make("th", {}, "part of a step"), make("th", { class: "num" }, "predicted"), make("th", { class: "num" }, "measured"), make("th", { class: "num" }, "difference"), make("th", {}))),
        make("tbody", {}, parts.map((part) => make("tr", {}, make("td", {}, part.name), make("td", { class: "num" }, seconds(part.predicted_s)),
          make("td", { class: "num" }, seconds(part.measured_s)), make("td", { class: "num" }, signed(part.measured_s - part.predicted_s)),
          make("td", { class: "bar" }, make("span", { class: "pair" },
            make("i", { style: { width: `${(100 * part.predicted_s) / most}%`, background: "var(--c-between)" } }),
            make("i", { style: { width: `${(100 * part.measured_s) / most}%`, background: "var(--accent)" } })))))))),
      make("div", { class: "legend" }, make("span", {}, swatch("var(--c-between)"), "predicted"), make("span", {}, swatch("var(--accent)"), "measured")));
  }));
}
const signed = (value) => (value < 0 ? "−" : "+") + seconds(Math.abs(value));

function curveGrid(runs) {
  const keys = [...new Set(runs.flatMap((run) => run.curves.map((c) => c.key)))];
  const found = keys.map((key) => {
    const those = runs.map((run) => run.curves.find((c) => c.key === key)).filter(Boolean);
    const series = runs.flatMap((run, i) => {
      const curve = run.curves.find((c) => c.key === key);
      return curve ? [{ name: nameOf(run, runs), points: curve.points, smooth: curve.smooth, color: RUN_COLORS[i] }] : [];
    });
    return curves({ heading: those[0].heading, unit: those[0].unit, zero: those[0].zero, series });
  });
  return make("div", { class: "grid" }, found);
}

const LANE_COLORS = ["var(--c-compute)", "var(--c-weights)", "var(--c-optimizer)", "var(--c-workers)", "var(--c-gradients)", "var(--c-disk)"];

function overTime(runs) {
  const found = [];
  for (const run of runs) {
    if (run.shares.causes.length) found.push(stackedShares(`Where steps go${nameOf(run, runs) && ` · ${run.name}`}`, run.shares));
    if (run.rates.length) {
      found.push(curves({ heading: `Bytes on the wire${nameOf(run, runs) && ` · ${run.name}`}`, unit: "bytes/s", zero: true, note: "mean over whole steps",
        series: run.rates.map((r, i) => ({ ...r, color: LANE_COLORS[i % LANE_COLORS.length] })) }));
    }
  }
  return found.length ? make("div", { class: "grid" }, found) : null;
}

function memory(runs) {
  const found = runs.flatMap((run) => {
    if (!run.memory.length) return [];
    const tiers = run.memory.filter((tier) => tier.points.length && tier.points.some((p) => p[1] > 0));
    return [curves({ heading: `Memory by tier${nameOf(run, runs) && ` · ${run.name}`}`, unit: "bytes", zero: true, note: "reserved by tier, resident of the process", height: 240,
      series: tiers.map((tier, i) => ({ name: tier.name, points: tier.points, color: LANE_COLORS[i % LANE_COLORS.length] })) }),
    make("div", { class: "card" }, make("h3", {}, `Budgets${nameOf(run, runs) && ` · ${run.name}`}`), ...tiers.filter((tier) => tier.classes).map(budget))];
  });
  return found.length ? make("div", { class: "grid" }, found) : null;
}

/** A tier as a bar: the classes that its plan sets aside, against its budget. */
function budget(tier) {
  const used = tier.high_water_bytes || tier.points.at(-1)[1], limit = tier.budget_bytes || used;
  const classes = Object.entries(tier.classes).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
  const planned = classes.reduce((sum, [, size]) => sum + size, 0);
  const rest = Math.max(0, limit - planned);
  return make("div", { style: { margin: ".2rem 0 1rem" } },
    make("figcaption", {}, tier.name, make("span", { class: "now" }, `${bytes(used)} at most${tier.budget_bytes ? ` of ${bytes(limit)}` : ""}`)),
    make("div", { class: "stack thin", role: "img", "aria-label": classes.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") },
      ...classes.map(([name, size], i) => {
        const part = make("span", { style: { flex: `${size} 0 0`, background: LANE_COLORS[i % LANE_COLORS.length] } });
        part.addEventListener("pointermove", (event) => showTip(event, [name, bytes(size)]));
        part.addEventListener("pointerleave", () => showTip(null, null));
        return part;
      }), rest ? make("span", { style: { flex: `${rest} 0 0`, background: "var(--chip)" } }) : null),
    make("div", { class: "legend" }, classes.slice(0, 6).map(([name, size], i) => make("span", {}, swatch(LANE_COLORS[i % LANE_COLORS.length]), `${name} ${bytes(size)}`))));
}

function timelines(runs) {
  const those = runs.filter((run) => run.timeline);
  return those.length ? make("div", { class: "runs" }, those.map((run) => make("div", {}, titled(run, runs), timelineFigure(run.timeline, `Timeline of ${run.name}`)))) : null;
}

/** A row for each unit: what its ops took in the recorded step, and how long compute waited for them. */
function latencies(runs) {
  const cards = runs.filter((run) => run.timeline?.latencies.length).map((run) => {
    const rows = run.timeline.latencies;
    const columns = Object.keys(rows[0]).filter((name) => name !== "unit" && rows.some((row) => row[name] > 0));
    return make("div", { class: "card scroll" }, titled(run, runs), make("table", {},
      make("thead", {}, make("tr", {}, make("th", {}, "unit"), ...columns.map((name) => make("th", { class: "num" }, name === "waited" ? "compute waited" : name)))),
      make("tbody", {}, rows.map((row) => make("tr", {}, make("td", {}, row.unit), ...columns.map((name) => make("td", { class: "num" }, row[name] ? seconds(row[name]) : "–")))))));
  });
  return cards.length ? make("details", {}, make("summary", {}, "Seconds of each unit by what they went into"), cards) : null;
}

function gpus(runs) {
  const rows = runs.flatMap((run) => run.gpus.map((gpu) => make("tr", {}, runs.length > 1 ? make("td", {}, run.name) : null, make("td", {}, `cuda:${gpu.index}`),
    ...[gpu.sm_clock_hz && `${digits(gpu.sm_clock_hz / 1e6, 4)} MHz`, gpu.utilisation_share === null ? null : percent(gpu.utilisation_share), gpu.memory_used_bytes && bytes(gpu.memory_used_bytes),
      gpu.power_w && `${digits(gpu.power_w)} W`, gpu.temperature_c && `${gpu.temperature_c} °C`, gpu.pcie_received_bytes === null ? null : bytes(gpu.pcie_received_bytes), gpu.pcie_sent_bytes === null ? null : bytes(gpu.pcie_sent_bytes), gpu.clock_limits || "nothing"]
      .map((text) => make("td", { class: "num" }, text ?? "–")))));
  return rows.length ? make("div", { class: "card scroll" }, make("table", {}, make("thead", {}, make("tr", {}, runs.length > 1 ? make("th", {}, "run") : null,
    ...["GPU", "clock", "any kernel", "memory", "power", "heat", "PCIe in", "PCIe out", "clock held by"].map((name, i) => make("th", { class: i ? "num" : null }, name)))), make("tbody", {}, rows))) : null;
}

function flat(mapping, prefix = "") {
  return Object.entries(mapping || {}).flatMap(([key, value]) => (isMapping(value) ? flat(value, `${prefix}${key}.`) : [[`${prefix}${key}`, Array.isArray(value) ? value.join(", ") : String(value)]]));
}

/** Tables of keys: of one run by section, of two beside each other with what differs first in colour. */
function settings(runs, part, heading) {
  const maps = runs.map((run) => new Map(flat(run[part])));
  const keys = [...new Set(maps.flatMap((m) => [...m.keys()]))].filter((key) => key !== "units" && maps.some((m) => m.get(key) !== "null"));
  if (!keys.length) return [];
  const differs = (key) => maps.length > 1 && maps[0].get(key) !== maps[1].get(key);
  const sections = Map.groupBy ? Map.groupBy(keys, (key) => key.split(".")[0]) : keys.reduce((m, key) => m.set(key.split(".")[0], [...(m.get(key.split(".")[0]) || []), key]), new Map());
  return [...sections].map(([section, those]) => make("div", { class: "card scroll" }, make("h3", {}, those.some((key) => key.includes(".")) ? `${heading} · ${section}` : heading),
    make("table", {}, make("tbody", {}, [...those].sort((a, b) => differs(b) - differs(a)).map((key) => make("tr", { class: differs(key) ? "changed" : null },
      make("td", {}, key.split(".").slice(1).join(".") || key), ...maps.map((m) => make("td", {}, m.get(key) ?? "–"))))))));
}

function about(runs) {
  const cards = [...settings(runs, "config", "Configuration"), ...settings(runs.map((run) => ({ run: Object.fromEntries(Object.entries(run.about).filter(([, v]) => !Array.isArray(v) || !isMapping(v[0]))) })), "run", "Run"), ...settings(runs, "machine", "Machine")];
  if (!cards.length) return null;
  return runs.length > 1 ? make("div", { class: "keys" }, cards) : make("details", {}, make("summary", {}, "All settings, and what the machine is"), make("div", { class: "keys", style: { "margin-top": ".8rem" } }, cards));
}
