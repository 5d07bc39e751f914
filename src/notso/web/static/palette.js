// Palette of slash commands, filtered by the typed text and navigated with the arrow keys. The commands and their
// actions are defined in the palette's elements.
{
  const form = document.getElementById("composer");
  const text = document.getElementById("text");
  const palette = document.getElementById("palette");
  const problem = document.getElementById("composer-problem");
  const options = [...palette.querySelectorAll("[role=option]")];
  // `refused` is a text with an unknown command. If it is submitted again unchanged, it is sent as a message.
  let [shown, at, closed, refused] = [[], 0, false, null];
  const typed = () => /^\/([\w:-]*)(?:\s+(.*))?$/s.exec(text.value); // not "//..." or "/usr/bin"
  // Prefer the longest common prefix, and then the fewest letters that occur only in `a`.
  const distance = (a, b) => [...a].filter((letter) => !b.includes(letter)).length
    - 9 * [...a, ""].findIndex((letter, at) => letter !== b[at]);
  const choose = (index) => {
    at = index;
    for (const option of options) option.setAttribute("aria-selected", option === shown[at]);
    shown[at]?.scrollIntoView({ block: "nearest" });
    if (palette.hidden || !shown[at]) text.removeAttribute("aria-activedescendant");
    else text.setAttribute("aria-activedescendant", shown[at].id);
  };
  const draw = () => {
    const found = typed();
    const name = found?.[1].toLowerCase() ?? "";
    const wasHidden = palette.hidden;
    palette.hidden = !found || closed;
    const fits = (option) => (found?.[2] === undefined ? option.dataset.name.startsWith(name) : option.dataset.name === name);
    shown = options.filter(fits);
    const unknown = shown.length === 0;
    if (unknown) shown = options.toSorted((a, b) => distance(name, a.dataset.name) - distance(name, b.dataset.name)).slice(0, 1);
    palette.querySelector(".none").hidden = !unknown;
    for (const option of options) option.hidden = !shown.includes(option);
    choose(0);
    if (wasHidden && !palette.hidden) {
      document.getElementById("announcer").textContent = palette.dataset.announce.replace("{count}", shown.length);
    }
  };
  const write = (value) => text.dispatchEvent(new CustomEvent("write", { detail: { value, to: text.value.length } }));
  const set = (control, on) => { if (control && control.checked !== on) control.click(); };
  const acts = {
    open: (option) => {
      const sheet = document.getElementById(option.dataset.sheet);
      if (option.dataset.tab) sheet.dispatchEvent(new CustomEvent("opentab", { bubbles: true, detail: option.dataset.tab }));
      else if (sheet.matches("dialog")) sheet.showModal();
      else sheet.showPopover();
    },
    click: (option) => {
      const button = [...document.querySelectorAll(option.dataset.target)].at(-1);
      button ? button.click() : problem.textContent = palette.dataset.nothing;
    },
    go: (option, argument) => location.assign(document.documentElement.dataset.root + option.dataset.target + (option.dataset.target.endsWith("/") ? argument || "md" : "")),
    choose: (option, argument) => set(document.querySelector(`[name=${option.dataset.target}][value="${argument}"]`), true),
    thinking: (option, argument) => {
      const toggle = form.querySelector("[role=switch]");
      if (toggle.disabled) return problem.textContent = toggle.closest("label").title;
      if (!/^\d+$/.test(argument)) return set(toggle, argument ? argument !== "off" : !toggle.checked);
      set(toggle, true);
      const budget = form.elements.thinking_budget;
      if (![...budget.options].some((each) => each.value === argument)) budget.add(new Option(argument, argument));
      budget.value = argument;
      budget.dispatchEvent(new Event("change", { bubbles: true }));
    },
    insert: (option, _, rest) => write([option.dataset.text.replace(/^\//, "//"), rest].filter(Boolean).join(" ")),
    offer: async (option, _, rest) => {
      const body = new URLSearchParams({ argument: rest.replace(/^\/\//, "/") });
      let found = { problem: form.dataset.offline };
      try { found = await (await fetch(document.documentElement.dataset.root + option.dataset.target, { method: "POST", body })).json(); }
      catch { /* offline */ }
      problem.textContent = found.problem ?? "";
      if (found.name) document.getElementById("attachments").dispatchEvent(new CustomEvent("attach", { detail: found }));
      else if (!text.value) write(found.text?.replace(/^\//, "//") ?? `/${option.dataset.name} ${rest}`);
      else if (found.text) write(`${text.value}\n\n${found.text}`); // the user has typed text meanwhile
    },
    carry: (option, _, rest) => { // a new chat's instructions, sent with its question
      const line = document.getElementById("carried");
      line.hidden = line.querySelector("input").disabled = false;
      line.querySelector("input").value = option.dataset.text;
      line.querySelector("span").textContent = `/${option.dataset.name}`;
      write(rest);
    },
    post: (option, argument, rest) => {
      option.querySelector("input").value = "asTyped" in option.dataset ? rest.replace(/^\/\//, "/") : argument;
      for (const each of option.querySelectorAll("[name=thinking]")) each.disabled = !form.querySelector("[role=switch]").checked;
      option.dispatchEvent(new Event("run"));
      if ("keeps" in option.dataset) write(rest);
    },
  };
  const complete = (option, more) => write(`/${option.dataset.name}${typed()?.[2] ? ` ${typed()[2]}` : more}`);
  const run = (option) => {
    const [, name, argument = ""] = typed(), rest = argument.trim().replace(/^\//, "//");
    const said = argument.trim().toLowerCase(), fits = new RegExp(`^(?:${option.dataset.takes})?$`).test(said);
    const unknown = !option.dataset.name.startsWith(name.toLowerCase());
    if (unknown && fits) return complete(option, " "); // only a suggestion: do not run it
    if (unknown) problem.textContent = palette.dataset.unknown.replace("{name}", name);
    if (unknown) return [refused, closed] = [text.value, true], draw();
    problem.textContent = option.dataset.refused ?? (fits ? "" : option.dataset.misused);
    if (fits) write(""); // otherwise the user can correct it
    if (!problem.textContent) acts[(!said && option.dataset.bare) || option.dataset.act](option, said, rest);
  };
  text.addEventListener("input", () => { [closed, refused] = [false, null]; draw(); });
  text.addEventListener("keydown", (event) => {
    if (palette.hidden || event.isComposing || event.keyCode === 229) return;
    const step = { ArrowDown: 1, ArrowUp: shown.length - 1 }[event.key];
    if (step !== undefined) choose((at + step) % shown.length);
    else if (event.key === "Escape") { closed = true; draw(); }
    else if (event.key === "Tab" && !event.shiftKey) complete(shown[at], "argument" in shown[at].dataset ? " " : "");
    else if (event.key === "Enter" && !event.shiftKey) run(shown[at]);
    else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }, true);
  form.addEventListener("submit", (event) => {
    if (!typed() || text.value === refused || event.submitter?.matches("[data-stop]")) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    closed = false;
    draw();
    run(shown[at]);
  }, true);
  palette.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (!option) return;
    if ("argument" in option.dataset && typed()?.[2] === undefined && option.dataset.act !== "thinking") write(`/${option.dataset.name} `);
    else { text.value ||= "/"; run(option); }
  });
}
