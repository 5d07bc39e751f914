// Import the selected file. It is compressed with gzip unless it is already compressed, because the upload size is limited.
document.addEventListener("change", async ({ target }) => {
  if (target.id !== "import" || !target.files[0]) return;
  const BYTES = 16 * 1024 * 1024, HEAD = 4;
  const report = document.getElementById("import-report");
  const headers = { "Content-Type": "application/octet-stream", "HX-Request": "true" };
  report.textContent = report.dataset.running;
  try {
    let body = target.files[0];
    const head = String(new Uint8Array(await body.slice(0, HEAD).arrayBuffer()));
    if (!head.startsWith("80,75,") && !head.startsWith("31,139,")) {
      body = await new Response(body.stream().pipeThrough(new CompressionStream("gzip"))).blob();
    }
    if (body.size > BYTES) {
      report.textContent = report.dataset.large;
      return;
    }
    const answer = await fetch(`${document.documentElement.dataset.root}/import`, { method: "POST", headers, body });
    const chat = answer.headers.get("HX-Redirect");
    if (chat) {
      location.assign(chat);
      return;
    }
    const html = new DOMParser().parseFromString(await answer.text(), "text/html");
    report.replaceChildren(...html.body.childNodes);
  } catch {
    report.textContent = report.dataset.offline;
  } finally {
    target.value = "";
  }
});
