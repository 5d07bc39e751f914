// Applies this browser's theme and view before the first paint, so that a dark page never flashes light. The server
// does not know these preferences.
{
  const root = document.documentElement;
  const standard = { theme: "system", rail: "on", enter: "on", follow: "on", statistics: "on", live: "on", whole: "off", keys: "on", notify: "off" };
  const stored = () => {
    try { return JSON.parse(localStorage.getItem("preferences")) ?? {}; } catch { return {}; /* no storage */ }
  };
  Object.assign(root.dataset, standard, stored());
  const keep = (name, value) => {
    root.dataset[name] = value;
    // Another tab may have changed other preferences.
    try { localStorage.setItem("preferences", JSON.stringify({ ...stored(), [name]: value })); } catch { /* no storage */ }
  };
  root.addEventListener("prefer", ({ detail }) => { for (const name in detail) keep(name, detail[name]); });
  // The next user of the tab must not see unsent text and files.
  document.addEventListener("submit", ({ target }) => {
    if (!target.matches("[action$='/logout']")) return;
    try { sessionStorage.clear(); } catch { /* no storage */ }
  });
  document.addEventListener("DOMContentLoaded", () => {
    const bar = document.querySelector("[data-chosen]");
    const boxes = [...document.querySelectorAll("[name^=chat-]")];
    const offer = () => { // disable actions without a selection
      for (const button of bar.querySelectorAll("[name=action]")) button.disabled = !boxes.some((box) => box.checked);
    };
    if (bar) {
      offer();
      bar.closest("form").addEventListener("change", ({ target }) => {
        if (target.matches("[data-choose-all]")) for (const box of boxes) box.checked = target.checked;
        offer();
      });
      addEventListener("pageshow", offer);
    }
    for (const input of document.querySelectorAll("[data-preference]")) {
      const name = input.dataset.preference;
      const isRadio = input.type === "radio";
      input.checked = root.dataset[name] === (isRadio ? input.value : "on");
      input.addEventListener("change", () => {
        keep(name, isRadio ? input.value : input.checked ? "on" : "off");
        if (name === "notify" && input.checked) window.Notification?.requestPermission();
      });
    }
  });
}
