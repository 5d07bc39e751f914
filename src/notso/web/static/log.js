// Follows the newest words while the reader is at the end, and leaves the page alone while not.
{
  const scroller = document.getElementById("scroller");
  const newest = document.getElementById("newest");
  let following = true;
  const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };
  const look = () => {
    following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 64;
    newest.hidden = following;
  };
  scroller.addEventListener("scroll", look, { passive: true });
  newest.addEventListener("click", () => { following = true; toEnd(); });
  document.addEventListener("submit", () => { following = true; });
  new ResizeObserver(() => { if (following) toEnd(); else look(); }).observe(document.getElementById("turns"));
  new ResizeObserver(() => { if (following) toEnd(); }).observe(scroller);
  toEnd();
}
