"""Chat that remembers within its budget, however long it gets."""

from larder import Chat, Engine

engine = Engine.load(policy="epicache", budget="128")
chat = Chat(engine)  # give it a name, and it survives the process
for line in ("By the way, my cat is called Minka.", "What is my cat called?"):
    print(chat.say(line, max_new_tokens=16).text)
print(chat.figures)
