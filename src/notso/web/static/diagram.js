// Draws a Mermaid diagram in a sandboxed frame of another origin. The page sends the source as a message.
{
  const place = document.getElementById("diagram");
  addEventListener("message", async ({ data, source }) => {
    if (source !== parent || typeof data?.text !== "string") return;
    mermaid.initialize({ startOnLoad: false, suppressErrorRendering: true, securityLevel: "strict", theme: data.dark ? "dark" : "default", maxTextSize: 50_000 });
    document.documentElement.lang = data.language;
    document.body.classList.toggle("dark", data.dark);
    try {
      const { svg } = await mermaid.render("drawn", data.text);
      place.replaceChildren(document.adoptNode(new DOMParser().parseFromString(svg, "text/html").body.firstElementChild));
    } catch (error) {
      place.textContent = String(error?.message ?? error);
    }
  });
  parent.postMessage("ready", "*");
}
