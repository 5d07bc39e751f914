// Reading aloud and dictation by the browser. They are offered only if the browser runs them on this machine, because a
// remote service would receive the text or audio.
{
  const root = document.documentElement;
  const text = document.getElementById("text");
  const voices = () => window.speechSynthesis?.getVoices().filter((voice) => voice.localService) ?? [];
  const look = () => root.toggleAttribute("data-speaks", voices().length > 0);
  window.speechSynthesis?.addEventListener("voiceschanged", look);
  look();
  const Recognition = window.SpeechRecognition ?? window.webkitSpeechRecognition;
  const asked = { langs: [navigator.language], processLocally: true };
  const hears = async () => {
    try { root.toggleAttribute("data-hears", (await Recognition.available(asked)) === "available"); } catch { /* not supported */ }
  };
  if (Recognition?.available) hears();
  let listening = null;
  const dictate = (button) => {
    if (listening) return listening.stop();
    listening = Object.assign(new Recognition(), { lang: navigator.language, processLocally: true, continuous: true });
    listening.onresult = ({ results, resultIndex }) => {
      for (let at = resultIndex; at < results.length; at += 1) {
        const space = text.value && !/\s$/.test(text.value) ? " " : "";
        const value = space + results[at][0].transcript.trim();
        text.dispatchEvent(new CustomEvent("write", { detail: { value, from: text.value.length } }));
      }
    };
    listening.onend = () => { listening = null; button.setAttribute("aria-pressed", "false"); };
    button.setAttribute("aria-pressed", "true");
    listening.start();
  };
  document.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-speak], [data-dictate]");
    if (!button) return;
    if ("dictate" in button.dataset) return dictate(button);
    if (window.speechSynthesis.speaking) return window.speechSynthesis.cancel();
    const said = new SpeechSynthesisUtterance(button.closest("article").querySelector(".answer").innerText);
    said.voice = voices().find(({ lang }) => lang.slice(0, 2) === navigator.language.slice(0, 2)) ?? voices()[0];
    window.speechSynthesis.speak(said);
  });
}
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
