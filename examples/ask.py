"""Read a conversation under a memory budget and ask about it."""

from pathlib import Path

from larder import Engine, read_conversation

engine = Engine.load(policy="epicache", budget="128")  # the bundled model, 128 tokens per head
conversation = read_conversation(Path(__file__).with_name("conversation.json"))
memory = engine.read(conversation)
for question in conversation.questions:
    answer = engine.ask(memory, question.question)
    print(f"{question.question} {answer.text} (episode {answer.episode})")
print(f"{memory.figures.active_kv_bytes} of {memory.figures.full_kv_bytes} bytes in use")
