// What is said in words: the verdict, the findings, what is not a leak, what was left out.

function verdictBlock() {
  const run = data.run;
  const words = { leak: ["!", "Leak"], fragmentation: ["!", "Fragmentation"], clean: ["✓", "No leak"], undecided: ["?", "Undecided"] };
  const [sign, title] = words[data.verdict];
  const facts = [plural(run.steps, "step")];
  if (run.epochs > 0) facts.push(plural(run.epochs, "epoch"));
  if (run.step_seconds) facts.push(run.step_seconds < 1 ? Math.round(run.step_seconds * 1000) + " ms per step" : run.step_seconds.toFixed(2) + " s per step");
  if (run.mode) facts.push("mode " + run.mode);
  if (run.world_size > 1) facts.push(`rank ${run.rank} of ${run.world_size}`);
  facts.push("process " + run.pid);
  if (run.time) facts.push("written " + new Date(run.time * 1000).toLocaleString() + (run.written ? ` (${run.written})` : ""));
  return el("div", {},
    el("div", { class: "verdict " + data.verdict },
      el("span", { class: "badge", "aria-hidden": "true" }, sign), el("h1", {}, title),
      el("p", {}, data.reason),
      el("p", { class: "command" }, el("code", {}, run.command.join(" ")), el("br"), facts.join(" · "))),
    ...data.devices.map(figures));
}

function figures(device) {
  const last = device.series[device.series.length - 1];
  const rows = [];
  if (last) {
    rows.push(["allocated", bytes(last.allocated), "at the last step"], ["reserved", bytes(last.reserved), share(last.allocated, last.reserved) + " of it allocated"]);
  } else rows.push(["live", bytes(device.live_bytes), "now"]);
  rows.push(["peak", bytes(device.peak_bytes), "requested, in step " + count(device.peak_step)]);
  const growth = data.findings.filter((f) => f.device === device.device && f.class !== "one-off").reduce((sum, f) => sum + f.bytes_per_step, 0);
  if (growth > 0) rows.push(["growth", bytes(growth), "per step, in findings"]);
  rows.push(["live blocks", count(device.live_blocks), plural(device.sites, "site")]);
  if (device.total_bytes) rows.push(["memory", bytes(device.total_bytes), "of the device"]);
  if (device.outside_bytes) rows.push(["outside", bytes(device.outside_bytes), "not from this allocator"]);
  return el("dl", { class: "figures", "aria-label": deviceName(device.device) }, several ? el("div", {}, el("dt", {}, "device"), el("dd", {}, deviceName(device.device))) : null,
    rows.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note)))));
}

function rate(f) {
  switch (f.class) {
    case "per-epoch": return `+${bytes(f.bytes_per_epoch)}/epoch`;
    case "sporadic": return `+${bytes(f.bytes_per_step)}/step on average`;
    case "one-off": return `${bytes(f.live_bytes)} once`;
    case "fragmentation": return `+${bytes(f.bytes_per_step)}/step reserved`;
    default: return `+${bytes(f.bytes_per_step)}/step`;
  }
}

function findingsSection() {
  if (data.findings.length === 0) {
    const said = { clean: "Nothing accumulated.", undecided: "Nothing can be said yet: " + data.reason + "." }[data.verdict] || "";
    return section("findings", "Findings", el("p", { class: "lead" }, "None. " + said));
  }
  return section("findings", "Findings", data.findings.map(findingCard));
}

