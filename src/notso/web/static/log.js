// Follows the newest words while the reader is at the end, and leaves the page alone while not.
{
  const scroller = document.getElementById("scroller");
  const newest = document.getElementById("newest");
  let following = true;
  let last = 0;
  const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };
  const look = () => {
    // Only going up means leaving: text may have grown by more than a screen since the last look.
    const top = scroller.scrollTop;
    if (scroller.scrollHeight - top - scroller.clientHeight < 64) following = true;
    else if (top < last) following = false;
    last = top;
    newest.hidden = following;
  };
  scroller.addEventListener("scroll", look, { passive: true });
  newest.addEventListener("click", () => { following = true; toEnd(); });
  document.addEventListener("submit", () => { following = true; });
  new ResizeObserver(() => { if (following) toEnd(); else look(); }).observe(document.getElementById("turns"));
  new ResizeObserver(() => { if (following) toEnd(); }).observe(scroller);
  toEnd();
}
