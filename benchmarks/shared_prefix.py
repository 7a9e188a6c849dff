"""Memory of sessions with a common prefix, in a server of its own.

    python benchmarks/shared_prefix.py [--model smollm2] [--sessions 8] [--words 1500]

Each session asks a question of its own behind the same text, one after the other. Printed are, for
each session, the tokens of its prompt that were cached, what `/metrics` counts on the device, the
sum over sessions of what each holds (a shared prefix once for each of them), and the resident
memory of the server.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from _server import Server, run_server

DEVICE = 'larder_tier_bytes{tier="device"}'
MIB = 1 << 20


def main() -> None:
    options = _options()
    serve = ["--model", options.model, "--dtype", options.dtype, "--policy", "full"]
    with tempfile.TemporaryDirectory() as home, run_server(Path(home), serve) as server:
        for number in range(options.sessions):
            print(f"{number + 1} sessions: {_answered(server, options, number)}", flush=True)


def _answered(server: Server, options: argparse.Namespace, number: int) -> str:
    rules = " ".join(f"rule {each}" for each in range(options.words // 2))
    messages = [
        {"role": "system", "content": f"The rules of the house are {rules}."},
        {"role": "user", "content": f"{number + 3} guests come. What do they do?"},
    ]
    body = {"model": options.model, "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = server.chat(body | {"session_id": f"guest-{number}"})
    if answer.error:
        raise RuntimeError(f"a request was refused: {answer.error}")
    usage = answer.usage
    counted = server.metrics()[DEVICE] / MIB
    summed = sum(each["tier_bytes"]["device"] for each in server.sessions()) / MIB
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    [resident] = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.process}/status").read_text())
    return (
        f"{cached} of {usage['prompt_tokens']} prompt tokens cached; {counted:.1f} MiB counted, "
        f"{summed:.1f} summed over sessions, {int(resident) / 1024:.0f} resident"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--words", type=int, default=1500, help="of the common prefix")
    return parser.parse_args()


if __name__ == "__main__":
    main()
