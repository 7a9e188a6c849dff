"""Write the conversation of `larder demo`: `python -m larder_bench.demo_conversation [FILE]`.

A life-log of some 6,000 tokens, within what the seed model was trained to read, with questions for
single facts of many sessions, the kind it answers best with the full cache.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer

from larder.core.conversation import Conversation
from larder_bench.datasets.conversation_file import conversation_json
from larder_bench.datasets.lifelog_questions import lifelog_conversation

SEED = 0
TOKENS = 6000
QUESTIONS = 24
BUNDLED = Path(str(resources.files("larder.cli"))) / "demo" / "conversation.json"


def demo_conversation() -> Conversation:
    """The conversation, made anew."""
    tokenizer = Tokenizer.from_str(
        resources.files("larder.models").joinpath("seed", "tokenizer.json").read_text("utf-8")
    )
    return lifelog_conversation(
        SEED, TOKENS, lambda text: len(tokenizer.encode(text).ids), QUESTIONS, kinds=("single",)
    )


def main() -> None:
    """Write the file, at its place in the package unless another is named."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(conversation_json(demo_conversation()), encoding="utf-8")


if __name__ == "__main__":
    main()
