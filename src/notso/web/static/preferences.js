// Before the first paint: the look and the view chosen in this browser, so that a dark page never flashes light. A
// server cannot do that for a choice the browser keeps.
{
  const root = document.documentElement;
  const standard = { theme: "system", enter: "on", follow: "on", statistics: "on", live: "on", whole: "off", keys: "on", notify: "off" };
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem("preferences")) ?? {}; } catch { /* a private window forgets */ }
  Object.assign(root.dataset, standard, kept);
  document.addEventListener("DOMContentLoaded", () => {
    document.querySelector("[data-choose-all]")?.addEventListener("change", ({ target }) => {
      for (const box of target.form.querySelectorAll("[name^=chat-]")) box.checked = target.checked;
    });
    for (const input of document.querySelectorAll("[data-preference]")) {
      const name = input.dataset.preference;
      const isRadio = input.type === "radio";
      input.checked = root.dataset[name] === (isRadio ? input.value : "on");
      input.addEventListener("change", () => {
        root.dataset[name] = kept[name] = isRadio ? input.value : input.checked ? "on" : "off";
        if (name === "notify" && input.checked) window.Notification?.requestPermission();
        try { localStorage.setItem("preferences", JSON.stringify(kept)); } catch { /* it holds for this page */ }
      });
    }
  });
}
