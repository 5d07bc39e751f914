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
