// Scrolls along with new text while the page is at the end, and not otherwise.
{
  const scroller = document.getElementById("scroller");
  const newest = document.getElementById("newest");
  const wanted = () => document.documentElement.dataset.follow === "on";
  let [following, last, height] = [!location.hash.startsWith("#msg-"), 0, 0];
  const note = () => { [last, height] = [scroller.scrollTop, scroller.scrollHeight]; };
  const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; note(); }; // the event fires later
  const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 64;
  const offer = () => { newest.hidden = following || isAtEnd(); };
  const look = () => {
    // Only scrolling up stops following: text may have grown by more than a screen. If the height changed, the browser
    // may have scrolled up itself, because messages get their real height when first drawn.
    if (isAtEnd()) following = wanted();
    else if (scroller.scrollTop < last && scroller.scrollHeight === height) following = false;
    note();
    offer();
  };
  scroller.addEventListener("scroll", look, { passive: true });
  newest.addEventListener("click", () => { following = wanted(); toEnd(); });
  scroller.addEventListener("click", ({ target }) => { following &&= !target.closest("summary"); }); // it is being read
  document.getElementById("composer").addEventListener("submit", () => { following = true; });
  new ResizeObserver(() => { if (following) toEnd(); else offer(); }).observe(document.getElementById("turns"));
  new ResizeObserver(() => { if (following) toEnd(); }).observe(scroller);
  if (following) toEnd();
  // A new rendering starts with the first message on the page, including earlier ones.
  document.addEventListener("htmx:config:request", ({ detail }) => {
    const shown = document.querySelectorAll("#turns > article[id^='msg-']");
    const { headers } = detail.ctx.request;
    if (shown.length) headers["X-From"] = shown[0].id.replace("msg-", "");
    // A new message continues the branch that this page shows.
    headers["X-Last"] = shown.length ? shown[shown.length - 1].id.replace("msg-", "") : "";
  });
}
