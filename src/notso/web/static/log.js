// Follows the newest words while the reader is at the end, and leaves the page alone while not.
{
  const scroller = document.getElementById("scroller");
  const newest = document.getElementById("newest");
  const wanted = () => document.documentElement.dataset.follow === "on";
  let [following, last] = [!location.hash.startsWith("#msg-"), 0];
  const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };
  const look = () => {
    // Only going up means leaving: text may have grown by more than a screen since the last look.
    const top = scroller.scrollTop;
    const away = scroller.scrollHeight - top - scroller.clientHeight;
    if (away < 64) following = wanted();
    else if (top < last) following = false;
    last = top;
    newest.hidden = following || away < 64;
  };
  scroller.addEventListener("scroll", look, { passive: true });
  newest.addEventListener("click", () => { following = wanted(); toEnd(); });
  scroller.addEventListener("click", ({ target }) => { following &&= !target.closest("summary"); }); // it is looked at
  document.getElementById("composer").addEventListener("submit", () => { following = true; });
  new ResizeObserver(() => { if (following) toEnd(); else look(); }).observe(document.getElementById("turns"));
  new ResizeObserver(() => { if (following) toEnd(); }).observe(scroller);
  if (following) toEnd();
}
