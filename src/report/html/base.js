// What every part of the page uses: the data, elements, numbers as people read them, scales.
// Text from the report is only ever set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
function el(tag, attributes, ...children) { return fill(document.createElement(tag), attributes, children); }
function shape(tag, attributes, ...children) { return fill(document.createElementNS(SVG, tag), attributes, children); }

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1023.95 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return unit === 0 ? Math.round(value) + " B" : value.toFixed(1) + " " + units[unit];
}
function count(value) { return Math.round(value).toLocaleString("en"); }
function plural(value, word) { return count(value) + " " + word + (value === 1 ? "" : "s"); }
function share(part, whole) {
  if (!(whole > 0)) return "";
  const percent = 100 * part / whole;
  return (percent > 0 && percent < 0.1 ? "<0.1" : percent.toFixed(percent < 10 ? 1 : 0)) + " %";
}
function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 100) return s + " s";
  if (s < 6000) return Math.round(s / 60) + " min";
  if (s < 172800) return Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min";
  return Math.floor(s / 86400) + " days";
}
function base(file) { return file.slice(file.lastIndexOf("/") + 1); }

// A frame: {file, line, function, kind: "user" | "library" | "native"}.
const frames = data.frames.map(([file, line, name, kind]) =>
  ({ file: data.files[file], line, function: name, kind: ["library", "user", "native"][kind] }));
function short(frame) { return frame.line > 0 ? base(frame.file) + ":" + frame.line : base(frame.file); }
function stackOf(holder) { return holder.stack.map((number) => frames[number]); }

// "train.py:42 in step > model.py:17 in forward": the user's frames, the innermost last.
function place(holder) {
  let shown = stackOf(holder).filter((frame) => frame.kind === "user").slice(0, 2).reverse();
  if (shown.length === 0 && holder.allocated_at) shown = [holder.allocated_at];
  if (shown.length === 0) shown = stackOf(holder).slice(0, 1);
  return shown.length ? shown.map((f) => short(f) + " in " + f.function).join(" > ") : "an unknown place (no stack)";
}
function frameList(stack) {
  return el("ol", { class: "frames" }, stack.map((frame) =>
    el("li", { class: frame.kind }, frame.function + "  " + frame.file + (frame.line > 0 ? ":" + frame.line : ""))));
}

const several = data.devices.length > 1;
function deviceName(number) { return number < 0 ? "host" : "GPU " + number; }

// Stacks of the sites that findings name.
const accused = new Set(data.findings.flatMap((f) => f.sites_in_finding.map((s) => f.device + "/" + s.stack_id)));
function isAccused(device, stack) { return stack > 0 && accused.has(device + "/" + stack); }

// Bytes of a site that outlived the step of their birth; `after` leaves the first step's out.
const lastStep = Math.max(0, data.run.steps - 1);
function survivors(site, after) {
  let bytes = 0, blocks = 0;
  for (const g of site.generations) {
    if (g.first >= lastStep || (after && g.last === 0)) continue;
    bytes += g.bytes;
    blocks += g.blocks;
  }
  return { bytes, blocks };
}

// Round values between 0 and `most`, of bytes or of steps.
function ticks(most, about, binary) {
  let unit = 1;
  if (binary) while (most / unit >= 1024) unit *= 1024;
  const raw = most / unit / about;
  const power = Math.pow(10, Math.floor(Math.log10(raw || 1)));
  let step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw) * unit;
  if (!binary || unit === 1) step = Math.max(1, Math.round(step));
  const found = [];
  for (let value = 0; value <= most * 1.0001; value += step) found.push(value);
  return found;
}
function tickBytes(value) {
  const text = bytes(value);
  return text.replace(/\.0 /, " ");
}

// Draws now and whenever the width changes.
function whenSized(host, draw) {
  let width = 0;
  const look = () => {
    const now = Math.floor(host.clientWidth);
    if (now > 0 && now !== width) { width = now; draw(width); }
  };
  new ResizeObserver(look).observe(host);
  look();
  return () => { if (width > 0) draw(width); };
}

function section(id, title, ...children) {
  document.getElementById("nav").append(el("a", { href: "#" + id }, title));
  return el("section", { id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title" }, title), ...children);
}

// A row of radio buttons that looks like one control.
function choice(legend, options, chosen, changed) {
  return el("fieldset", {}, el("legend", {}, legend), options.map(([value, label, title]) =>
    el("label", { title }, el("input", { type: "radio", name: legend, value, checked: value === chosen, onchange: () => changed(value) }), label)));
}
function devicePicker(legend, devices, changed) {
  if (devices.length < 2) return null;
  return choice(legend, devices.map((d) => [String(d.device), deviceName(d.device)]), String(devices[0].device),
    (value) => changed(devices.find((d) => String(d.device) === value)));
}
