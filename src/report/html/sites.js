// The table of sites: search, sort, and the stack of each.

function sitesSection() {
  if (data.sites.length === 0) return null;
  const most = Math.max(1, ...data.sites.map((s) => s.live_bytes));
  const columns = [
    ["site", (s) => place(s), false],
    ["live", (s) => s.live_bytes, true],
    ["blocks", (s) => s.live_blocks, true],
    ["survivors", (s) => survivors(s, false).bytes, true],
    ["allocated in all", (s) => s.allocated_bytes, true],
    ["times", (s) => s.allocated_blocks, true],
    ["phase", (s) => s.phase, false],
    ["born in steps", (s) => (s.generations.length ? s.generations[0].first : -1), true],
  ];
  let by = 1, falling = true, word = "";
  const body = el("tbody", {});
  const told = el("span", { class: "readout", role: "status", style: "min-height:0;margin:0" });
  const heads = columns.map(([name], at) => el("th", { scope: "col", "aria-sort": at === by ? "descending" : "none" },
    el("button", { type: "button", onclick: () => {
      falling = by === at ? !falling : columns[at][2];
      by = at;
      heads.forEach((head, index) => head.setAttribute("aria-sort", index === by ? (falling ? "descending" : "ascending") : "none"));
      list();
    } }, name)));
  const text = new Map(data.sites.map((s) => [s, (place(s) + " " + s.phase + " " + stackOf(s).map((f) => f.file + ":" + f.line + " " + f.function).join(" ")).toLowerCase()]));
  const list = () => {
    const value = columns[by][1];
    const found = data.sites.filter((s) => text.get(s).includes(word));
    found.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const order = typeof x === "string" ? x.localeCompare(y) : x - y;
      return falling ? -order : order;
    });
    body.replaceChildren(...found.map((s) => siteRow(s, most, columns.length)));
    told.textContent = found.length === data.sites.length ? plural(found.length, "site") : `${count(found.length)} of ${plural(data.sites.length, "site")}`;
  };
  list();
  const known = data.devices.reduce((sum, d) => sum + d.sites, 0);
  const root = section("sites", "Sites",
    el("p", { class: "lead" }, "All blocks with one call stack are a site, as they were at the last step." + (known > data.sites.length ? ` The ${count(data.sites.length)} largest of ${count(known)} are listed.` : "")),
    el("div", { class: "card" },
      el("div", { class: "tools" }, el("input", { type: "search", placeholder: "Search file, function, phase…", "aria-label": "Search sites", size: 28, oninput: (e) => { word = e.target.value.trim().toLowerCase(); list(); } }), told),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of sites" }, el("table", { class: "sites" }, el("thead", {}, el("tr", {}, heads)), body))));
  return root;
}

function siteRow(site, most, columns) {
  const born = site.generations;
  const spans = born.length === 0 ? "" : born[0].first === born[born.length - 1].last ? count(born[0].first) : `${count(born[0].first)}–${count(born[born.length - 1].last)}`;
  const row = el("tr", {});
  let more = null;
  const open = el("button", { type: "button", "aria-expanded": "false", onclick: () => {
    if (more) { more.remove(); more = null; } else {
      const stack = stackOf(site);
      more = el("tr", { class: "more" }, el("td", { colspan: columns }, stack.length ? frameList(stack) : "no stack",
        site.history.length > 1 ? sparkline(site.history, "live bytes", 320, 70) : null));
      row.after(more);
    }
    open.setAttribute("aria-expanded", String(more !== null));
  } }, place(site));
  return fill(row, {}, [
    el("td", { class: "place" }, open, isAccused(site.device, site.stack_id) ? el("span", { class: "flag" }, "finding") : null, several ? ` ${deviceName(site.device)}` : ""),
    el("td", {}, el("span", { class: "bytesbar", style: `width:${(site.live_bytes / most * 56).toFixed(1)}px`, "aria-hidden": "true" }), bytes(site.live_bytes)),
    el("td", {}, count(site.live_blocks)),
    el("td", {}, bytes(survivors(site, false).bytes)),
    el("td", {}, bytes(site.allocated_bytes)),
    el("td", {}, count(site.allocated_blocks)),
    el("td", { class: "left" }, site.phase),
    el("td", {}, spans),
  ]);
}
