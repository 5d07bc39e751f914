// Selected and dropped files are uploaded one at a time; the list then shows their states.
{
  const BYTES = 16 * 1024 * 1024;
  const input = document.getElementById("upload");
  const report = document.getElementById("upload-report");
  const refused = (name, reason) => `${name} ${report.dataset[reason] ?? reason}`;
  const store = async (file) => {
    if (file.size > BYTES) return refused(file.name, "large");
    report.textContent = refused(file.name, "running");
    const headers = { "Content-Type": "application/octet-stream" };
    try {
      const answer = await fetch(`${document.documentElement.dataset.root}/documents?library=${input.dataset.library ?? ""}&name=${encodeURIComponent(file.name)}`, { method: "POST", headers, body: file });
      return answer.ok ? "" : refused(file.name, (await answer.json()).problem);
    } catch { return refused(file.name, "offline"); }
  };
  const take = async (files) => {
    const problems = [];
    for (const file of files) problems.push(await store(file));
    report.textContent = problems.filter(Boolean).join(" ");
    input.value = "";
    document.getElementById("documents").dispatchEvent(new Event("refresh"));
  };
  input?.addEventListener("change", () => take([...input.files]));
  for (const name of ["dragover", "drop"]) {
    document.addEventListener(name, (event) => {
      if (!input || !event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      if (name === "drop") take([...event.dataTransfer.files]);
    });
  }
}
