// Sets the chosen look before the first paint, so that a dark page never flashes light. A server cannot do that for a
// choice kept in the browser.
{
  const root = document.documentElement;
  const read = () => { try { return localStorage.getItem("theme") || "system"; } catch { return "system"; } };
  const show = (theme) => { root.dataset.theme = theme; };
  show(read());
  document.addEventListener("DOMContentLoaded", () => {
    for (const fieldset of document.querySelectorAll("fieldset.theme")) fieldset.hidden = false;
    for (const radio of document.querySelectorAll("input[name=theme]")) {
      radio.checked = radio.value === read();
      radio.addEventListener("change", () => {
        show(radio.value);
        try { localStorage.setItem("theme", radio.value); } catch { /* a private window forgets */ }
      });
    }
  });
}
