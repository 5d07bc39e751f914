// Follows the newest words while the reader is at the end, and leaves the page alone while not.
{
  const scroller = document.getElementById("scroller");
  const newest = document.getElementById("newest");
  const wanted = () => document.documentElement.dataset.follow === "on";
  let [following, last, height] = [!location.hash.startsWith("#msg-"), 0, 0];
  const note = () => { [last, height] = [scroller.scrollTop, scroller.scrollHeight]; };
  const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; note(); }; // its event comes later
  const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 64;
  const offer = () => { newest.hidden = following || isAtEnd(); };
  const look = () => {
    // Only going up means leaving: text may have grown by more than a screen since the last look. Where the height has
    // changed, the browser may have gone up itself, as messages get their real height when they are first drawn.
    if (isAtEnd()) following = wanted();
    else if (scroller.scrollTop < last && scroller.scrollHeight === height) following = false;
    note();
    offer();
  };
  scroller.addEventListener("scroll", look, { passive: true });
  newest.addEventListener("click", () => { following = wanted(); toEnd(); });
  scroller.addEventListener("click", ({ target }) => { following &&= !target.closest("summary"); }); // it is looked at
  document.getElementById("composer").addEventListener("submit", () => { following = true; });
  new ResizeObserver(() => { if (following) toEnd(); else offer(); }).observe(document.getElementById("turns"));
  new ResizeObserver(() => { if (following) toEnd(); }).observe(scroller);
  if (following) toEnd();
  // What is shown anew begins where the page does, however many earlier messages were fetched.
  document.addEventListener("htmx:config:request", ({ detail }) => {
    const shown = document.querySelectorAll("#turns > article[id^='msg-']");
    const { headers } = detail.ctx.request;
    if (shown.length) headers["X-From"] = shown[0].id.replace("msg-", "");
    // What is written continues the branch that is shown, whichever the server shows by default.
    headers["X-Last"] = shown.length ? shown[shown.length - 1].id.replace("msg-", "") : "";
  });
}
