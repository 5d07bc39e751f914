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
