// Attachments of a question. Text files, and long pasted text, become hidden form fields. The server reads documents and
// unrecognized files; the form then contains their ids or, in a temporary chat, their text.
{
  const BYTES = 200_000, DOCUMENT_BYTES = 16 * 1024 * 1024, FILES = 8, PASTED_CHARACTERS = 2500, LOOK_MS = 300;
  const DOCUMENTS = /^(pdf|doc[xm]?|ppt[xm]?|f?od[tsp]|epub|fb2|xls[xmb]?|eml|mbox|mhtm?l?|msg|rtf)$/;
  const form = document.getElementById("composer");
  const text = document.getElementById("text");
  const list = document.getElementById("attachments");
  const offer = document.getElementById("paste-offer");
  const copyOf = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);
  const attached = () => [...list.querySelectorAll(".attached")];
  const kept = `files ${location.pathname}`;
  let [restored, found, reading, sending] = [false, [], 0, false];
  const keep = () => {
    if (!restored) return;
    const files = attached().map((chip) => {
      const [name, content] = [...chip.querySelectorAll("input")].map((input) => input.value);
      return [name, content, chip.querySelector(".facts").textContent, chip.querySelector("[data-part=document]") ? "document" : "text"];
    });
    try { files.length ? sessionStorage.setItem(kept, JSON.stringify(files)) : sessionStorage.removeItem(kept); }
    catch { /* storage is full: a reload loses the files */ }
  };
  const renumber = () => {
    attached().forEach((chip, at) => chip.querySelectorAll("input").forEach((input) => {
      input.name = `file-${at + 1}-${input.dataset.part}`;
    }));
    form.dispatchEvent(new Event("change", { bubbles: true }));
  };
  const refuse = (name, reason) => {
    const note = copyOf("attachment-refused");
    const words = note.querySelector("span");
    words.textContent = `${name} ${words.dataset[reason] ?? reason}`;
    list.append(note);
    sending = false; // the user decides
  };
  const removable = (chip) => chip.querySelector("button").addEventListener("click", () => { chip.remove(); renumber(); text.focus(); });
  const attach = (name, content, facts = "", part = "text") => {
    if (attached().length >= FILES) return refuse(name, "tooMany");
    const chip = copyOf("attachment");
    chip.querySelector(".name").textContent = name;
    chip.querySelector(".facts").textContent = facts;
    chip.querySelector(".facts").hidden = !facts;
    [name, content].forEach((value, at) => { chip.querySelectorAll("input")[at].value = value; });
    chip.querySelectorAll("input")[1].dataset.part = part;
    removable(chip);
    list.append(chip);
    renumber();
  };
  form.addEventListener("change", keep); // fires when a file is added, removed or sent
  try { found = JSON.parse(sessionStorage.getItem(kept)) ?? []; } catch { /* no storage */ }
  const chosen = attached(); // documents that were selected before the page was loaded
  for (const chip of chosen) removable(chip);
  const ids = chosen.map((chip) => chip.querySelector("[data-part=document]").value);
  for (const [name, content, facts, part] of found) if (!ids.includes(content)) attach(name, content, facts, part);
  if (chosen.length) renumber();
  restored = true;
  const forget = () => {
    for (const note of list.querySelectorAll("p:not([data-reading])")) note.remove();
    sending = false;
  };
  const readByServer = async (file, extension) => {
    if (file.size > DOCUMENT_BYTES) return refuse(file.name, "documentTooBig");
    const note = copyOf("attachment-reading");
    note.textContent = `${file.name} ${note.dataset.reading}`;
    list.append(note);
    try {
      // The server does not store documents of a temporary chat; it returns their text.
      const isKept = !("temporary" in form.dataset);
      const headers = { "Content-Type": "application/octet-stream" };
      const { root } = document.documentElement.dataset;
      const place = root + (isKept ? `/documents?name=${encodeURIComponent(file.name)}` : `/attachments?extension=${encodeURIComponent(extension.slice(0, 10))}`);
      const answer = await fetch(place, { method: "POST", headers, body: file });
      let found = await answer.json();
      if (!answer.ok) return refuse(file.name, found.problem ?? "offline");
      while (found.state === "queued" || found.state === "parsing") {
        await new Promise((again) => setTimeout(again, LOOK_MS));
        found = await (await fetch(`${root}/documents/${found.id}/state`)).json();
      }
      if (found.state === "failed") return refuse(file.name, found.problem);
      if (isKept) attach(found.name, found.id, found.facts, "document");
      else attach(file.name, found.text, found.facts);
      for (const warning of isKept ? [found.note].filter(Boolean) : found.warnings) refuse(file.name, `(${warning})`);
    } catch { refuse(file.name, "offline"); } finally { note.remove(); }
  };
  text.addEventListener("input", forget);
  // If a question is sent while its files are being read, it waits for them.
  form.addEventListener("submit", (event) => {
    if (event.submitter?.matches("[data-stop]")) return;
    sending = reading > 0;
    if (!sending) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }, true);
  const take = async (files) => {
    reading += 1;
    await takeEach([...files]).finally(() => { reading -= 1; });
    if (!reading && sending) form.requestSubmit();
    else form.dispatchEvent(new Event("change", { bubbles: true }));
  };
  const takeEach = async (files) => {
    forget();
    for (const file of files) {
      const extension = file.name.includes(".") ? file.name.split(".").pop().toLowerCase() : "";
      if (DOCUMENTS.test(extension)) { await readByServer(file, extension); continue; }
      if (file.size > BYTES) { refuse(file.name, "tooBig"); continue; }
      try {
        const bytes = await file.arrayBuffer();
        const mark = String(new Uint8Array(bytes.slice(0, 2))); // byte order mark
        const encoding = { "255,254": "utf-16le", "254,255": "utf-16be" }[mark];
        const content = new TextDecoder(encoding ?? "utf-8", { fatal: true }).decode(bytes);
        if (/[\0-\x08\x0e-\x1a\x1c-\x1f]/.test(content)) throw new TypeError(); // control characters: not text
        attach(file.name, content);
      } catch { // the server guesses older encodings
        if (/^(image|audio|video)\//.test(file.type)) refuse(file.name, "notText");
        else await readByServer(file, extension);
      }
    }
  };
  list.addEventListener("attach", ({ detail: { name, text: content } }) => attach(name, content));
  document.getElementById("files").addEventListener("change", async (event) => {
    await take(event.target.files);
    event.target.value = "";
    text.focus();
  });
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      document.body.classList.toggle("dropping", name === "dragover");
      if (name === "drop") take(event.dataTransfer.files);
    });
  }
  let pasted = "";
  text.addEventListener("paste", (event) => {
    const { files } = event.clipboardData;
    pasted = event.clipboardData.getData("text/plain").replace(/\r\n?/g, "\n");
    // Spreadsheets and word processors add a picture of the copied text.
    const isText = pasted && [...files].every((file) => file.type.startsWith("image/"));
    if (files.length && !isText) { event.preventDefault(); take(files); }
    offer.hidden = pasted.length <= PASTED_CHARACTERS;
  });
  text.addEventListener("input", () => { offer.hidden ||= !text.value.includes(pasted); });
  offer.querySelector("button").addEventListener("click", () => {
    attach(`${offer.dataset.name}.txt`, pasted);
    const from = text.value.indexOf(pasted);
    if (from >= 0) text.dispatchEvent(new CustomEvent("write", { detail: { value: "", from, to: from + pasted.length } }));
    offer.hidden = true;
  });
}
