// Announces an answer to screen readers during generation, sentence by sentence. Code and formulas are announced as source.
{
  const place = document.getElementById("spoken");
  const segmenter = new Intl.Segmenter(document.documentElement.lang, { granularity: "sentence" });
  const KEPT = 20; // announcements kept; the answer has all of the text
  const told = new WeakMap(); // article -> number of announced blocks, and of announced sentences in the next block
  const textOf = (block) => {
    const copy = block.cloneNode(true);
    for (const formula of copy.querySelectorAll("[data-tex]")) formula.textContent = formula.dataset.tex;
    for (const part of copy.querySelectorAll(".code-label, .tool-card > :not(summary)")) part.remove();
    for (const end of copy.querySelectorAll("br")) end.replaceWith("\n");
    return copy.textContent;
  };
  const tell = (article, isWhole) => {
    const blocks = [...article.querySelectorAll(".answer > div > *")];
    let [at, sentences] = told.get(article) ?? [0, 0];
    for (; at < blocks.length; at += 1, sentences = 0) {
      const isOpen = !isWhole && at === blocks.length - 1;
      const found = [...segmenter.segment(textOf(blocks[at]))].map(({ segment }) => segment);
      const upTo = found.length - (isOpen ? 1 : 0);
      const text = found.slice(sentences, upTo).join("").trim();
      if (text) place.append(Object.assign(document.createElement("p"), { textContent: text }));
      if (isOpen) { sentences = Math.max(sentences, upTo); break; }
    }
    told.set(article, [at, sentences]);
    while (place.childElementCount > KEPT) place.firstChild.remove();
  };
  document.addEventListener("htmx:sse:after:message", ({ target }) => tell(target, false));
  document.addEventListener("done", ({ target }) => { if (target.matches("article")) tell(target, true); }, true);
}
