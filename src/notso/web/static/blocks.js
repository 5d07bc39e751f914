// Closed blocks: formulas are typeset (KaTeX comes only where there is one), code can be copied, wrapped, unfolded.
{
  const { katex: address, katexCss } = document.currentScript.dataset;
  const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 };
  const loadKatex = () => new Promise((resolve) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: katexCss });
    document.head.append(style, Object.assign(document.createElement("script"), { src: address, onload: resolve }));
  });
  let loading = null;
  const typeset = () => {
    const found = document.querySelectorAll("[id$=-closed] .math:not([data-tex])");
    if (!found.length) return;
    if (!window.katex) { loading ??= loadKatex().then(typeset); return; }
    for (const formula of found) {
      const tex = formula.dataset.tex = formula.textContent;
      // Two commands put a style attribute into MathML, which the page's policy refuses.
      const output = /\\(pmb|fcolorbox)\b/.test(tex) ? "html" : "htmlAndMathml";
      try { window.katex.render(tex, formula, { ...OPTIONS, output, displayMode: formula.matches(".display") }); }
      catch { formula.textContent = tex; delete formula.dataset.tex; formula.classList.replace("math", "source"); }
    }
  };
  new MutationObserver(typeset).observe(document.getElementById("turns"), { childList: true, subtree: true });
  typeset();

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
    button.setAttribute("aria-pressed", block.classList.toggle(button.matches(".wrap-code") ? "wrapped" : "unfolded"));
  });
}
