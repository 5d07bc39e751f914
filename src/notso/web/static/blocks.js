// Closed blocks: formulas are typeset when they are seen (KaTeX comes only where there is one); code can be copied, wrapped, unfolded.
{
  const { nonce, dataset: { katex: address, katexCss } } = document.currentScript;
  const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 };
  const loadKatex = () => new Promise((resolve) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: katexCss });
    document.head.append(style, Object.assign(document.createElement("script"), { src: address, onload: resolve }));
  });
  let loading = null;
  const [waiting, SLICE_MS] = [new Set(), 30];
  const typeset = (milliseconds = SLICE_MS) => {
    if (!waiting.size) return;
    if (!window.katex) { loading ??= loadKatex().then(() => typeset()); return; }
    const end = performance.now() + milliseconds;
    for (const formula of waiting) {
      waiting.delete(formula);
      if (formula.dataset.tex) continue;
      const tex = formula.dataset.tex = formula.textContent;
      // Two commands put a style attribute into MathML, which the page's policy refuses.
      const output = /\\(pmb|fcolorbox)\b/.test(tex) ? "html" : "htmlAndMathml";
      try { window.katex.render(tex, formula, { ...OPTIONS, output, displayMode: formula.matches(".display") }); }
      catch { formula.textContent = tex; delete formula.dataset.tex; formula.classList.replace("math", "source"); }
      if (performance.now() > end) { setTimeout(typeset); return; }
    }
  };
  // Those that are seen, or soon will be; all of them before they are printed.
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) { seen.unobserve(target); waiting.add(target); }
    typeset();
  }, { root: document.getElementById("scroller"), rootMargin: "100% 0px" });
  const found = () => document.querySelectorAll("[id$=-closed] .math:not([data-tex])");
  // KaTeX is there before it is needed, because printing does not wait. Safari has no idle callbacks.
  const whenIdle = window.requestIdleCallback ?? ((work) => setTimeout(work, 1000));
  const look = () => {
    const formulas = found();
    for (const formula of formulas) seen.observe(formula);
    if (formulas.length) whenIdle(() => { loading ??= loadKatex().then(() => typeset()); });
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
      const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: katexCss });
      try { document.head.append(style, Object.assign(document.createElement("script"), { nonce, textContent: readNow(address) })); }
      catch { return; } // the server is away: formulas are printed as TeX
    }
    typeset(Infinity);
  });
  new MutationObserver(look).observe(document.getElementById("turns"), { childList: true, subtree: true });
  look();

  document.getElementById("preview").addEventListener("toggle", ({ newState }) => {
    if (newState === "closed") document.getElementById("preview-place").replaceChildren();
  });
  const announcer = document.getElementById("announcer");
  const told = (button) => {
    button.dataset.done = "";
    announcer.textContent = announcer.dataset.copied;
    setTimeout(() => { delete button.dataset.done; }, 1500);
  };
  const copy = async (button, content) => {
    try { await navigator.clipboard.writeText(content); }
    catch { // no clipboard on an address without encryption: the old way
      const area = Object.assign(document.createElement("textarea"), { value: content });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    told(button);
  };
  // What is copied has formulas as TeX, once, and none of the page's own buttons.
  const plainly = (fragment) => {
    for (const formula of fragment.querySelectorAll(".math[data-tex]")) {
      const mark = formula.matches(".display") ? "$$" : "$";
      formula.replaceChildren(`${mark}${formula.dataset.tex}${mark}`);
    }
    for (const extra of fragment.querySelectorAll("button, .code-label")) extra.remove();
    return fragment;
  };
  const htmlOf = (fragment) => {
    const box = document.createElement("div");
    box.append(plainly(fragment));
    for (const element of box.querySelectorAll("*")) {
      for (const { name } of [...element.attributes]) if (!["href", "start", "dir"].includes(name)) element.removeAttribute(name);
    }
    return box.innerHTML;
  };
  // An answer is copied as it was written, and as formatted text for programs that prefer it. Safari refuses what is
  // only fetched after the click, but not a promise of it.
  const copyAnswer = async (button) => {
    const text = fetch(button.dataset.copy).then((answer) => answer.ok ? answer.text() : Promise.reject(new Error()));
    const answer = button.closest("article").querySelector(".answer");
    try {
      const range = document.createRange();
      range.selectNodeContents(answer);
      const html = new Blob([htmlOf(range.cloneContents())], { type: "text/html" });
      const plain = text.then((words) => new Blob([words], { type: "text/plain" }));
      await navigator.clipboard.write([new ClipboardItem({ "text/plain": plain, "text/html": html })]);
      told(button);
    } catch {
      // No clipboard for formatted text, or the server is away: the text is on the page.
      copy(button, await text.catch(() => button.closest("article").querySelector(".answer, .bubble").innerText));
    }
  };
  const csvOf = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => {
    const part = document.createDocumentFragment();
    part.append(...cell.cloneNode(true).childNodes);
    for (const line of part.querySelectorAll("br")) line.replaceWith("\n");
    const text = plainly(part).textContent.trim();
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }).join(",")).join("\r\n") + "\r\n";
  document.addEventListener("copy", (event) => {
    const selection = getSelection();
    if (selection.isCollapsed || event.target.closest?.("input, textarea")) return;
    const fragment = selection.getRangeAt(0).cloneContents();
    if (!fragment.querySelector(".math[data-tex]")) return;
    const html = htmlOf(fragment.cloneNode(true));
    const box = Object.assign(document.createElement("div"), { className: "unseen" });
    box.append(plainly(fragment));
    document.body.append(box); // only what is laid out has line breaks
    event.clipboardData.setData("text/plain", box.innerText);
    box.remove();
    event.clipboardData.setData("text/html", html);
    event.preventDefault();
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".code-label button, .copy-table, [data-copy]");
    const block = button?.closest(".code-block");
    if (!button) return;
    if (button.dataset.copy) return copyAnswer(button);
    if (button.matches(".copy-table")) return copy(button, csvOf(button.parentElement.querySelector("table")));
    if (button.matches(".copy-code")) return copy(button, block.querySelector("code").textContent);
    if (button.matches(".preview-code")) {
      const form = document.getElementById("preview-form");
      const frame = document.getElementById("preview-frame").content.cloneNode(true);
      document.getElementById("preview-place").replaceChildren(frame);
      form.elements.text.value = block.querySelector("code").textContent;
      form.submit();
      return document.getElementById("preview").showPopover();
    }
    button.setAttribute("aria-pressed", block.classList.toggle(button.matches(".wrap-code") ? "wrapped" : "unfolded"));
  });
}
