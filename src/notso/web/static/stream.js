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
    count.textContent = [used, total].map((n) => String(n).replace(/\B(?=(\d{3})+$)/g, count.dataset.group)).join(" / ");
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

  // What has ended is morphed, not replaced: a selection, typeset formulas and what was wrapped or unfolded stay.
  const isIn = (node, place) => node instanceof Element && node.closest(place);
  document.addEventListener("htmx:config:request", ({ detail: { ctx } }) => {
    if (ctx.sourceElement.matches("[data-ended]")) ctx.sourceElement.closest("article").removeAttribute("hx-morph-skip");
  });
  document.addEventListener("htmx:before:morph:node", (event) => {
    const { oldNode, newNode } = event.detail;
    if (!isIn(oldNode, ".prose")) return;
    const isTypeset = oldNode.dataset.tex !== undefined && oldNode.dataset.tex === newNode.textContent;
    const isRefused = oldNode.matches(".source") && oldNode.textContent === newNode.textContent;
    const blocks = [oldNode, newNode].map((node) => node.matches?.(".code-block") && node.querySelector("code"));
    const isSameCode = blocks[0] && blocks[1] && blocks[0].isEqualNode(blocks[1]);
    if (isTypeset || isRefused || isSameCode) event.preventDefault();
  });
  document.addEventListener("htmx:before:morph:attr", (event) => {
    const { target, detail: { attrName, newValue } } = event;
    if (!isIn(target, ".prose, [data-panel]")) return;
    if (attrName === "aria-pressed") event.preventDefault();
    if (attrName === "open" && wanted.has(target.dataset.panel)) event.preventDefault();
    if (attrName !== "class" || !target.matches(".code-block")) return;
    const kept = ["wrapped", "unfolded"].filter((name) => target.classList.contains(name));
    target.className = [newValue, ...kept].join(" ");
    event.preventDefault();
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
