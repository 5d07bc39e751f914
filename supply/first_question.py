"""Start a server with the command in the arguments, load its page and ask a question. Prints measurements as JSON.

Without arguments, the running server on port 3000 is used. This script needs only Python.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
if not sys.argv[1:]:
    port = 3000
begun = time.monotonic()
command, there = sys.argv[1:] or ["sleep", "60"], os.environ | {"NOTSO_PORT": str(port)}
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=there)


def get(path: str, data: bytes | None = None) -> str:
    key = os.environ.get("NOTSO_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)) as answer:
        return answer.read().decode()


def wait_for(path: str) -> str:
    while True:
        try:
            return get(path)
        except OSError:  # the server is starting, or loading the model
            assert server.poll() is None and time.monotonic() < begun + 60
            time.sleep(0.02)


page = wait_for("/")
first_page = time.monotonic() - begun
wait_for("/health")
model = json.loads(get("/v1/models"))["data"][0]["id"]
question = {"model": model, "messages": [{"role": "user", "content": "What is 27 + 48?"}], "temperature": 0}
answer = json.loads(get("/v1/chat/completions", json.dumps(question).encode()))["choices"][0]["message"]["content"]
server.terminate()
ended = time.monotonic()
assert (server.wait(30) == 0 or not sys.argv[1:]) and "<textarea" in page
print(json.dumps({"page": first_page, "answer": answer, "stop": time.monotonic() - ended}))
