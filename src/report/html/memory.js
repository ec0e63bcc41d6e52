// Memory over steps: allocated, reserved, active and peak, with epochs, validations and calls of findings.

const LINES = [
  { key: "reserved", what: "reserved", about: "held by the allocator", dash: "", width: 1.2 },
  { key: "peak", what: "peak", about: "highest within a step", dash: "1 3", width: 1.8 },
  { key: "active", what: "active", about: "in use, or waiting for another stream", dash: "6 4", width: 1.8 },
  { key: "allocated", what: "allocated", about: "in use at the end of a step", dash: "", width: 2.2 },
];

function memorySection() {
  const devices = data.devices.filter((d) => d.series.length > 0);
  if (devices.length === 0) {
    return section("memory", "Memory over steps", el("p", { class: "lead" }, "No step was seen, so there is no curve."));
  }
  let device = devices[0];
  const shown = new Set(["reserved", "peak", "allocated"]);
  if (devices.some((d) => d.series.some((p) => p.active !== p.allocated))) shown.add("active");
  const plot = el("div", { class: "plot" });
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const rest = "Point at the chart, or focus it and press the arrow keys, to read values.";
  readout.textContent = rest;
  let redraw = () => {};
  const toggles = LINES.slice().reverse().map((line) => el("label", { title: line.about },
    el("input", { type: "checkbox", checked: shown.has(line.key), onchange: (event) => {
      if (event.target.checked) shown.add(line.key); else shown.delete(line.key);
      redraw();
    } }), keyOf(line), line.what));
  const phases = el("div", {});
  const picked = (next) => { device = next; readout.textContent = rest; redraw(); fillPhases(phases, device); };
  const root = section("memory", "Memory over steps",
    el("div", { class: "card" },
      el("div", { class: "tools" }, devicePicker("Device of the memory chart", devices, picked), toggles),
      plot, readout),
    phases);
  document.getElementById("content").append(root);
  redraw = whenSized(plot, (width) => drawMemory(plot, readout, device, shown, width));
  fillPhases(phases, device);
  return null;
}

function keyOf(line) {
  const key = shape("svg", { width: 24, height: 10, "aria-hidden": "true" });
  if (line.key === "reserved") key.append(shape("rect", { width: 24, height: 10, fill: "var(--reserved)", opacity: .35 }));
  key.append(shape("line", { x1: 0, x2: 24, y1: line.key === "reserved" ? 1 : 5, y2: line.key === "reserved" ? 1 : 5, stroke: `var(--${line.key})`, "stroke-width": line.width, "stroke-dasharray": line.dash }));
  return key;
}

function drawMemory(plot, readout, device, shown, width) {
  const points = device.series;
  const height = width < 560 ? 240 : 310;
  const box = { left: 66, right: 14, top: 22, bottom: 40 };
  const first = points[0].step;
  const last = Math.max(points[points.length - 1].step, first + 1);
  let most = 1;
  for (const p of points) for (const line of LINES) if (shown.has(line.key)) most = Math.max(most, p[line.key]);
  const capacity = device.total_bytes > 0 && most > device.total_bytes * 0.6 ? device.total_bytes : 0;
  most = Math.max(most, capacity) * 1.04;
  const x = (step) => box.left + (step - first) / (last - first) * (width - box.left - box.right);
  const y = (value) => height - box.bottom - value / most * (height - box.top - box.bottom);
  const end = points[points.length - 1];
  const image = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label":
    `Memory of ${deviceName(device.device)} over steps ${first} to ${end.step}: allocated from ${bytes(points[0].allocated)} to ${bytes(end.allocated)}, ` +
    `reserved ${bytes(end.reserved)}, peak ${bytes(device.peak_bytes)} in step ${device.peak_step}. Arrow keys read values.` });
  for (const value of ticks(most, width < 560 ? 4 : 5, true)) {
    image.append(shape("line", { class: "axis", x1: box.left, x2: width - box.right, y1: y(value), y2: y(value) }),
      shape("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, tickBytes(value)));
  }
  const marks = ticks(last, width < 560 ? 4 : 8, false).filter((step) => step >= first);
  for (const step of marks) {
    image.append(shape("text", { x: x(step), y: height - box.bottom + 17, "text-anchor": "middle" }, count(step)));
  }
  image.append(shape("text", { x: width - box.right, y: height - 5, "text-anchor": "end" }, "step"));
  drawEpochs(image, x, box, width, height, first, last);
  if (capacity) {
    image.append(shape("line", { x1: box.left, x2: width - box.right, y1: y(capacity), y2: y(capacity), stroke: "var(--leak)", "stroke-dasharray": "8 3" }),
      shape("text", { class: "halo", x: width - box.right, y: y(capacity) + 14, "text-anchor": "end" }, "memory of the device: " + bytes(capacity)));
  }
  for (const line of LINES) {
    if (!shown.has(line.key)) continue;
    const path = points.map((p, at) => (at ? "L" : "M") + x(p.step).toFixed(1) + " " + y(p[line.key]).toFixed(1)).join("");
    if (line.key === "reserved" && points.length > 1) {
      image.append(shape("path", { d: path + `L${x(end.step).toFixed(1)} ${y(0)}L${x(first).toFixed(1)} ${y(0)}Z`, fill: "var(--reserved)", opacity: .22 }));
    }
    image.append(shape("path", { "data-line": line.key, d: points.length > 1 ? path : path + "h2", fill: "none", stroke: `var(--${line.key})`, "stroke-width": line.width, "stroke-dasharray": line.dash, "stroke-linejoin": "round" }));
  }
  if (shown.has("peak")) {
    const top = points.reduce((best, p) => (p.peak > best.peak ? p : best));
    const right = x(top.step) > width * 0.7;
    image.append(shape("circle", { cx: x(top.step), cy: y(top.peak), r: 3.5, fill: "var(--peak)" }),
      shape("text", { class: "halo", x: x(top.step) + (right ? -8 : 8), y: y(top.peak) - 6, "text-anchor": right ? "end" : "start" }, `peak ${bytes(top.peak)}`));
  }
  for (const finding of data.findings.filter((f) => f.device === device.device && f.called_at_step >= first && f.called_at_step <= last)) {
    const at = x(finding.called_at_step);
    image.append(shape("path", { d: `M${at - 5} ${height - box.bottom + 9}L${at} ${height - box.bottom + 1}L${at + 5} ${height - box.bottom + 9}Z`, fill: "var(--leak)" },
      shape("title", {}, `step ${finding.called_at_step}: a ${finding.class} finding was called`)));
  }
  const cursor = shape("line", { class: "cursor", y1: box.top, y2: height - box.bottom, visibility: "hidden" });
  const dots = LINES.filter((l) => shown.has(l.key)).map((l) => [l, shape("circle", { r: 3.5, fill: `var(--${l.key})`, visibility: "hidden" })]);
  image.append(cursor, dots.map((d) => d[1]).reduce((all, dot) => { all.append(dot); return all; }, shape("g", {})));
  let at = -1;
  const read = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    const p = points[at];
    cursor.setAttribute("x1", x(p.step)); cursor.setAttribute("x2", x(p.step));
    cursor.setAttribute("visibility", "visible");
    for (const [line, dot] of dots) {
      dot.setAttribute("cx", x(p.step)); dot.setAttribute("cy", y(p[line.key])); dot.setAttribute("visibility", "visible");
    }
    const epoch = data.run.epoch_starts.filter((e) => e[1] <= p.step).pop();
    readout.replaceChildren(el("b", {}, "step " + count(p.step)), epoch ? `, epoch ${epoch[0]}` : "",
      ...LINES.slice().reverse().filter((l) => shown.has(l.key)).flatMap((l) => ["   " + l.what + " ", el("b", {}, bytes(p[l.key]))]));
  };
  const nearest = (event) => {
    const step = first + (event.clientX - image.getBoundingClientRect().left - box.left) / (width - box.left - box.right) * (last - first);
    let best = 0;
    points.forEach((p, index) => { if (Math.abs(p.step - step) < Math.abs(points[best].step - step)) best = index; });
    read(best);
  };
  image.addEventListener("pointermove", nearest);
  image.addEventListener("pointerdown", nearest);
  image.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: points.length - 1 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    read(move);
  });
  plot.replaceChildren(image);
}

