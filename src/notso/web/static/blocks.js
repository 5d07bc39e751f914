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
  const copy = async (button, content) => {
    try { await navigator.clipboard.writeText(content); }
    catch { // no clipboard on an address without encryption: the old way
      const area = Object.assign(document.createElement("textarea"), { value: content });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.dataset.done = "";
    announcer.textContent = announcer.dataset.copied;
    setTimeout(() => { delete button.dataset.done; }, 1500);
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest(".code-label button, [data-copy]");
    const block = button?.closest(".code-block");
    if (!button) return;
    if (button.dataset.copy) return copy(button, await (await fetch(button.dataset.copy)).text());
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
