// The flame graph of live bytes: outermost frame on top, width is bytes. All live blocks, or survivors only.

function flameSection() {
  const total = (weigh) => data.sites.reduce((sum, site) => sum + weigh(site), 0);
  const weights = {
    all: (site) => site.live_bytes,
    survivors: (site) => survivors(site, false).bytes,
    later: (site) => survivors(site, true).bytes,
  };
  if (total(weights.all) === 0) {
    return section("flame", "Flame graph", el("p", { class: "lead" }, "Nothing was alive at the last step."));
  }
  let mode = data.findings.length && total(weights.later) > 0 ? "later" : "all";
  let mine = data.sites.some((site) => stackOf(site).some((frame) => frame.kind === "user"));
  let word = "";
  const plot = el("div", { class: "plot flame" });
  const crumbs = el("div", { class: "crumbs", "aria-label": "Zoomed into" });
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  let tree, view, redraw = () => {};
  const rebuild = () => { tree = growTree(weights[mode], mine); view = tree; redraw(); };
  const zoom = (node) => { view = node; redraw(node); };
  const tell = (node) => {
    readout.replaceChildren(el("b", {}, node.frame ? node.frame.function : "all"),
      node.frame ? `  ${node.frame.file}${node.frame.line > 0 ? ":" + node.frame.line : ""}` : "",
      "   ", el("b", {}, bytes(node.value)), ` (${share(node.value, tree.value)}) in ${plural(node.sites, "site")}`);
  };
  const root = section("flame", "Flame graph",
    el("p", { class: "lead" }, "Who allocated what is alive at the last step; width is bytes. A survivor outlived the step of its birth; what was born after the first step is neither the model nor the optimizer's first state."),
    el("div", { class: "card" },
      el("div", { class: "tools" },
        choice("Blocks in the flame graph", [["all", "all live blocks"], ["survivors", "survivors"], ["later", "survivors born after the first step"]], mode,
          (value) => { mode = value; rebuild(); }),
        el("label", {}, el("input", { type: "checkbox", checked: mine, onchange: (e) => { mine = e.target.checked; rebuild(); } }), "your code only"),
        el("input", { type: "search", placeholder: "Highlight…", "aria-label": "Highlight frames", oninput: (e) => { word = e.target.value.toLowerCase(); redraw(); } })),
      crumbs, plot, readout,
      el("div", { class: "tools", style: "margin:.4rem 0 0;color:var(--soft)" },
        [["user", "your code"], ["library", "libraries"], ["native", "native"]].filter(([kind]) => kind !== "native" || frames.some((f) => f.kind === kind)).map(([kind, label]) =>
          el("span", {}, el("span", { class: "key", style: `background:var(--${kind})` }), " " + label)),
        el("span", {}, "Click or Enter: zoom. Escape: back. Arrow keys: move."))));
  document.getElementById("content").append(root);
  tree = growTree(weights[mode], mine);
  view = tree;
  let width = 0;
  const draw = (focus) => { if (width) drawFlame(plot, crumbs, { tree, view, word, width, zoom, tell }, focus); };
  whenSized(plot, (now) => { width = now; draw(); });
  redraw = draw;
  return null;
}

function growTree(weigh, mine) {
  const tree = { frame: null, value: 0, sites: 0, kids: new Map(), parent: null };
  for (const site of data.sites) {
    const value = weigh(site);
    if (value <= 0) continue;
    let stack = stackOf(site);
    if (mine) {
      const users = stack.filter((frame, at) => frame.kind === "user" || at === 0);
      if (users.length) stack = users;
    }
    if (several) stack = [...stack, { file: "", line: 0, function: deviceName(site.device), kind: "library" }];
    let node = tree;
    node.value += value; node.sites += 1;
    for (let at = stack.length - 1; at >= 0; at -= 1) {
      const key = stack[at].file + ":" + stack[at].line + ":" + stack[at].function;
      let next = node.kids.get(key);
      if (!next) node.kids.set(key, next = { frame: stack[at], value: 0, sites: 0, kids: new Map(), parent: node });
      node = next;
      node.value += value; node.sites += 1;
    }
  }
  return tree;
}

function drawFlame(plot, crumbs, { tree, view, word, width, zoom, tell }, focus) {
  const row = 21;
  const boxes = [];
  const lay = (node, left, wide, depth) => {
    const box = { node, left, wide, depth };
    boxes.push(box);
    node.box = box;
    const kids = [...node.kids.values()].sort((a, b) => b.value - a.value);
    node.order = kids;
    let at = left;
    for (const kid of kids) {
      const part = wide * kid.value / node.value;
      if (part >= 0.6) lay(kid, at, part, depth + 1); else kid.box = null;
      at += part;
    }
  };
  if (view.value > 0) lay(view, 0, width, 0);
  const height = Math.max(1, ...boxes.map((box) => box.depth + 1)) * row;
  const image = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "Flame graph of " + bytes(tree.value) });
  for (const box of boxes) {
    const { node } = box;
    const label = node.frame ? `${node.frame.function} ${short(node.frame)}` : "all " + bytes(node.value);
    const fits = Math.floor((box.wide - 8) / 7);
    const kind = node.frame ? node.frame.kind : "library";
    const dim = word && !(node.frame && (node.frame.function + node.frame.file).toLowerCase().includes(word));
    const group = shape("g", { tabindex: node === (focus || view) ? 0 : -1, role: "button", class: dim ? "dim" : null,
      "aria-label": `${label}, ${bytes(node.value)}, ${share(node.value, tree.value)}` },
    shape("rect", { class: kind, x: box.left, y: box.depth * row, width: Math.max(box.wide, 0.5), height: row - 1, rx: 2 }),
    fits > 2 ? shape("text", { x: box.left + 5, y: box.depth * row + 14 }, label.length > fits ? label.slice(0, fits - 1) + "…" : label) : null);
    box.group = group;
    group.addEventListener("pointerenter", () => tell(node));
    group.addEventListener("focus", () => tell(node));
    group.addEventListener("click", () => zoom(node === view && node.parent ? node.parent : node));
    group.addEventListener("keydown", (event) => {
      const near = (step) => {
        const row = node.parent && node.parent.order ? node.parent.order.filter((n) => n.box) : [];
        return row[row.indexOf(node) + step];
      };
      const to = { ArrowDown: () => node.order.find((n) => n.box), ArrowUp: () => node !== view && node.parent, ArrowLeft: () => near(-1), ArrowRight: () => near(1) }[event.key];
      if (to) {
        event.preventDefault();
        const next = to();
        if (next && next.box) { group.setAttribute("tabindex", -1); next.box.group.setAttribute("tabindex", 0); next.box.group.focus(); }
      } else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        zoom(node);
      } else if (event.key === "Escape" && view.parent) {
        zoom(view.parent);
      }
    });
    image.append(group);
  }
  plot.replaceChildren(view.value > 0 ? image : el("p", { class: "lead" }, "No such blocks."));
  if (focus && focus.box) focus.box.group.focus({ preventScroll: true });
  const path = [];
  for (let node = view; node.parent; node = node.parent) path.unshift(node);
  crumbs.replaceChildren(...(path.length ? [tree, ...path] : []).map((node) =>
    el("button", { type: "button", onclick: () => zoom(node), "aria-current": node === view ? "true" : null },
      node.frame ? node.frame.function : "all")));
  crumbs.hidden = path.length === 0;
}
