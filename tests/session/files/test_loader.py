"""Files of every form become conversations, and bad ones a line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from larder import Conversation, Message, Question, read_conversation
from larder.core import InputError, PromptLayout
from larder.session import find_files, read_document
from session.files.conversation_files import complaint, text_of, write


class TestChats:
    def test_messages_and_questions_are_read(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            {
                "messages": [{"role": "user", "content": "My cat is Tom."}],
                "qa": [
                    {"question": "Who is Tom?", "answer": "my cat", "kind": "single"},
                    {"question": "How many cats?", "answer": 1},
                ],
            },
        )
        assert read_conversation(path) == Conversation(
            name="talk",
            messages=(Message("user", "My cat is Tom."),),
            questions=(
                Question("Who is Tom?", "my cat", "single"),
                Question("How many cats?", "1"),
            ),
        )

    def test_questions_may_be_absent(self, tmp_path: Path) -> None:
        path = write(tmp_path, {"messages": [{"role": "system", "content": "x"}]})
        assert read_conversation(path).questions == ()

    def test_list_of_messages_is_a_chat(self, tmp_path: Path) -> None:
        entries = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        conversation = read_conversation(write(tmp_path, entries))
        assert conversation.form is PromptLayout.CHAT
        assert [(m.role, m.content) for m in conversation.messages] == [
            ("user", "a"),
            ("assistant", "b"),
        ]

    def test_dates_are_prepended_where_they_change(self, tmp_path: Path) -> None:
        turns = [("user", "Mon"), ("assistant", "Mon"), ("assistant", "Tue"), ("user", "Tue")]
        turns += [("user", "Tue")]
        entries = [{"role": role, "content": "x", "date": date} for role, date in turns]
        messages = read_conversation(write(tmp_path, entries)).messages
        assert [m.content for m in messages] == ["[Mon]\nx", "x", "x", "[Tue]\nx", "x"]
        assert [m.date for m in messages] == ["Mon", "Mon", "Tue", "Tue", "Tue"]
        assert {m.utterance or m.content for m in messages} == {"x"}

    def test_byte_order_mark_is_accepted(self, tmp_path: Path) -> None:
        path = write(tmp_path, b'\xef\xbb\xbf[{"role": "user", "content": "x"}]')
        assert read_conversation(path).messages == (Message("user", "x"),)


class TestDocuments:
    def test_paragraphs_of_a_document_are_messages(self, tmp_path: Path) -> None:
        path = write(tmp_path, "# One\n\n  two\nthree\n \n\nfour", "notes.md")
        conversation = read_conversation(path)
        assert (conversation.form, conversation.name) == (PromptLayout.DOCUMENT, "notes")
        contents = [message.content for message in conversation.messages]
        assert contents == ["# One\n\n", "  two\nthree\n \n\n", "four"]
        assert [m.utterance for m in conversation.messages] == ["# One", "two\nthree", "four"]

    @given(st.text(alphabet="a \n\r\t", min_size=1).filter(str.strip))
    def test_paragraphs_joined_are_the_file(self, text: str) -> None:
        conversation = read_document(text, "any")
        assert text_of(conversation) == text
        assert all(message.utterance for message in conversation.messages)


class TestFinding:
    def test_folder_expands_to_its_conversations(self, tmp_path: Path) -> None:
        for name in ("b.json", "a.JSON", "README.md", ".hidden.json", "c.png"):
            write(tmp_path, "x", name)
        assert [path.name for path in find_files([tmp_path])] == ["a.JSON", "b.json"]

    def test_folder_expands_to_its_documents(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a.md", "c.png"):
            write(tmp_path, "x", name)
        assert [path.name for path in find_files([tmp_path])] == ["a.md", "b.txt"]

    def test_file_named_twice_is_read_once(self, tmp_path: Path) -> None:
        paths = [write(tmp_path, "x", name) for name in ("b.json", "a.json")]
        assert find_files([paths[0], tmp_path]) == paths

    def test_folder_without_readable_files_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path, "x", "c.png")
        with pytest.raises(InputError, match="holds no readable file.*json, .txt, .md"):
            find_files([tmp_path])

    def test_missing_path_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="gone.json does not exist"):
            find_files([tmp_path / "gone.json"])


@pytest.mark.parametrize("name", ["server.log", "module.py", "page.rst", "main.RS"])
def test_logs_and_programs_are_documents(tmp_path: Path, name: str) -> None:
    text = "first line\n\nsecond: 1\n"
    path = write(tmp_path, text.encode(), name)
    conversation = read_conversation(path)
    assert conversation.form is PromptLayout.DOCUMENT
    assert "".join(message.content for message in conversation.messages) == text
    with pytest.raises(InputError, match="no readable file"):
        find_files([tmp_path])


class TestBadInput:
    def test_missing_file_is_refused(self, tmp_path: Path) -> None:
        assert "does not exist" in complaint(tmp_path / "gone.json")

    def test_folder_instead_of_a_file_is_refused(self, tmp_path: Path) -> None:
        assert "is a folder: name a file" in complaint(tmp_path)

    @pytest.mark.parametrize(
        ("content", "name", "message"),
        [
            (b"", "talk.json", "is empty"),
            (b"", "talk.md", "is empty"),
            (b" \n\t ", "talk.json", "is blank"),
            (b" \n\t ", "talk.txt", "is blank"),
            (b"\xff\xfe\x00\x01", "talk.json", "byte 0 is not UTF-8"),
            (b"a\x00b", "talk.txt", "zero bytes"),
            (b"x", "talk.docx", "ends in '.docx': a file must end in one of .json, .txt, .md"),
            (b"x", "talk", "has no ending: a file must end in one of .json"),
            (b'[\n  {"role": }]', "talk.json", "line 2, column 12"),
            (b"[" * 100_000, "talk.json", "nests too deeply"),
            (b"9" * 5000, "talk.json", "thousands of digits"),
        ],
    )
    def test_undecodable_files_are_refused(
        self, tmp_path: Path, content: bytes, name: str, message: str
    ) -> None:
        assert message in complaint(write(tmp_path, content, name))

    @pytest.mark.parametrize("content", [{}, {"text": "x"}, "3", '"text"', "null"])
    def test_unknown_json_shape_lists_the_known_ones(self, tmp_path: Path, content: object) -> None:
        message = complaint(write(tmp_path, content))
        assert all(word in message for word in ('{"messages"', "list of", "LoCoMo", "RealTalk"))

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ({"role": "robot", "content": "x"}, "unknown role 'robot'.* system, user, assistant"),
            ({"content": "x"}, "message 2 has no 'role'"),
            ({"role": "user"}, "message 2 has no 'content'"),
            ({"role": "user", "content": ["x"]}, "'content' must be a text, got a list"),
            ({"role": "user", "content": None}, "'content' must be a text, got null"),
            ({"role": "user", "content": {}}, "'content' must be a text, got an object"),
            ({"role": "user", "content": 7}, "'content' must be a text, got the number 7"),
            ({"role": "user", "content": " "}, "'content' is blank"),
            ({"role": "user", "content": "\ud83d"}, "half a surrogate pair"),
            ({"role": "user", "content": "x", "date": []}, "'date' must be a text or a number"),
            ("x", "message 2 must be an object"),
            ({"conversation": {}}, "a whole LoCoMo sample"),
        ],
    )
    def test_invalid_messages_are_refused(
        self, tmp_path: Path, entry: object, message: str
    ) -> None:
        entries = [{"role": "user", "content": "fine"}, entry]
        for content in (entries, {"messages": entries}):
            with pytest.raises(InputError, match=message):
                read_conversation(write(tmp_path, content))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"messages": [], "qa": []}, "list of messages is empty"),
            ([], "list of messages is empty"),
            ({"messages": "x"}, "'messages' must be a list"),
            ({"messages": [{"role": "user", "content": "x"}], "qa": {}}, "'qa' must be a list"),
        ],
    )
    def test_invalid_lists_are_refused(self, tmp_path: Path, content: object, message: str) -> None:
        assert message in complaint(write(tmp_path, content))

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ({"answer": "x"}, "qa 1 has no 'question'"),
            ({"question": ["x"], "answer": "x"}, "qa 1: 'question' must be a text"),
            ({"question": "x", "answer": ["x"]}, "qa 1: 'answer' must be a text or a number"),
            ({"question": "x", "answer": True}, "must be a text or a number, got true"),
        ],
    )
    def test_invalid_questions_are_refused(
        self, tmp_path: Path, entry: object, message: str
    ) -> None:
        content = {"messages": [{"role": "user", "content": "x"}], "qa": [entry]}
        assert message in complaint(write(tmp_path, content))
