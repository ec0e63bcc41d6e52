// The segment map: every run of mapped memory, in rows; what is in use, what lies free between.

function segmentsSection() {
  const devices = data.devices.filter((d) => d.segments.length > 0);
  if (devices.length === 0) return null;
  let device = devices[0];
  const plot = el("div", { class: "plot" });
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const facts = el("p", { class: "lead" });
  let redraw = () => {};
  const picked = (next) => { device = next; redraw(); };
  const legend = [["var(--leak)", "sites of findings"], ["var(--old)", "born in the first step"], ["var(--young)", "born later"], ["var(--free)", "free"]]
    .filter(([colour]) => colour !== "var(--leak)" || data.findings.length > 0);
  const root = section("segments", "Segments", facts,
    el("div", { class: "card" },
      el("div", { class: "tools" }, devicePicker("Device of the segments", devices, picked),
        legend.map(([colour, label]) => el("span", {}, el("span", { class: "key", style: `background:${colour};border:1px solid var(--line)` }), " " + label)),
        el("span", { style: "color:var(--soft)" }, "a vertical bar begins a segment; paler: partly in use")),
      plot, readout));
  document.getElementById("content").append(root);
  redraw = whenSized(plot, (width) => drawSegments(plot, readout, facts, device, width));
  return null;
}

function drawSegments(plot, readout, facts, device, width) {
  const total = device.segments.reduce((sum, s) => sum + s.size, 0);
  let used = 0, largest = 0, holes = 0;
  for (const s of device.segments) {
    for (const [size, inUse] of s.runs) {
      used += inUse;
      if (inUse === 0) { holes += 1; largest = Math.max(largest, size); }
    }
  }
  const out = device.segments_left_out[0];
  facts.textContent = `${plural(device.segments.length, "segment")}, ${bytes(total)} mapped, ${bytes(used)} in use (${share(used, total)}), ` +
    `${bytes(total - used)} free` + (holes ? ` in at least ${plural(holes, "gap")}, the largest ${bytes(largest)}` : "") + " when the report was written." +
    (out > 0 ? ` ${plural(out, "smaller segment")} (${bytes(device.segments_left_out[1])}) not shown.` : "");
  const lines = Math.max(2, Math.min(width < 560 ? 28 : 18, Math.ceil(total / (8 * 1048576))));
  const perLine = total / lines;
  const row = 22, tall = 17;
  const image = shape("svg", { viewBox: `0 0 ${width} ${lines * row}`, height: lines * row, role: "img", tabindex: 0, "aria-label": "Segment map: " + facts.textContent + " Arrow keys read runs." });
  const marks = shape("g", {});
  const runs = [];
  let at = 0;
  const paint = (from, size, colour, opacity, into) => {
    // A run may go on in the next rows.
    while (size > 0.5) {
      const line = Math.min(lines - 1, Math.floor((from + 0.5) / perLine));
      const part = line === lines - 1 ? size : Math.min(size, (line + 1) * perLine - from);
      if (part <= 0) break;
      const rect = shape("rect", { x: ((from - line * perLine) / perLine * width).toFixed(2), y: line * row, width: Math.max(part / perLine * width, 0.4).toFixed(2), height: tall, fill: colour, opacity });
      image.append(rect);
      if (into) into.push(rect);
      from += part; size -= part;
    }
  };
  for (const s of device.segments) {
    const start = at;
    for (const [size, inUse, stack, step] of s.runs) {
      const run = { size, inUse, stack, step, segment: s, from: at, rects: [] };
      paint(at, size, "var(--free)", 1, null);
      if (inUse > 0) {
        const colour = isAccused(device.device, stack) ? "var(--leak)" : step === 0 ? "var(--old)" : "var(--young)";
        paint(at, size, colour, (0.25 + 0.75 * inUse / size).toFixed(2), run.rects);
      }
      runs.push(run);
      at += size;
    }
    const line = Math.min(lines - 1, Math.floor((start + 0.5) / perLine));
    const x = (start - line * perLine) / perLine * width;
    marks.append(shape("line", { x1: x, x2: x, y1: line * row - 1, y2: line * row + tall + 1, stroke: "var(--ink)", "stroke-width": 1.4 }));
  }
  image.append(marks);
  const frame = shape("rect", { height: tall, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden" });
  image.append(frame);
  const byStack = new Map(data.sites.filter((s) => s.device === device.device).map((s) => [s.stack_id, s]));
  let chosen = -1;
  const read = (index) => {
    if (index < 0 || index >= runs.length) return;
    chosen = index;
    const run = runs[index];
    const line = Math.min(lines - 1, Math.floor((run.from + 0.5) / perLine));
    const x = (run.from - line * perLine) / perLine * width;
    frame.setAttribute("x", x); frame.setAttribute("y", line * row);
    frame.setAttribute("width", Math.max(1, Math.min(run.size / perLine * width, width - x)));
    frame.setAttribute("visibility", "visible");
    const site = byStack.get(run.stack);
    const who = run.inUse === 0 ? "" : site ? "   " + place(site) : run.stack ? "   a site that is not listed" : "";
    readout.replaceChildren(el("b", {}, bytes(run.size)), run.inUse === 0 ? " free" : run.inUse === run.size ? " in use" : ` of which ${bytes(run.inUse)} in use`,
      run.inUse > 0 ? `, born in step ${count(run.step)}` : "", who,
      `   segment of ${bytes(run.segment.size)}` + (run.segment.large ? " for large blocks" : " for small blocks") + (run.segment.stream ? `, stream 0x${run.segment.stream.toString(16)}` : ""));
  };
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top) / row);
    const where = line * perLine + (event.clientX - box.left) / width * perLine;
    read(runs.findIndex((run) => where >= run.from && where < run.from + run.size));
  });
  image.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: runs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    read(to);
  });
  plot.replaceChildren(image);
  readout.textContent = "Point at the map, or focus it and press the arrow keys, to read a run.";
}
