// Generations: in which steps the blocks that are alive at the last step were born.

function generationsSection() {
  const sites = data.sites.filter((site) => site.generations.length > 0);
  if (sites.length === 0 || data.run.steps < 2) return null;
  const devices = data.devices.filter((d) => sites.some((site) => site.device === d.device));
  let device = devices[0] || { device: sites[0].device };
  const plot = el("div", { class: "plot" });
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const strips = el("div", { class: "scroll" });
  let redraw = () => {};
  const picked = (next) => { device = next; redraw(); };
  const root = section("generations", "Generations",
    el("p", { class: "lead" }, "Live bytes at the last step by the step in which they were born. A job without a leak has the model and the optimizer's state at the left and its running step at the right; what lies between stayed behind. Old steps are counted in spans, spread evenly here."),
    el("div", { class: "card" },
      el("div", { class: "tools" }, devicePicker("Device of the generations", devices, picked),
        data.findings.length ? el("span", {}, el("span", { class: "key", style: "background:var(--leak)" }), " sites of findings") : null,
        el("span", {}, el("span", { class: "key", style: "background:var(--old)" }), data.findings.length ? " other sites" : " live bytes")),
      plot, readout, strips));
  document.getElementById("content").append(root);
  redraw = whenSized(plot, (width) => drawGenerations(plot, readout, strips, sites.filter((s) => s.device === device.device), width));
  return null;
}

// Bytes of one site by bin of birth steps.
function binned(site, bins, span) {
  const into = new Array(bins).fill(0);
  for (const g of site.generations) {
    const steps = g.last - g.first + 1;
    for (let bin = Math.floor(g.first / span); bin <= Math.min(bins - 1, Math.floor(g.last / span)); bin += 1) {
      const from = Math.max(g.first, bin * span), to = Math.min(g.last + 1, (bin + 1) * span);
      into[bin] += g.bytes * Math.max(0, to - from) / steps;
    }
  }
  return into;
}

function drawGenerations(plot, readout, strips, sites, width) {
  const steps = lastStep + 1;
  const span = Math.max(1, Math.ceil(steps / (width < 560 ? 48 : 96)));
  const bins = Math.ceil(steps / span);
  const rows = sites.map((site) => ({ site, bytes: binned(site, bins, span), accused: isAccused(site.device, site.stack_id) }));
  const sum = (which) => Array.from({ length: bins }, (_, bin) => rows.filter(which).reduce((all, row) => all + row.bytes[bin], 0));
  const red = sum((row) => row.accused), rest = sum((row) => !row.accused);
  const all = red.map((value, bin) => value + rest[bin]);
  const others = Math.max(0, ...all.slice(1, -1));
  // The model is born in the first step: if it dwarfs the rest, its bar is cut and says so.
  const most = others > 0 && Math.max(...all) > 4 * others ? others * 1.6 : Math.max(1, ...all);
  const height = 190, box = { left: 66, right: 14, top: 18, bottom: 34 };
  const wide = (width - box.left - box.right) / bins;
  const y = (value) => height - box.bottom - Math.min(value, most) / most * (height - box.top - box.bottom);
  const image = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label":
    `Live bytes by step of birth: ${bytes(all[0])} from the first ${plural(span, "step")}, ${bytes(all.slice(1, -1).reduce((a, b) => a + b, 0))} from the steps between, ${bytes(all[bins - 1])} from the last` });
  for (const value of ticks(most, 4, true)) {
    image.append(shape("line", { class: "axis", x1: box.left, x2: width - box.right, y1: y(value), y2: y(value) }),
      shape("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, tickBytes(value)));
  }
  for (const step of ticks(steps, width < 560 ? 4 : 8, false).filter((s) => s < steps)) {
    image.append(shape("text", { x: box.left + (step / span + 0.5) * wide, y: height - box.bottom + 16, "text-anchor": "middle" }, count(step)));
  }
  image.append(shape("text", { x: width - box.right, y: height - 3, "text-anchor": "end" }, "step of birth"));
  const gap = wide > 4 ? 1 : 0;
  let noted = -1;
  for (let bin = 0; bin < bins; bin += 1) {
    const left = box.left + bin * wide;
    const below = y(red[bin]);
    if (red[bin] > 0) image.append(shape("rect", { x: left, y: below, width: Math.max(wide - gap, 0.7), height: height - box.bottom - below, fill: "var(--leak)" }));
    const top = y(all[bin]);
    if (rest[bin] > 0) image.append(shape("rect", { x: left, y: top, width: Math.max(wide - gap, 0.7), height: Math.max(0, below - top), fill: "var(--old)" }));
    if (all[bin] > most * 1.0001) {
      image.append(shape("path", { d: `M${left - 2} ${y(most) + 12}l${wide / 2 + 1} -4l${wide / 2 + 1} 4`, stroke: "var(--card)", "stroke-width": 3, fill: "none" }));
      if (noted < 0 || bin === bins - 1) {
        const right = bin > bins / 2;
        image.append(shape("text", { x: right ? left + wide : left, y: box.top - 6, "text-anchor": right ? "end" : "start" }, "↑ " + bytes(all[bin])));
        noted = bin;
      }
    }
  }
  image.addEventListener("pointermove", (event) => {
    const bin = Math.floor((event.clientX - image.getBoundingClientRect().left - box.left) / wide);
    if (bin < 0 || bin >= bins) return;
    const to = Math.min(lastStep, (bin + 1) * span - 1);
    readout.replaceChildren(el("b", {}, span > 1 ? `steps ${count(bin * span)}–${count(to)}` : `step ${count(bin)}`),
      "   alive ", el("b", {}, bytes(all[bin])), red[bin] > 0 ? `   of these from sites of findings ${bytes(red[bin])}` : "");
  });
  plot.replaceChildren(image);
  readout.textContent = "Point at a bar to read it.";
  const between = (row) => row.bytes.slice(1, -1).reduce((a, b) => a + b, 0);
  const listed = rows.filter((row) => between(row) > 0).sort((a, b) => (b.accused - a.accused) || between(b) - between(a)).slice(0, 10);
  strips.replaceChildren();
  if (listed.length === 0) return;
  strips.append(el("table", { class: "strips" }, el("caption", { class: "readout", style: "text-align:left" }, "Sites with survivors from the steps between, darkest where most of their bytes were born"),
    el("tbody", {}, listed.map((row) => {
      const top = Math.max(...row.bytes);
      const strip = shape("svg", { viewBox: `0 0 ${bins} 10`, preserveAspectRatio: "none", role: "img", "aria-label": `survivors from ${row.bytes.filter((b) => b > 0).length} of ${bins} spans of steps` });
      row.bytes.forEach((value, bin) => {
        if (value > 0) strip.append(shape("rect", { x: bin, width: 1.02, height: 10, fill: row.accused ? "var(--leak)" : "var(--old)", opacity: (0.25 + 0.75 * Math.sqrt(value / top)).toFixed(2) }));
      });
      const where = place(row.site);
      return el("tr", {}, el("th", { scope: "row", title: where, class: "mono" }, row.site.allocated_at ? short(row.site.allocated_at) : where),
        el("td", { class: "n" }, bytes(row.site.live_bytes)), el("td", { class: "strip" }, strip));
    }))));
}
