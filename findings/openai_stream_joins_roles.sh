#!/usr/bin/env bash
# openai 3.57.0: a role that stands in two chunks becomes "assistantassistant".
#
# Expected: a role is one word of a closed list. A server that repeats it in each chunk, as it repeats
# the id and the model, says nothing new, and the final message has it once: the type of its field is
# Literal["assistant"].
# Seen: client.chat.completions.stream joins all texts of the deltas, roles too, and does not check
# the result. The final message does not fit its own type. A client that sends it back in the next
# request sends a role that no server knows. Numbers are added: a field with 1 in the first chunk and
# 2 in the second is 3 in the message, so a running total counts too much. Only "index" and "type"
# are copied. The plain iterator over chunks shows "assistant" each time, so a server that was tested
# with it alone looks sound.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
from openai.types.chat import ChatCompletion


def events(roles):
    kind = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas = [{"content": "Hel", "tokens_so_far": 1}, {"content": "lo", "tokens_so_far": 2}]
    for delta in deltas[:roles]:
        delta["role"] = "assistant"
    ends = [None, "stop"]
    for delta, end in zip(deltas, ends, strict=True):
        choice = {"index": 0, "delta": delta, "finish_reason": end}
        yield f"data: {json.dumps({**kind, 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in events(int(self.path.split("/")[1])):
            self.wfile.write(event.encode())

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
found = {}
for roles in 1, 2:
    url = f"http://127.0.0.1:{server.server_port}/{roles}"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    chunks = [*client.chat.completions.create(**asked, stream=True)]
    plain = {chunk.choices[0].delta.role for chunk in chunks} - {None}
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    found[roles] = message.role, message.content, message.model_extra["tokens_so_far"]
    print(f"role in {roles} of 2 chunks: chunks {plain}, final message {found[roles]}")
try:
    ChatCompletion.model_validate(final.to_dict())
except ValueError as error:
    print("the message does not fit its own type:", str(error).splitlines()[1])
    refused = True
else:
    refused = False
server.shutdown()
expected = {1: ("assistant", "Hello", 3), 2: ("assistantassistant", "Hello", 3)}
raise SystemExit(not (refused and found == expected))
PYTHON
