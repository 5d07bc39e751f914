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

  // The next update, or the connection, puts other words in this one's place.
  document.addEventListener("htmx:sse:error", () => {
    const label = document.getElementById("status-label");
    if (label.textContent !== label.dataset.reconnecting) label.dataset.before = label.textContent;
    label.textContent = label.dataset.reconnecting;
  });
  document.addEventListener("htmx:sse:after:connection", () => {
    const label = document.getElementById("status-label");
    if (label.textContent === label.dataset.reconnecting) label.textContent = label.dataset.before;
  });

  // Thoughts are open while they come and fold when they end, unless touched: then they stay as the reader left them.
  const wanted = new Map();
  const panelOf = (node) => node.closest?.("details.reasoning");
  document.addEventListener("click", (event) => {
    const panel = panelOf(event.target);
    if (panel) wanted.set(panel.dataset.message, event.target.closest("summary") ? !panel.open : true);
  });
  document.addEventListener("wheel", (event) => {
    const panel = panelOf(event.target);
    if (panel) wanted.set(panel.dataset.message, true);
  }, { passive: true });
  document.addEventListener("status", (event) => {
    const { message, state } = JSON.parse(event.detail.data);
    event.target.dataset.phase = state;
    if (["queued", "loading", "reading", "thinking"].includes(state) || wanted.has(message)) return;
    for (const panel of event.target.querySelectorAll("details.reasoning")) panel.open = false;
  });
  document.addEventListener("htmx:before:settle", (event) => {
    for (const node of event.detail.newContent) {
      const panel = node.querySelector?.("details.reasoning");
      if (panel && wanted.has(panel.dataset.message)) panel.open = wanted.get(panel.dataset.message);
    }
  });
}
