// The input: Enter sends (Shift+Enter is a new line, an input method or a touch keyboard keeps its Enter), the question
// is shown before the server has it, and comes back into the input when the server does not take it.
{
  const form = document.getElementById("composer");
  const text = document.getElementById("text");
  const problem = document.getElementById("composer-problem");
  let [pending, sent] = [null, ""];
  const send = () => { if (!form.querySelector("[data-stop]") && (text.value.trim() || !text.required)) form.requestSubmit(); };
  const drop = () => { pending?.remove(); pending = null; };
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.altKey || event.isComposing) return;
    if (document.documentElement.dataset.enter === "off" || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    send();
  });
  form.addEventListener("change", () => { text.required = !form.querySelector(".attached"); }); // a file is a message
  form.addEventListener("formdata", ({ formData }) => {
    formData.set("text", text.value.replace(/^\/\//, "/")); // two slashes: no command, but a text that begins with one
  });
  form.addEventListener("htmx:before:request", (event) => {
    if (event.detail.ctx.sourceElement !== form) return;
    pending = document.getElementById("pending-turn").content.firstElementChild.cloneNode(true);
    pending.querySelector(".bubble").textContent = text.value.replace(/^\/\//, "/");
    document.getElementById("turns").append(pending);
    document.querySelector(".greeting")?.remove();
    document.getElementById("suggestions").replaceChildren();
    sent = text.value;
    text.value = "";
  });
  form.addEventListener("htmx:after:request", (event) => {
    const { sourceElement, response } = event.detail.ctx;
    if (sourceElement !== form) return;
    drop(); // the answer is put in its place before the next paint
    if (response.status === 200) document.getElementById("attachments").replaceChildren();
    else text.value ||= sent;
    form.dispatchEvent(new Event("change", { bubbles: true }));
  });
  form.addEventListener("htmx:error", (event) => {
    if (event.detail.ctx?.sourceElement !== form) return;
    drop();
    text.value ||= sent;
    problem.textContent = form.dataset.offline;
  });
  document.addEventListener("click", (event) => {
    const chip = event.target.closest("[data-say]");
    if (chip) { text.value = chip.textContent.trim(); send(); }
  });
}
