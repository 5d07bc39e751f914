// Keys in the input: Enter sends, Shift+Enter is a new line, an input method or a touch keyboard keeps its Enter, Escape
// stops. The input is emptied only once the server has the message; a server that does not answer is told.
{
  const form = document.getElementById("composer");
  const text = document.getElementById("text");
  const stopButton = () => form.querySelector("[data-stop]");
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    if (!stopButton() && text.value.trim()) form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing || document.querySelector(":popover-open")) return;
    stopButton()?.click();
  });
  form.addEventListener("htmx:after:request", (event) => {
    const { sourceElement, response } = event.detail.ctx;
    if (sourceElement === form && response.status === 200) text.value = "";
  });
  form.addEventListener("htmx:error", (event) => {
    if (event.detail.ctx?.sourceElement !== form) return;
    document.getElementById("composer-problem").textContent = form.dataset.offline;
  });
}
