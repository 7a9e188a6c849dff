"""Client that sends random requests of every kind."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from _server import HttpReply, Server, StreamedAnswer, session_path

KEYS = "anne sk-anne-0123456789 operator,bob sk-bob-0123456789ab"
TENANTS = ("sk-anne-0123456789", "sk-bob-0123456789ab")
EMBEDDER = "minilm"
MOST_TURNS = 4
WORDS = "bread salt plum tea rye jam oat fig nut egg corn leek".split()
TOOL_STEPS = 3
# The server writes calls in the form of `tool_template.jinja`.
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count what is there.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"enum": WORDS}, "kept": {"type": "boolean"}},
            "required": ["what", "kept"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class RandomClient:
    """Client that holds at most `most` sessions.

    `outcomes` counts results by request and status.
    """

    server: Server
    key: str
    name: str
    most: int
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    held: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    made: int = 0

    def __post_init__(self) -> None:
        self.own = Server(self.server.url, self.server.process, self.key)

    def fill(self) -> None:
        """Open the maximum number of sessions, each with its maximum length."""
        while len(self.held) < self.most:
            self.begin()
        for name in self.held:
            while len(self.held[name]) < 2 * (MOST_TURNS - 1):
                self._said(name, self.held[name])

    def run(self, until: float, seconds: float = 0.0) -> None:
        """Send random requests until a time of the monotonic clock.

        Args:
            seconds: least time from the start of one to the start of the next.
        """
        acts: list[tuple[Callable[[], str], int]] = [
            (self.begin, 4),
            (self.continue_session, 8),
            (self.disconnect, 3),
            (self.repeat, 1),
            (self.fork, 2),
            (self.move_session, 2),
            (self.copy_session, 1),
            (self.use_conversation, 2),
            (self.use_tools, 2),
            (self.embed, 2),
            (self.message, 2),
            (self.remove, 2),
            (self.use_wrong_key, 2),
            (self.send_invalid, 2),
        ]
        chances = [weight for _, weight in acts]
        while (started := time.monotonic()) < until:
            [(act, _)] = self.rng.choices(acts, chances)
            self.outcomes[f"{act.__name__}: {act()}"] += 1
            time.sleep(max(0.0, started + seconds - time.monotonic()))

    def begin(self) -> str:
        """Start a new session; the oldest one is removed if there are too many."""
        while len(self.held) >= self.most:
            self._removed(next(iter(self.held)))
        self.made += 1
        return self._said(f"{self.name} {self.made}", [])

    def continue_session(self) -> str:
        """Send the next turn of a random session."""
        return self._said(*self._any()) if self.held else "nothing there"

    def disconnect(self) -> str:
        """Disconnect from a stream before its end."""
        if not self.held:
            return "nothing there"
        name, result = self._any()
        heard = self._asked(name, [*result, self._line()], 64, self.rng.randrange(4))
        return _status(heard)

    def repeat(self) -> str:
        """Repeat the last request."""
        if not self.held:
            return "nothing there"
        name, result = self._any()
        return _status(self._asked(name, result[:-1], 8)) if result else "nothing said"

    def fork(self) -> str:
        """Fork a session."""
        if not self.held or len(self.held) >= self.most:
            return "no room"
        name, result = self._any()
        self.made += 1
        made = f"{self.name} {self.made}"
        reply = self.own.ask("POST", session_path(name, "fork"), {"name": made})
        if reply.status == 200:
            self.held[made] = list(result)
        return str(reply.status)

    def move_session(self) -> str:
        """Send a management request for a session."""
        if not self.held:
            return "nothing there"
        act = self.rng.choice(("pin", "unpin", "release", "prefetch", "compact"))
        reply = self.own.ask("POST", session_path(self._any()[0], act))
        if reply.status == 200:
            return "200"
        return f"{reply.status} {reply.json['error']['code']} of {act}"

    def copy_session(self) -> str:
        """Export a session and import it under another name."""
        if not self.held or len(self.held) >= self.most:
            return "no room"
        name, result = self._any()
        file = self.own.ask("POST", session_path(name, "export"))
        self.made += 1
        made = f"{self.name} {self.made}"
        reply = self.own.ask("POST", session_path(made, "import"), file.body)
        if reply.status == 200:
            self.held[made] = list(result)
        return str(reply.status)

    def use_conversation(self) -> str:
        """Create a conversation stored by the server, use it, and delete it."""
        made = self.own.ask("POST", "/v1/conversations", {}).json["id"]
        replies = []
        for _ in range(2):
            asked = {"model": "seed", "input": self._line()["content"], "conversation": made}
            replies.append(self.own.ask("POST", "/v1/responses", asked | {"max_output_tokens": 6}))
            if replies[-1].status == 200:
                self.own.ask("DELETE", f"/v1/responses/{replies[-1].json['id']}")
            else:
                return f"{replies[-1].status} {replies[-1].json['error']['code']}"
        gone = self.own.ask("DELETE", f"/v1/conversations/{made}")
        return " ".join(str(reply.status) for reply in (*replies, gone))

    def use_tools(self) -> str:
        """Let the model call a tool several times in a session of its own; some streams break off
        inside a call."""
        self.made += 1
        name = f"{self.name} {self.made}"
        messages: list[dict[str, Any]] = [self._line()]
        for step in range(TOOL_STEPS):
            body = self._body(name, messages, 64) | {"tools": [TOOL], "tool_choice": "required"}
            stop_after = self.rng.choice((None, None, None, self.rng.randrange(8)))
            answer = self.own.chat(body, stop_after)
            if answer.status != 200 or answer.error or not answer.kv:
                break
            result = {"role": "tool", "content": str(step), "tool_call_id": answer.calls[0]["id"]}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": answer.calls[:1]},
                result,
            ]
        self._removed(name)
        return _status(answer)

    def embed(self) -> str:
        """Embed some lines, as numbers or packed."""
        form = self.rng.choice(("float", "base64"))
        lines = [self._line()["content"] for _ in range(self.rng.randrange(1, 5))]
        body = {"model": EMBEDDER, "input": lines, "encoding_format": form}
        return str(self.own.ask("POST", "/v1/embeddings", body).status)

    def message(self) -> str:
        """Send a message in Anthropic's form in a session of its own, typed or not."""
        self.made += 1
        name = f"{self.name} {self.made}"
        body: dict[str, Any] = self._body(name, [self._line()], 12)
        if self.rng.random() < 0.5:
            schema = TOOL["function"]["parameters"]
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        reply = self.own.ask("POST", "/v1/messages", body | {"stream": self.rng.random() < 0.5})
        self._removed(name)
        return str(reply.status)

    def remove(self) -> str:
        """Remove a session."""
        return self._removed(self._any()[0]) if self.held else "nothing there"

    def use_wrong_key(self) -> str:
        """Use a wrong key, and the name of another tenant's session."""
        wrong = self.own.ask("GET", "/v1/sessions", key="sk-wrong-0123456789")
        other = next(key for key in TENANTS if key != self.key)
        name = next(iter(self.held), "none")
        far = self.own.ask("GET", session_path(name), key=other)
        return f"{wrong.status} {far.status}"

    def send_invalid(self) -> str:
        """Send an invalid request."""
        bad: list[tuple[str, Any]] = [
            ("/v1/chat/completions", b"{"),
            ("/v1/chat/completions", {"model": "seed", "messages": []}),
            ("/v1/chat/completions", self._body("x", [self._line()], 10**9)),
            ("/v1/responses", {"input": "x", "conversation": "conv_unheard_of"}),
            (session_path("x", "import"), bytes(self.rng.randrange(256) for _ in range(64))),
        ]
        return str(self.own.ask("POST", *self.rng.choice(bad)).status)

    def _said(self, name: str, messages: list[dict[str, str]]) -> str:
        asked = [*messages, self._line()]
        heard = self._asked(name, asked, self.rng.randrange(1, 12))
        if heard.status != 200 or heard.error:
            return _status(heard)
        self.held[name] = [*asked, {"role": "assistant", "content": heard.text}]
        if len(self.held[name]) >= 2 * MOST_TURNS:
            self._removed(name)
        return _status(heard)

    def _asked(
        self, name: str, messages: list[dict[str, str]], new: int, stop_after: int | None = None
    ) -> StreamedAnswer:
        return self.own.chat(self._body(name, messages, new), stop_after)

    def _body(self, name: str, messages: list[dict[str, str]], new: int) -> dict[str, Any]:
        return {"model": "seed", "messages": messages, "session_id": name, "max_tokens": new}

    def _any(self) -> tuple[str, list[dict[str, str]]]:
        name = self.rng.choice(list(self.held))
        return name, self.held[name]

    def _line(self) -> dict[str, str]:
        words = " ".join(self.rng.choices(WORDS, k=self.rng.randrange(5, 60)))
        return {"role": "user", "content": f"I have {words}. What do I have?"}

    def _removed(self, name: str) -> str:
        reply: HttpReply = self.own.ask("DELETE", f"{session_path(name)}?branches=true")
        if reply.status in (200, 404):
            self.held.pop(name, None)
        return str(reply.status)


def _status(heard: StreamedAnswer) -> str:
    if heard.error:
        return f"{heard.status} {heard.error.get('code')}"
    return f"{heard.status} {'told' if heard.kv else 'left'}"
