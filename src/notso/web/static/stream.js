// What htmx cannot know about a stream: that appending is not idempotent, that a broken one should say so, and that a
// panel the reader has touched is the reader's.
{
  // An update whose number is not above the last one shown would be appended twice. A snapshot replaces everything.
  document.addEventListener("htmx:sse:before:message", (event) => {
    const { event: name, data, id } = event.detail.message;
    if (name) return;
    const article = event.target;
    if (!data.startsWith("<!--snapshot-->") && Number(id) <= Number(article.dataset.seen ?? -1)) event.preventDefault();
    else article.dataset.seen = id;
  });

  // The meter goes on from what was measured before the answer began.
  document.addEventListener("progress", ({ detail }) => {
    const count = document.querySelector(".gauge .count");
    const { tokens } = JSON.parse(detail?.data ?? "{}");
    if (!tokens || !count) return;
    const [used, total] = [Number(count.dataset.used) + tokens, Number(count.dataset.total)];
    count.textContent = [used, total].map((n) => n.toLocaleString(document.documentElement.lang, { useGrouping: "always" })).join(" / ");
    const share = `${Math.min(100, Math.ceil((100 * used) / total))} 100`;
    count.parentElement.querySelector("circle:last-child").setAttribute("stroke-dasharray", share);
  });

  const mark = document.getElementById("status").classList;
  const lost = (isLost) => ({ target }) => target.closest?.("[aria-busy], #listening") && mark.toggle("lost", isLost);
  for (const kind of ["htmx:sse:error", "htmx:error"]) document.addEventListener(kind, lost(true));
  document.addEventListener("htmx:sse:after:connection", lost(false));

  document.addEventListener("done", () => {
    const wanted = document.hidden && document.documentElement.dataset.notify === "on";
    if (!wanted || window.Notification?.permission !== "granted") return;
    const note = new Notification(document.querySelector("h1").textContent, { tag: location.pathname });
    note.onclick = () => focus();
  });

  // Thoughts are open while they come and fold when they end, unless touched: then they, and the cards of tools, stay as
  // the reader left them.
  const wanted = new Map();
  const touch = (event) => {
    const panel = event.target.closest?.("[data-panel]");
    const folds = event.type === "click" && event.target.closest("summary");
    if (panel) wanted.set(panel.dataset.panel, folds ? !panel.open : panel.open);
  };
  for (const kind of ["click", "wheel"]) document.addEventListener(kind, touch, { passive: true });
  document.addEventListener("status", (event) => {
    const { state } = JSON.parse(event.detail.data);
    const panel = event.target.querySelector("details.reasoning");
    event.target.dataset.phase = state;
    if (!["queued", "loading", "prefill", "thinking"].includes(state)) panel.open &&= wanted.has(panel.dataset.panel);
  });
  document.addEventListener("htmx:before:settle", (event) => {
    const panels = event.detail.newContent.flatMap((node) => [...(node.querySelectorAll?.("[data-panel]") ?? [])]);
    for (const panel of panels) panel.open = wanted.get(panel.dataset.panel) ?? panel.open;
  });
}
