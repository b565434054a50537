// Puts the sections together; on a live page asks for new data and puts them together again.

const SECTIONS = [
  ["verdict", "Verdict", verdicts], ["time", "Where a step's time goes", stepTime], ["curves", "Curves", curveGrid],
  ["predicted", "Predicted and measured", predicted], ["timeline", "Timeline of a step", timelines], ["units", "Latency of each unit", latencies],
  ["over-time", "Time and bytes over the run", overTime], ["memory", "Memory", memory], ["gpus", "GPUs", gpus],
  ["about", "Configuration and machine", about],
];
const NAV = { verdict: "Verdict", time: "Time", curves: "Curves", predicted: "Predicted", timeline: "Timeline", units: "Units", "over-time": "Over time", memory: "Memory", gpus: "GPUs", about: "Setup" };

const main = document.getElementById("main");
let built = new Map();

/** Draw `data`; a section whose data is what it was stays as it is, with its zoom and its search. */
function render(data) {
  const { runs } = data;
  if (!runs.length) {
    main.replaceChildren(make("h1", {}, "Nothing to show yet"), make("p", { class: "card" }, data.waiting));
    return;
  }
  const used = (make_) => JSON.stringify(runs.map((run) => SOURCES.get(make_)?.map((key) => run[key]) ?? null));
  const links = [], parts = [make("div", { id: "top" }, head(runs), figures(runs))];
  const kept = new Map();
  for (const [id, title, make_] of SECTIONS) {
    const key = used(make_);
    const before = built.get(id);
    const content = before && before.key === key ? before.content : make_(runs);
    kept.set(id, { key, content });
    if (!content) continue;
    links.push(make("a", { href: `#${id}` }, NAV[id]));
    parts.push(make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), content));
  }
  built = kept;
  main.replaceChildren(...parts);
  document.getElementById("nav").replaceChildren(...links);
  const long = runs.some((run) => run.downsampled);
  document.getElementById("foot").textContent = `Made by outsize ${data.version} from files of the run; nothing is loaded from anywhere.` +
    (long ? " Curves keep the least and the greatest step of each of 500 parts of the run; bold lines are means over a hundredth of it; shares and rates are means over 250 parts." : "");
}
const SOURCES = new Map([
  [verdicts, ["name", "verdict", "fallbacks", "figures"]], [stepTime, ["name", "waits"]], [curveGrid, ["name", "curves"]], [predicted, ["name", "prediction"]],
  [timelines, ["name", "timeline"]], [latencies, ["name", "timeline"]], [overTime, ["name", "shares", "rates"]], [memory, ["name", "memory"]], [gpus, ["name", "gpus"]], [about, ["name", "config", "about", "machine"]],
]);

const themeButton = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const nameTheme = () => { themeButton.textContent = isDark() ? "Light" : "Dark"; };
themeButton.addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); dispatchEvent(new Event("themechange")); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { nameTheme(); dispatchEvent(new Event("themechange")); });
nameTheme();

const first = JSON.parse(document.getElementById("data").textContent);
let newest = first;
render(first);

/** Say that the server does not answer, or that it does again. */
function lost(isLost) {
  const [pill] = document.getElementsByClassName("pill");
  if (isLost && pill) { pill.className = "pill stopped"; pill.textContent = "no answer: what was known last"; }
  else if (!isLost && pill?.textContent.startsWith("no answer")) { built = new Map(); render(newest); }
}

/** A live page asks again after as long as the server says; it goes on when the server is back. */
async function follow(every) {
  for (let known = first.version_of_data;;) {
    await new Promise((done) => { setTimeout(done, every); });
    if (document.hidden) continue;
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: { "If-None-Match": `"${known}"` } });
      lost(!answer.ok && answer.status !== 304);
      if (answer.status !== 200) continue;
      newest = await answer.json();
      known = newest.version_of_data;
      const at = scrollY;
      render(newest);
      scrollTo({ top: at, behavior: "instant" });
    } catch { lost(true); }
  }
}
if (first.refresh_s) follow(1000 * first.refresh_s);
