// The message input. Enter sends the message, except with Shift, while an input method composes text, and on touch
// screens. A question is shown at once; if the server rejects it, its text returns to the input. Each tab keeps its
// drafts, including those of edited messages, across reloads until the server has accepted them.
{
  const form = document.getElementById("composer");
  const text = document.getElementById("text");
  const problem = document.getElementById("composer-problem");
  let [pending, sent, drafts, held, greeting, waiting] = [null, "", null, null, null, ""];
  try { drafts = sessionStorage; } catch { /* no storage */ }
  let draft = `draft ${location.pathname}`;
  const remember = (name, value) => {
    try { value ? drafts?.setItem(name, value) : drafts?.removeItem(name); } catch { /* storage is full: a reload loses the text */ }
  };
  const both = () => [sent, text.value].filter(Boolean).join("\n\n"); // the server has not accepted `sent` yet
  // Fitting the field to very long text is slow. Browsers without `field-sizing` need a height for shorter text.
  const LONG = 5000;
  const measure = () => {
    const isLong = text.classList.toggle("long", text.value.length > LONG);
    if (CSS.supports("field-sizing", "content")) return;
    text.style.height = "";
    if (!isLong) text.style.height = `${text.scrollHeight}px`;
  };
  const keep = () => { measure(); remember(draft, both()); };
  text.value ||= drafts?.getItem(draft) ?? "";
  // Replace the text from `from` to `to` so that Ctrl+Z can undo it, like typed text.
  text.addEventListener("write", ({ detail: { value, from = 0, to = from } }) => {
    text.focus();
    text.setSelectionRange(from, to);
    const command = value ? "insertText" : "delete";
    if ((value || from !== to) && !document.execCommand(command, false, value)) {
      text.setRangeText(value, from, to, "end");
      text.dispatchEvent(new Event("input", { bubbles: true }));
    }
  });
  const giveBack = () => { // return all unsent messages to the input
    text.value = [sent, ...queued(), text.value].filter(Boolean).join("\n\n");
    sent = "";
    queue.replaceChildren();
    keepQueue();
    keep();
  };
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.isComposing || event.keyCode === 229) return; // Safari ends the composition before this Enter
    if (document.documentElement.dataset.enter === "off" || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    if (form.querySelector("[data-stop]")) enqueue();
    else if (text.value.trim() || !text.required) form.requestSubmit();
  });
  text.addEventListener("input", keep);
  addEventListener("resize", measure);
  measure();
  // Messages are queued until the answer ends. They survive a reload, and return to the input if the answer is stopped.
  const queue = document.getElementById("queued");
  const line = `queue ${location.pathname}`;
  const queued = () => [...queue.querySelectorAll(".what")].map((item) => item.textContent);
  const keepQueue = () => remember(line, queue.childElementCount ? JSON.stringify(queued()) : "");
  const addToQueue = (message) => {
    const item = document.getElementById("queued-message").content.firstElementChild.cloneNode(true);
    item.querySelector(".what").textContent = message;
    queue.append(item);
  };
  const enqueue = () => {
    if (!text.value.trim()) return;
    if (document.querySelector("#status.lost")) { problem.textContent = form.dataset.silent; return; }
    addToQueue(text.value);
    text.value = "";
    keepQueue();
    keep();
    text.dispatchEvent(new Event("input", { bubbles: true }));
  };
  queue.addEventListener("click", ({ target }) => {
    const item = target.closest("button")?.closest("li");
    if (!item) return;
    const message = item.querySelector(".what").textContent;
    if (target.closest("[data-take-back]")) {
      text.dispatchEvent(new CustomEvent("write", { detail: { value: text.value ? `${message}\n\n` : message } }));
    }
    item.remove();
    keepQueue();
    text.focus();
  });
  const advance = () => {
    const next = queue.querySelector("li");
    if (!next || form.querySelector("[data-stop], [data-reading]") || pending?.isConnected || sent) return;
    const last = [...document.querySelectorAll("article.assistant")].at(-1);
    if (last?.ariaBusy === "true") return; // the page does not show the end of this answer yet
    const state = last?.dataset.state;
    if (state !== "done") { // stopped or failed
      text.value = [...queued(), text.value].filter(Boolean).join("\n\n");
      queue.replaceChildren();
    } else {
      waiting = text.value;
      text.value = next.querySelector(".what").textContent;
      next.remove();
      form.requestSubmit();
    }
    keepQueue();
    keep();
  };
  let waited = [];
  try { waited = JSON.parse(drafts?.getItem(line)) ?? []; } catch { /* invalid */ }
  const atHit = () => /[?&]at=/.test(location.search);
  if (atHit() && waited.length) { // a search hit may be in another branch
    text.value = [...waited, text.value].filter(Boolean).join("\n\n");
    keepQueue();
    keep();
  } else for (const message of waited) addToQueue(message);
  new MutationObserver(() => setTimeout(advance)).observe(document.getElementById("composer-controls"), { childList: true });
  document.addEventListener("htmx:after:swap", () => setTimeout(advance));
  addEventListener("load", () => setTimeout(advance));
  // With an attachment, the text may be empty.
  form.addEventListener("change", () => { text.required = !form.querySelector(".attached"); setTimeout(advance); });
  document.addEventListener("click", (event) => { // insert a prompt template before typed text
    const { start } = event.target.closest("[data-start]")?.dataset ?? {};
    if (!start) return;
    event.preventDefault();
    text.dispatchEvent(new CustomEvent("write", { detail: { value: start } }));
  });
  form.addEventListener("formdata", ({ formData }) => {
    formData.set("text", text.value.replace(/^\/\//, "/")); // a leading "//" is an escaped "/", not a command
  });
  form.addEventListener("htmx:before:request", (event) => {
    if (event.detail.ctx.sourceElement !== form) return;
    pending = document.getElementById("pending-turn").content.firstElementChild.cloneNode(true);
    pending.querySelector(".bubble").textContent = text.value.replace(/^\/\//, "/");
    document.getElementById("turns").append(pending);
    greeting = document.querySelector(".greeting");
    greeting?.remove();
    document.getElementById("suggestions").replaceChildren();
    sent = text.value;
    text.value = waiting;
    waiting = "";
    keep();
  });
  const comeBack = () => { // the server rejected the first message: show the greeting again
    if (greeting && !document.querySelector("#turns > article")) document.getElementById("turns").prepend(greeting);
    greeting = null;
  };
  form.addEventListener("htmx:after:request", (event) => {
    const { sourceElement, response } = event.detail.ctx;
    if (sourceElement !== form) return;
    const taken = response.status === 200 || response.status === 204; // 204: redirect to a new chat
    if (response.status !== 204) pending.remove(); // replaced before the next paint
    if (taken) document.getElementById("attachments").replaceChildren();
    // A reload must not attach the documents in the address again.
    if (response.status === 200 && /[?&]document=/.test(location.search)) history.replaceState(history.state, "", location.pathname);
    if (response.status === 204) { // text typed before the new chat's page loads belongs to the new chat
      remember(draft, "");
      draft = `draft ${response.headers.get("HX-Redirect") ?? location.pathname}`;
    }
    if (taken) sent = "";
    taken ? keep() : giveBack();
    if (!taken) comeBack();
    form.dispatchEvent(new Event("change", { bubbles: true }));
  });
  document.addEventListener("htmx:error", (event) => {
    const source = event.detail.ctx?.sourceElement;
    if (!source?.matches("form, button")) return;
    if (source === form) { pending.remove(); giveBack(); comeBack(); }
    problem.textContent = source === form ? form.dataset.offline : form.dataset.silent;
  });
  addEventListener("pagehide", () => { pending?.remove(); });
  // Keep the text of an edited message until it is sent or canceled.
  const edited = () => document.getElementById("edit-text");
  const restore = () => { if (edited()) edited().value = drafts?.getItem(edited().form.action) ?? edited().value; };
  document.addEventListener("input", ({ target }) => { if (target === edited()) remember(target.form.action, target.value); });
  // A click on Cancel discards the text. Escape, whose click is made by a script and not trusted, keeps the text.
  document.addEventListener("click", ({ target, isTrusted }) => {
    if (isTrusted && target.closest(".edit [data-stop]")) remember(target.closest(".edit").action, "");
  });
  document.addEventListener("htmx:after:request", ({ detail: { ctx } }) => {
    // An action at a search hit may create or select another branch. Forget the hit, so that a reload shows that branch.
    if (ctx.response.status === 200 && atHit() && ctx.sourceElement.matches('[hx-post][hx-target="#turns"]:not([hx-post$="/rate"])')) history.replaceState(history.state, "", location.pathname);
    if (ctx.sourceElement.matches(".edit") && ctx.response.status === 200) remember(ctx.sourceElement.action, "");
  });
  document.addEventListener("htmx:after:swap", restore);
  // Move focus to the input if the focused element was replaced; not on touch screens, to keep the keyboard hidden.
  for (const kind of ["pointerdown", "focusin"]) {
    document.addEventListener(kind, ({ target }) => { held = kind === "focusin" ? target : null; });
  }
  document.addEventListener("htmx:after:swap", () => {
    if (held && document.activeElement === document.body && getSelection().isCollapsed && !matchMedia("(pointer: coarse)").matches) text.focus();
  });
}