function drawEpochs(image, x, box, width, height, first, last) {
  const epochs = data.run.epoch_starts.filter(([, step]) => step >= first && step <= last);
  const every = Math.max(1, Math.ceil(epochs.length / (width / 100)));
  epochs.forEach(([epoch, step], index) => {
    image.append(shape("line", { class: "epoch", x1: x(step), x2: x(step), y1: box.top, y2: height - box.bottom }));
    if (index % every === 0) image.append(shape("text", { x: x(step) + 3, y: box.top - 8 }, "epoch " + epoch));
  });
  const validations = data.run.validations.filter((step) => step >= first && step <= last);
  for (const step of validations) {
    image.append(shape("line", { x1: x(step), x2: x(step), y1: height - box.bottom, y2: height - box.bottom + 6, stroke: "var(--active)", "stroke-width": 2 },
      shape("title", {}, "validation at step " + step)));
  }
  const said = [];
  if (validations.length) said.push("green ticks: validation");
  if (data.findings.length) said.push("▲ a finding was called");
  if (said.length) image.append(shape("text", { x: box.left, y: height - 5 }, said.join("   ")));
}

// Live bytes by the phase in which they were allocated.
function fillPhases(host, device) {
  const order = ["forward", "backward", "optimizer", "validation", "other"];
  const colours = { forward: "var(--allocated)", backward: "var(--active)", optimizer: "var(--old)", validation: "var(--validation)", other: "var(--reserved)" };
  const phases = order.map((name) => device.phases.find((p) => p.phase === name)).filter((p) => p && p.live_bytes > 0);
  const all = phases.reduce((sum, p) => sum + p.live_bytes, 0);
  host.replaceChildren();
  if (all === 0) return;
  let left = 0;
  const strip = shape("svg", { viewBox: "0 0 1000 14", height: 14, preserveAspectRatio: "none", role: "img", width: "100%",
    "aria-label": "Live bytes by phase of birth: " + phases.map((p) => `${p.phase} ${share(p.live_bytes, all)}`).join(", ") });
  for (const p of phases) {
    const wide = p.live_bytes / all * 1000;
    strip.append(shape("rect", { x: left, width: Math.max(wide - 2, 1), height: 14, fill: colours[p.phase] }));
    left += wide;
  }
  host.append(el("figure", { class: "card", style: "margin-top:.9rem" },
    el("figcaption", { style: "margin-bottom:.45rem" }, "Live bytes by the phase in which they were allocated" + (several ? ", " + deviceName(device.device) : "")),
    strip,
    el("div", { class: "tools", style: "margin:.5rem 0 0" }, phases.map((p) =>
      el("span", {}, el("span", { class: "key", style: "background:" + colours[p.phase] }), ` ${p.phase} ${bytes(p.live_bytes)} (${share(p.live_bytes, all)})`)))));
}
