// Keeps the end of the log in view as text arrives, unless the user has scrolled up.
{
  const scroller = document.getElementById("scroller");
  const newest = document.getElementById("newest");
  const wanted = () => document.documentElement.dataset.follow === "on";
  let [following, last, height] = [!location.hash.startsWith("#msg-"), 0, 0];
  const note = () => { [last, height] = [scroller.scrollTop, scroller.scrollHeight]; };
  const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; note(); }; // the scroll event fires later
  const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 64;
  const offer = () => { newest.hidden = following || isAtEnd(); };
  const look = () => {
    // Only scrolling up stops following. Being far from the end does not, because text may grow by more than a screen
    // at once. If the height changed, the browser itself may have scrolled up, because messages get their real height
    // when they are first drawn.
    if (isAtEnd()) following = wanted();
    else if (scroller.scrollTop < last && scroller.scrollHeight === height) following = false;
    note();
    offer();
  };
  scroller.addEventListener("scroll", look, { passive: true });
  newest.addEventListener("click", () => { following = wanted(); toEnd(); });
  scroller.addEventListener("click", ({ target }) => { following &&= !target.closest("summary"); }); // the user reads a panel
  document.getElementById("composer").addEventListener("submit", () => { following = true; });
  new ResizeObserver(() => { if (following) toEnd(); else offer(); }).observe(document.getElementById("turns"));
  new ResizeObserver(() => { if (following) toEnd(); }).observe(scroller);
  if (following) toEnd();
  // X-From: the oldest message on the page. If a response renders the branch again, it starts with this message.
  document.addEventListener("htmx:config:request", ({ detail }) => {
    const shown = document.querySelectorAll("#turns > article[id^='msg-']");
    const { headers } = detail.ctx.request;
    if (shown.length) headers["X-From"] = shown[0].id.replace("msg-", "");
    // X-Last: a new message continues the branch of this one.
    headers["X-Last"] = shown.length ? shown[shown.length - 1].id.replace("msg-", "") : "";
  });
}
