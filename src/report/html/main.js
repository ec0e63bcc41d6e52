// Puts the page together, and lets its reader choose between light and dark.

function theme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const wish = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const show = () => {
    const dark = chosen === null ? wish.matches : chosen === "dark";
    root.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
  };
  wish.addEventListener("change", show);
  button.addEventListener("click", () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; show(); });
  button.hidden = false;
  show();
}

function main() {
  theme();
  const content = document.getElementById("content");
  content.append(verdictBlock());
  // A part that does not work is said in its place, and the others are shown all the same.
  for (const part of [findingsSection, memorySection, flameSection, generationsSection, segmentsSection, notLeaksSection, sitesSection]) {
    try {
      const made = part();
      if (made) content.append(made);
    } catch (error) {
      document.documentElement.dataset.error = part.name + ": " + error;
      content.append(el("p", { class: "error", role: "alert" }, "This part of the report could not be drawn (" + error + "). The same is in report.txt and report.json."));
    }
  }
  footer();
  document.documentElement.dataset.rendered = "yes";
}
window.addEventListener("error", (event) => { document.documentElement.dataset.error = String(event.message); });
main();
