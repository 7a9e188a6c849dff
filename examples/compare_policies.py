"""Comparison of policies on one conversation: a policy is a sentence of parts."""

from pathlib import Path

from larder import Engine, read_conversation
from larder_bench.scoring.teacher_forcing import score_answers

conversation = read_conversation(Path(__file__).with_name("conversation.json"))
full = Engine.load(policy="full")
for policy in ("full", "streaming_llm", "keydiff() > pooled(kept=0.5)", "snapkv() > uniform()"):
    engine = full.under(policy, None if "full" in policy or "kept" in policy else "50%")
    memory = engine.read(conversation)
    right = sum(result.exact for result in score_answers(engine, memory, conversation.questions))
    print(
        f"{right} of {len(conversation.questions)} exact, {memory.figures.kv_bytes} bytes: {policy}"
    )
