// Keys in the input: Enter sends, Shift+Enter is a new line, an input method or a touch keyboard keeps its Enter, Escape
// stops. And the input is emptied only once the server has the message.
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
    if (event.key === "Escape" && !event.defaultPrevented && !event.isComposing) stopButton()?.click();
  });
  form.addEventListener("htmx:after:request", (event) => {
    const { sourceElement, response } = event.detail.ctx;
    if (sourceElement === form && response.status === 200) text.value = "";
  });
}
