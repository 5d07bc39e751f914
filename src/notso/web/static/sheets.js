// Dialogs, tabs, the sidebar, and lists with one Tab stop: behavior that markup alone does not provide in all browsers.
{
  const root = document.documentElement;
  const opened = { "show-modal": "showModal", close: "close" };
  // Emulate the attributes `command` and `commandfor` in browsers that do not support them.
  if (!("commandForElement" in HTMLButtonElement.prototype)) {
    document.addEventListener("click", ({ target }) => {
      const button = target.closest("[commandfor]");
      if (button) document.getElementById(button.getAttribute("commandfor"))[opened[button.getAttribute("command")]]();
    });
  }

  // Emulate `closedby`: a press outside a dialog closes it. Its click would close it after a selection by mouse, too.
  if (!("closedBy" in HTMLDialogElement.prototype)) {
    document.addEventListener("mousedown", ({ target, clientX: x, clientY: y }) => {
      const { left, right, top, bottom } = target.getBoundingClientRect();
      if (target.matches("[closedby]") && (x < left || x > right || y < top || y > bottom)) target.close();
    });
  }

  // Open a citation's document beside the chat.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.citation");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    document.getElementById("source").showModal();
    htmx.ajax("GET", link.href, "#source-body").then(() => document.getElementById("quoted")?.focus());
  });

  // A search result on the current page loads no page, so close the dialog.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("#search-results a");
    if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) link.closest("dialog")?.close();
  });

  // On a wide screen, collapse the sidebar and remember this in the browser. On a phone, show or hide it.
  document.addEventListener("click", ({ target }) => {
    if (!target.closest("[data-toggle-rail]")) return;
    if (matchMedia("(max-width: 48rem)").matches) return document.getElementById("sidebar").togglePopover();
    const hidden = root.dataset.rail !== "off";
    root.dispatchEvent(new CustomEvent("prefer", { detail: { rail: hidden ? "off" : "on" } }));
    const shown = [...document.querySelectorAll("[data-toggle-rail]")].find((each) => each.checkVisibility());
    shown?.focus();
  });

  // The event `shown` makes htmx load the settings whenever they are opened.
  const settings = document.getElementById("settings");
  const announce = () => { if (settings.open) settings.dispatchEvent(new Event("shown")); };
  if (settings) new MutationObserver(announce).observe(settings, { attributeFilter: ["open"] });

  // A row of tabs has one Tab stop; the arrow keys move between its tabs.
  const tabOf = (sheet, name) => sheet.querySelector(`#tab-${name}`);
  const choose = (sheet, name) => {
    if (!tabOf(sheet, name)) return;
    sheet.dataset.tabs = name;
    for (const tab of sheet.querySelectorAll("[role=tab]")) {
      const isChosen = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", isChosen);
      tab.tabIndex = isChosen ? 0 : -1;
    }
    sheet.querySelector(".tab-panels").scrollTop = 0;
  };
  document.addEventListener("click", ({ target }) => {
    const tab = target.closest("[role=tab]");
    if (tab) choose(tab.closest("dialog"), tab.id.replace("tab-", ""));
  });
  document.addEventListener("opentab", ({ target, detail }) => { choose(target, detail); target.showModal(); });
  document.addEventListener("keydown", (event) => {
    const tab = event.target.closest("[role=tab]");
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!tab || !(step || ["Home", "End"].includes(event.key))) return;
    const tabs = [...tab.parentElement.children];
    const towards = root.dir === "rtl" && /Left|Right/.test(event.key) ? -step : step;
    const next = { Home: tabs[0], End: tabs.at(-1) }[event.key] ?? tabs.at((tabs.indexOf(tab) + towards) % tabs.length);
    next.focus();
    next.click();
    event.preventDefault();
  });

  // A list has one Tab stop; the arrow keys move between rows and within a row.
  const rowsOf = (list) => [...list.querySelectorAll("li > a")];
  const rove = (list, current) => {
    for (const stop of list.querySelectorAll("li > a, .row-menu")) stop.tabIndex = stop === current ? 0 : -1;
  };
  const begin = (list) => {
    const rows = rowsOf(list);
    const focused = list.contains(document.activeElement) && document.activeElement.closest("li > a, .row-menu");
    rove(list, focused || (rows.find((row) => row.ariaCurrent) ?? rows[0]));
  };
  for (const list of document.querySelectorAll("[data-roving]")) {
    begin(list);
    new MutationObserver(() => begin(list)).observe(list, { childList: true, subtree: true });
    list.addEventListener("focusin", ({ target }) => { if (target.matches("li > a, .row-menu")) rove(list, target); });
    list.addEventListener("keydown", (event) => {
      const row = event.target.closest("li");
      if (!event.target.matches("li > a, .row-menu") || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
      const rows = rowsOf(list);
      const at = rows.indexOf(row.querySelector(":scope > a"));
      const inwards = root.dir === "rtl" ? "ArrowLeft" : "ArrowRight";
      const outwards = root.dir === "rtl" ? "ArrowRight" : "ArrowLeft";
      const next = {
        ArrowDown: rows[at + 1],
        ArrowUp: rows[at - 1],
        Home: rows[0],
        End: rows.at(-1),
        [inwards]: row.querySelector(".row-menu"),
        [outwards]: rows[at],
      }[event.key];
      if (!next) return;
      next.focus();
      event.preventDefault();
    });
  }
}
// Keyboard shortcuts that activate a control. The help sheet defines the keys and their controls.
{
  const rows = [...document.querySelectorAll("#help [data-press]")].filter((row) => row.dataset.press);
  const isMac = navigator.platform.startsWith("Mac");
  const nameOf = (event) => {
    const letter = event.key > "\x7f" && /^Key(.)$/.exec(event.code)?.[1]; // on Arabic, Cyrillic and other keyboards
    const typed = letter || (event.key.length === 1 ? event.key.toUpperCase() : event.key);
    const key = event.code === "Semicolon" ? ";" : typed === "؟" ? "?" : typed;
    const shift = event.shiftKey && key !== "?";
    const control = isMac ? event.metaKey : event.ctrlKey;
    return [control && "Control", event.altKey && "Alt", shift && "Shift", key].filter(Boolean).join("+");
  };
  const fits = (where, target) => {
    const writes = target.matches("input, textarea, select");
    return { anywhere: true, outside: !writes, empty: target.id === "text" && !target.value }[where];
  };
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.keyCode === 229 || event.defaultPrevented || document.documentElement.dataset.keys === "off") return;
    if (document.querySelector("dialog:modal")) return; // the dialog covers the controls
    if (event.key === "Escape" && !event.shiftKey && document.querySelector(".menu:popover-open, #sidebar:popover-open")) return;
    const row = rows.find((each) => each.dataset.keys === nameOf(event) && fits(each.dataset.where, event.target));
    const near = event.target.closest("article")?.querySelector(row?.dataset.press || "none");
    const control = near ?? (row && [...document.querySelectorAll(row.dataset.press)].at(-1));
    if (!control) return;
    event.preventDefault();
    control.matches("textarea") ? control.focus() : control.click();
  });
  // The arrow keys move from a sheet's input to its links and between them.
  document.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const sheet = event.target.closest(".sheet:has([data-arrows])");
    if (!step || !sheet) return;
    const stops = [...sheet.querySelectorAll("input, [data-arrows] a")];
    stops[stops.indexOf(event.target) + step]?.focus();
    event.preventDefault();
  });
  // Close a menu after use.
  document.addEventListener("submit", (event) => event.target.closest(".menu[popover]")?.hidePopover());
}
