// Complete blocks: typeset formulas when they are visible (loading KaTeX only if needed), copy answers, and copy, wrap,
// expand and preview code.
{
  const { nonce, dataset: { katex: address, katexCss, copyTex } } = document.currentScript;
  const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 };
  // Glyphs print blank if their font is not loaded, so load the fonts before a formula that uses them becomes visible.
  const loadFonts = () => {
    for (const face of document.fonts) if (/KaTeX_(Main|Math|AMS|Size)/.test(face.family)) face.load().catch(() => {});
  };
  const add = (tag, fields) => document.head.append(Object.assign(document.createElement(tag), fields));
  let isLoading = false;
  const loadKatex = () => {
    if (isLoading) return;
    isLoading = true;
    add("link", { rel: "stylesheet", href: katexCss, onload: loadFonts });
    add("script", { src: address, onload: () => typeset() });
    add("script", { src: copyTex }); // makes the browser copy formulas as TeX
  };
  const [waiting, SLICE_MS] = [new Set(), 30];
  const typeset = (milliseconds = SLICE_MS) => {
    if (!waiting.size) return;
    if (!window.katex) { loadKatex(); return; }
    const end = performance.now() + milliseconds;
    for (const formula of waiting) {
      waiting.delete(formula);
      if (formula.dataset.tex) continue;
      const tex = formula.dataset.tex = formula.textContent;
      // These two commands add a style attribute to MathML, which the page's content security policy blocks.
      const output = /\\(pmb|fcolorbox)\b/.test(tex) ? "html" : "htmlAndMathml";
      try { window.katex.render(tex, formula, { ...OPTIONS, output, displayMode: formula.matches(".display") }); }
      catch { formula.textContent = tex; delete formula.dataset.tex; formula.classList.replace("math", "source"); }
      if (performance.now() > end) { setTimeout(typeset); return; }
    }
  };
  // Typeset formulas in or near the viewport, and all of them before printing.
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) { seen.unobserve(target); waiting.add(target); }
    typeset();
  }, { root: document.getElementById("scroller"), rootMargin: "100% 0px" });
  const found = () => document.querySelectorAll(":is([id$=-closed], .bubble) .math:not([data-tex])");
  // Load KaTeX as soon as the page has formulas, because printing does not wait for it.
  const whenIdle = window.requestIdleCallback ?? ((work) => setTimeout(work, 1000)); // Safari has no idle callbacks
  const look = () => {
    const formulas = found();
    for (const formula of formulas) seen.observe(formula);
    if (formulas.length) whenIdle(loadKatex);
  };
  const readNow = (url) => {
    const request = new XMLHttpRequest();
    request.open("GET", url, false);
    request.send();
    return request.responseText;
  };
  addEventListener("beforeprint", () => {
    for (const formula of found()) waiting.add(formula);
    if (waiting.size && !window.katex) {
      add("link", { rel: "stylesheet", href: katexCss });
      try { add("script", { nonce, textContent: readNow(address) }); }
      catch { return; } // offline: formulas are printed as TeX
    }
    typeset(Infinity);
  });
  new MutationObserver(look).observe(document.getElementById("turns"), { childList: true, subtree: true });
  look();

  const preview = document.getElementById("preview");
  const place = document.getElementById("preview-place");
  const frameOf = (kind) => document.getElementById(`${kind}-frame`).content.firstElementChild.cloneNode(true);
  preview.addEventListener("close", () => place.replaceChildren());
  const announcer = document.getElementById("announcer");
  const copied = (button) => {
    button.dataset.done = "";
    announcer.textContent = announcer.dataset.copied;
    setTimeout(() => { delete button.dataset.done; }, 1500);
  };
  const copy = async (button, content) => {
    try { await navigator.clipboard.writeText(content); }
    catch { // without HTTPS, there is no clipboard API
      const area = Object.assign(document.createElement("textarea"), { value: content });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    copied(button);
  };
  // Returns HTML for pasting into other programs: without buttons and tool calls, and with formulas as MathML.
  const richText = (answer) => {
    const whole = answer.cloneNode(true);
    for (const part of whole.querySelectorAll(".code-label, .katex-html, .tool-card")) part.remove();
    for (const heading of whole.querySelectorAll("h3, h4, h5, h6")) { // undo the page's heading levels
      const own = document.createElement(`h${heading.tagName[1] - 2}`);
      own.append(...heading.childNodes);
      heading.replaceWith(own);
    }
    for (const each of [whole, ...whole.querySelectorAll("*")]) {
      for (const { name } of [...each.attributes]) if (/^(id|class|data-.*|hx-.*|tabindex)$/.test(name)) each.removeAttribute(name);
    }
    return new Blob([new XMLSerializer().serializeToString(whole)], { type: "text/html" });
  };
  const source = async (address, shown) => {
    try {
      const answer = await fetch(address);
      if (answer.ok) return await answer.text();
    } catch { /* offline: use the text on the page */ }
    return shown.innerText;
  };
  const copyMessage = async (button) => {
    const shown = button.closest("article")?.querySelector(".answer, .bubble") ?? button.parentElement;
    const plain = source(button.dataset.copy, shown);
    try { // Safari requires `write` to be called in the click itself, so the text is passed as a promise
      const item = { "text/plain": plain.then((found) => new Blob([found], { type: "text/plain" })) };
      if (shown.matches(".answer")) item["text/html"] = richText(shown);
      await navigator.clipboard.write([new ClipboardItem(item)]);
      copied(button);
    } catch { await copy(button, await plain); }
  };
  const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const csv = (table) => [...table.rows].map((row) => [...row.cells].map((each) => {
    const own = each.cloneNode(true);
    for (const formula of own.querySelectorAll("[data-tex]")) formula.textContent = formula.dataset.tex;
    for (const end of own.querySelectorAll("br")) end.replaceWith("\n");
    return cell(own.textContent.trim());
  }).join(",")).join("\n");
  // The sandboxed frame has an opaque origin, so identify its messages by its window.
  const diagram = (text) => {
    const frame = frameOf("diagram");
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
      || (document.documentElement.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
    const send = ({ data, source }) => {
      if (source !== frame.contentWindow || data !== "ready") return;
      removeEventListener("message", send);
      frame.contentWindow.postMessage({ text, dark, language: document.documentElement.lang }, "*");
    };
    addEventListener("message", send);
    return frame;
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".code-label button, [data-copy], [data-copy-tables]");
    const block = button?.closest(".code-block");
    if (!button) return;
    if (button.dataset.copy) return copyMessage(button);
    if ("copyTables" in button.dataset) {
      button.closest("[popover]")?.hidePopover();
      return copy(button, [...button.closest("article").querySelectorAll(".answer table")].map(csv).join("\n\n"));
    }
    if (button.matches(".copy-code")) return copy(button, block.querySelector("code").textContent);
    if (button.matches(".preview-code")) {
      const text = block.querySelector("code").textContent;
      const isDiagram = block.querySelector(".code-label span").textContent === "mermaid";
      document.getElementById("preview-note").hidden = isDiagram;
      place.replaceChildren(isDiagram ? diagram(text) : frameOf("preview"));
      if (!isDiagram) {
        const form = document.getElementById("preview-form");
        form.elements.text.value = text;
        form.submit();
      }
      return preview.showModal();
    }
    button.setAttribute("aria-pressed", block.classList.toggle(button.matches(".wrap-code") ? "wrapped" : "unfolded"));
  });
}
