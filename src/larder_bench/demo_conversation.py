"""Generator of the conversation of `larder demo`: `python -m larder_bench.demo_conversation
[FILE]`.

A life-log of about 6,000 tokens, within the context that the seed model was trained on, with
questions about single facts of many sessions, the kind it answers best with the full cache.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer

from larder.core import Conversation
from larder_bench.datasets.conversation_file import conversation_json
from larder_bench.datasets.lifelog_questions import lifelog_conversation

SEED = 0
TOKENS = 6000
QUESTIONS = 24
BUNDLED = Path(str(resources.files("larder.cli"))) / "demo" / "conversation.json"


def demo_conversation() -> Conversation:
    """Conversation of `larder demo`, generated from its seed."""
    tokenizer = Tokenizer.from_str(
        resources.files("larder.models").joinpath("seed", "tokenizer.json").read_text("utf-8")
    )
    return lifelog_conversation(
        SEED, TOKENS, lambda text: len(tokenizer.encode(text).ids), QUESTIONS, kinds=("single",)
    )


def main() -> None:
    """Write the file; into the package unless another path is given."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(conversation_json(demo_conversation()), encoding="utf-8")


if __name__ == "__main__":
    main()
