// Additions to htmx for streams: ignore repeated updates, report broken streams, and keep panels as the user
// left them.
{
  // Ignore an update if its number shows that it was already appended. Snapshots replace all text and always apply.
  document.addEventListener("htmx:sse:before:message", (event) => {
    const { event: name, data, id } = event.detail.message;
    if (name) return;
    const article = event.target;
    if (!data.startsWith("<!--snapshot-->") && Number(id) <= Number(article.dataset.seen ?? -1)) event.preventDefault();
    else article.dataset.seen = id;
  });

  // The context usage was measured before the answer began: add the tokens generated since.
  document.addEventListener("progress", ({ detail }) => {
    const count = document.querySelector(".gauge .count");
    const { tokens } = JSON.parse(detail?.data ?? "{}");
    if (!tokens || !count) return;
    const [used, total] = [Number(count.dataset.used) + tokens, Number(count.dataset.total)];
    count.textContent = [used, total].map((n) => String(n).replace(/\B(?=(\d{3})+$)/g, count.dataset.group)).join(" / ");
    const share = `${Math.min(100, Math.ceil((100 * used) / total))} 100`;
    count.parentElement.querySelector("circle:last-child").setAttribute("stroke-dasharray", share);
  });

  // Report a stream only if it cannot be reopened at once. Firefox and Safari break the streams of a page that is being
  // left, and Safari opens none until the next page arrives. The page may also stay, for example after a download.
  const mark = document.getElementById("status").classList;
  let patience = 1; // attempts
  addEventListener("beforeunload", () => { patience = 4; });
  const lost = (isLost) => ({ target, detail: { connection } }) => {
    if (isLost && connection?.attempt < patience) return;
    if (!isLost) patience = 1;
    if (target.closest?.("[aria-busy], #listening")) mark.toggle("lost", isLost);
  };
  for (const kind of ["htmx:sse:error", "htmx:error"]) document.addEventListener(kind, lost(true));
  document.addEventListener("htmx:sse:after:connection", lost(false));
  // Another tab deleted the answer, or stopped and continued it.
  document.addEventListener("htmx:sse:error", ({ target, detail }) => {
    if (detail.status !== 404 || !target.matches("article")) return;
    target.remove();
    document.body.dispatchEvent(new Event("turns"));
  });

  // htmx pauses streams in the background. Keep those running whose end a notification or a queued message awaits.
  const notifies = () => document.documentElement.dataset.notify === "on" && window.Notification?.permission === "granted";
  addEventListener("visibilitychange", (event) => {
    const awaited = notifies() || document.querySelector("#queued > li");
    if (document.hidden && awaited && document.querySelector("#turns > [aria-busy]")) event.stopPropagation();
  }, true);
  document.addEventListener("done", () => {
    if (!document.hidden || !notifies()) return;
    const note = new Notification(document.querySelector("h1").textContent, { tag: location.pathname });
    note.onclick = () => focus();
  });

  // When an answer ends, morph it instead of replacing it, to keep typeset formulas and wrapped or expanded code.
  document.addEventListener("htmx:config:request", ({ detail: { ctx } }) => {
    if (ctx.sourceElement.matches("[data-ended]")) ctx.sourceElement.closest("article").removeAttribute("hx-morph-skip");
  });
  const isShown = (node, place) => node instanceof Element && node.closest(place);
  htmx.registerExtension("keep", {
    htmx_before_morph_node(_, { oldNode, newNode }) {
      if (!isShown(oldNode, ".prose")) return true;
      const isTypeset = oldNode.dataset.tex !== undefined && oldNode.dataset.tex === newNode.textContent;
      const isRefused = oldNode.matches(".source") && oldNode.textContent === newNode.textContent;
      const blocks = [oldNode, newNode].map((node) => node.matches?.(".code-block") && node.querySelector("code"));
      return !(isTypeset || isRefused || (blocks[0] && blocks[1] && blocks[0].isEqualNode(blocks[1])));
    },
    htmx_before_morph_attr(node, { attrName, newValue }) {
      if (!isShown(node, ".prose, [data-panel]")) return true;
      if (attrName === "aria-pressed" || (attrName === "open" && wanted.has(node.dataset.panel))) return false;
      if (attrName !== "class" || !node.matches(".code-block")) return true;
      const kept = ["wrapped", "unfolded"].filter((name) => node.classList.contains(name));
      node.className = [newValue, ...kept].join(" ");
      return false;
    },
  });

  // When blocks in the tail are complete, move their elements to the complete blocks instead of recreating them.
  const CLOSING = /<hx-partial hx-target="#([\w-]+)-closed" hx-swap="beforeend">([\s\S]*?)<\/hx-partial>/g;
  const partial = (target, swap, html) => `<hx-partial hx-target="#${target}" hx-swap="${swap}">${html}</hx-partial>`;
  let named = [];
  const moved = (whole, name, html) => {
    const [closed, tail] = ["closed", "tail"].map((part) => document.getElementById(`${name}-${part}`));
    if (!closed || !tail) return whole;
    const blocks = [...new DOMParser().parseFromString(html, "text/html").body.children];
    const open = [...tail.children];
    const differs = blocks.findIndex((block, at) => block.tagName !== open[at]?.tagName);
    const count = differs < 0 ? blocks.length : differs;
    if (!count) return whole;
    const morphs = open.slice(0, count).map((block, at) => {
      named.push(block.id = blocks[at].id = `${name}-${at}-moved`);
      closed.moveBefore ? closed.moveBefore(block, null) : closed.append(block); // moveBefore keeps the focus
      return partial(block.id, "outerMorph", blocks[at].outerHTML);
    });
    const others = blocks.slice(count).map((block) => block.outerHTML).join("\n");
    return morphs.join("") + (others && partial(`${name}-closed`, "beforeend", others));
  };
  document.addEventListener("htmx:sse:before:message", (event) => {
    const { message } = event.detail;
    if (message.event || event.defaultPrevented || message.data.startsWith("<!--snapshot-->")) return;
    hold();
    message.data = message.data.replace(CLOSING, moved);
  });
  document.addEventListener("htmx:sse:after:message", () => {
    for (const id of named) document.getElementById(id)?.removeAttribute("id");
    named = [];
  });

  // Restore the selection after a swap, because the browser drops its ranges in modified text.
  // Querying the selection forces a layout, so do not query it at each update.
  let [held, selected] = [null, false];
  document.addEventListener("selectionchange", () => { selected = !getSelection().isCollapsed; });
  const hold = () => {
    if (held || !selected) return;
    const { anchorNode, anchorOffset, focusNode, focusOffset } = getSelection();
    held = [anchorNode, anchorOffset, focusNode, focusOffset];
  };
  const release = () => {
    const [anchor, from, focus, to] = held ?? [];
    held = null;
    if (!anchor?.isConnected || !focus.isConnected) return;
    const within = (node, offset) => Math.min(offset, node.length ?? node.childNodes.length);
    const { anchorNode, anchorOffset, focusNode, focusOffset } = getSelection();
    if (anchorNode === anchor && anchorOffset === from && focusNode === focus && focusOffset === to) return;
    getSelection().setBaseAndExtent(anchor, within(anchor, from), focus, within(focus, to));
  };
  document.addEventListener("htmx:before:swap", hold);
  // An error page of a proxy has a title, which must not become the title of this page.
  document.addEventListener("htmx:before:swap", ({ detail: { ctx } }) => { if (ctx.response?.status >= 400) ctx.title = ""; });
  document.addEventListener("htmx:after:swap", release);

  // A reasoning panel is open while its text is generated, and closes afterwards. Panels that the user has clicked or
  // scrolled, including those of tool calls, stay as they are.
  const wanted = new Map();
  const touch = (event) => {
    const panel = event.target.closest?.("[data-panel]");
    const folds = event.type === "click" && event.target.closest("summary");
    if (panel) wanted.set(panel.dataset.panel, folds ? !panel.open : panel.open);
  };
  for (const kind of ["click", "scroll"]) document.addEventListener(kind, touch, true);
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