function findingCard(f) {
  const torn = f.class === "fragmentation";
  const rows = [];
  const row = (name, ...value) => rows.push(el("dt", {}, name), el("dd", {}, ...value));
  if (torn) row("pushed by", el("span", { class: "mono" }, place(f)));
  else {
    row("allocated at", el("span", { class: "mono" }, place(f)), ` (${plural(f.live_blocks, "live block")}, ${bytes(f.live_bytes)})`);
    const others = f.sites_in_finding.slice(1);
    if (others.length) {
      const lines = [...new Set(others.map((s) => s.allocated_at ? short(s.allocated_at) : "no line of yours"))];
      row("and", plural(others.length, "more site") + " of the same cause: ", el("span", { class: "mono" }, lines.slice(0, 8).join(", ")), lines.length > 8 ? ` and ${lines.length - 8} more` : "");
    }
    if (f.held_by && f.held_by.path) {
      row("held by", el("span", { class: "mono chain" }, f.held_by.path.split(" > ").flatMap((link, at) => at ? [el("b", {}, " › "), link] : [link])));
    } else row("held by", f.holder_note || "C++ or unknown (no Python object was found)");
    if (f.kept_at) row("kept alive at", el("span", { class: "mono", title: f.kept_at.file }, `${base(f.kept_at.file)}:${f.kept_at.line}`), el("code", { class: "code" }, f.kept_at.code.trim()));
  }
  row("fix", el("span", { class: "fix", style: "display:inline-block" }, f.fix));
  row("evidence", f.evidence + ".", f.phase && f.phase !== "other" ? ` Allocated in the ${f.phase} phase.` : "");
  if (f.forecast) row("forecast", `out of memory in about ${plural(f.forecast.steps, "step")}` + (f.forecast.seconds ? `, ${duration(f.forecast.seconds)}` : "") + ", if it goes on");
  if (f.bounded) row("bound", `${count(f.bounded.length)} of ${count(f.bounded.capacity)} places filled`);
  const released = { gc: "gc.collect() frees it", empty_cache: "empty_cache() gives it back", synchronize: "a synchronize frees it", nothing: "neither gc.collect() nor empty_cache() frees it" }[f.released_by];
  if (released) row("released by", released);
  const series = torn ? deviceSeries(f.device) : f.series;
  const stack = stackOf(f);
  return el("article", { class: "card finding", "aria-label": `${f.class} finding` },
    el("header", {},
      el("h3", {}, el("span", { class: "class" }, f.class), el("span", { class: "rate" }, rate(f))),
      el("span", { class: "sure" }, `${Math.round(f.confidence * 100)} % sure, called at step ${count(f.called_at_step)}` + (several ? `, ${deviceName(f.device)}` : ""))),
    el("div", { class: "body" },
      el("div", {}, el("dl", {}, rows), stack.length ? el("details", {}, el("summary", {}, `Stack (${plural(stack.length, "frame")})`), frameList(stack)) : null),
      series.length > 1 ? sparkline(series, torn ? "reserved bytes" : "live bytes of the leading site", 250, 92) : null));
}

function deviceSeries(number) {
  const device = data.devices.find((d) => d.device === number);
  return device ? device.series.map((p) => [p.step, p.reserved, 0]) : [];
}

// A small curve with its first and last value.
function sparkline(series, what, width, height) {
  const first = series[0][0], last = Math.max(series[series.length - 1][0], first + 1);
  const most = Math.max(1, ...series.map((p) => p[1]));
  const x = (step) => 2 + (step - first) / (last - first) * (width - 8);
  const y = (value) => height - 4 - value / most * (height - 10);
  const path = series.map((p, at) => (at ? "L" : "M") + x(p[0]).toFixed(1) + " " + y(p[1]).toFixed(1)).join("");
  const end = series[series.length - 1];
  return el("figure", { class: "plot", style: "max-width:" + width + "px" },
    shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "data-spark": "", "aria-label": `${what}: ${bytes(series[0][1])} at step ${series[0][0]}, ${bytes(end[1])} at step ${end[0]}` },
      shape("line", { class: "axis", x1: 2, x2: width - 2, y1: height - 4, y2: height - 4 }),
      shape("path", { d: path + `L${x(end[0])} ${height - 4}L${x(first)} ${height - 4}Z`, fill: "var(--leak)", opacity: .12 }),
      shape("path", { d: path, fill: "none", stroke: "var(--leak)", "stroke-width": 2 }),
      shape("circle", { cx: x(end[0]), cy: y(end[1]), r: 3, fill: "var(--leak)" })),
    el("figcaption", {}, `${what}: ${bytes(series[0][1])} at step ${count(series[0][0])} → ${bytes(end[1])} at step ${count(end[0])}`));
}

function notLeaksSection() {
  if (data.not_leaks.length === 0) return null;
  return section("notleaks", "Not a leak, because…",
    el("p", { class: "lead" }, "What grew or was suspected, and why it is none."),
    el("ul", { class: "notleaks card" }, data.not_leaks.map((said) => el("li", {},
      el("span", { class: "n" }, bytes(said.bytes)),
      el("span", {}, said.because, el("small", {}, said.allocated_at ? el("span", { class: "mono" }, short(said.allocated_at) + " in " + said.allocated_at.function) : null,
        (said.allocated_at ? "  " : "") + said.what + (several ? ", " + deviceName(said.device) : "")))))));
}

function footer() {
  const foot = document.getElementById("foot");
  foot.append(el("p", {}, `strandline ${data.version}. This page is one file and asks nothing of the network. The same report for programs: report.json.`));
  if (data.left_out.length) foot.append(el("p", {}, "Left out to keep this page small:"), el("ul", {}, data.left_out.map((said) => el("li", {}, said))));
}
