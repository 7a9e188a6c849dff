"""The expected answers of tasks equal those of a slow reader of the text."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.corpus_files import sources
from bench.lifelog_reader import SINGLES, facts_of
from larder import Conversation, Question
from larder.core import BadParameter
from larder_bench.datasets.sources import TaskSources
from larder_bench.tasks.base import QuestionStyle, parse_task

MAGIC = r"One of the special magic numbers for ([\w ]+) is: (\d+)\."
FORMS = (
    r"For the (?P<n>train|boat) whose (?P<s>\w+) was (?P<v>\w+), what was the (?P<w>\w+)\?",
    r"What was the (?P<w>\w+) of the (?P<n>train|boat) with (?P<s>\w+) (?P<v>\w+)\?",
    r"Remind me of the (?P<w>\w+) of the (?P<n>train|boat) \((?P<s>\w+): (?P<v>\w+)\)\.",
    r"In which session did we talk about the (?P<n>train|boat) whose (?P<s>\w+) was (?P<v>\w+)\?",
)
NAMED = r"What (?:is|are)(?: all)? the special magic numbers? for (.+) mentioned in the text\?"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> TaskSources:
    return sources(tmp_path_factory.mktemp("material"))


def text_of(conversation: Conversation) -> str:
    return "\n".join(message.content for message in conversation.messages)


def magic(question: str, text: str) -> str:
    """All numbers of all things that a question names."""
    (named,) = re.findall(NAMED, question)
    found = re.findall(MAGIC, text)
    keys = re.split(r", | and ", named)
    return ", ".join(number for key in keys for thing, number in found if thing == key)


def looked_up(question: str, text: str) -> str:
    if question == "What is the pass key?":
        return re.findall(r"The pass key is (\d+)\. Remember it", text)[0]
    (name,) = re.findall(r"What is the value of (\w+)\?", question)
    (value,) = re.findall(rf"\b{name}: (\w+)\.", text)
    return value


def followed(question: str, text: str) -> str:
    """Value found by following a variable back to a number."""
    name = question.removesuffix("?").rpartition(" ")[2]
    while not name.isdigit():
        (name,) = re.findall(rf"VAR {name} = (?:VAR )?(\w+)\.", text)
    return name


def needle(question: str, text: str) -> str:
    return magic(question, text) if "magic" in question else looked_up(question, text)


def common(question: str, text: str) -> str:
    """Most frequent words of the list."""
    words = re.findall(r"\d+\. (\w+)", text)
    numbers = [int(number) for number in re.findall(r"(\d+)\. \w+", text)]
    assert numbers == list(range(1, len(words) + 1))
    most = int(re.findall(r"Which (\d+) words", question)[0])
    counts = Counter(words).most_common()
    assert counts[most - 1][1] > counts[most][1]
    chosen = {word for word, _ in counts[:most]}
    return ", ".join(dict.fromkeys(word for word in words if word in chosen))


def frequent(question: str, text: str) -> str:
    """The three most frequent words, the most frequent one first."""
    counts = Counter(word for word in text.split("\n")[0].split()[9:] if word != "...")
    ordered = counts.most_common(4)
    assert "three" in question and len({number for _, number in ordered}) == 4
    return ", ".join(word for word, _ in ordered[:3])


def continued(question: str, text: str) -> str:
    """The 5 or 32 words after the quoted ones, which stand in the text once."""
    (first,) = re.findall(r'after the words "(.+)"\.', question)
    _, rest = text.split(f"{first} ")
    return " ".join(rest.split()[: 5 if "Sentence" in text else 32])


def labelled(question: str, text: str) -> str:
    """Label of the examples that begin like the utterance; a new one has no other example."""
    (asked,) = re.findall(r'the utterance "(.+)"\?', question)
    examples = dict(re.findall(r"^Utterance: (.+)\nLabel: (\w+)$", text, re.MULTILINE))
    counts = Counter(examples.values())
    assert asked not in examples and len(counts) == 2 and len(set(counts.values())) == 1
    (label,) = {label for one, label in examples.items() if one.split()[1] == asked.split()[1]}
    return label


def replayed(question: str, text: str) -> str:
    """Balances of a ledger, replayed step by step."""
    who, ledger = re.findall(r"How much does (\w+) have in ledger (\d+)\?", question)[0]
    (line,) = re.findall(rf"^Ledger {ledger}: (.+)$", text, re.MULTILINE)
    purses = {name: int(sum) for name, sum in re.findall(r"(\w+) has (\d+)", line)}
    worked = []
    for step, giver, gift, taker in re.findall(r"Step (\d+): (\w+) gives (\d+) to (\w+)\.", line):
        assert int(step) == len(worked) + 1 and giver != taker
        purses[giver] -= int(gift)
        purses[taker] += int(gift)
        assert purses[giver] >= 0
        worked.append(f"{step}: {giver} {purses[giver]}, {taker} {purses[taker]}.")
    return " ".join([*worked, f"Answer: {purses[who]}"])


def recited(question: str, text: str) -> str:
    first, last = map(int, re.findall(r"\d+", question))
    reminders = dict(re.findall(r" Reminder (\d+): (.+)\.$", text, re.MULTILINE))
    return " ".join(f"{n}: {reminders[str(n)]}." for n in range(first, last + 1))


READERS: dict[str, Callable[[str, str], str]] = {
    "needles": needle,
    'needles(kind="kv", needles=3)': looked_up,
    'needles(kind="magic", hay="prose")': magic,
    "passkey": looked_up,
    'passkey(hay="talk")': looked_up,
    "lookup": looked_up,
    "variables": followed,
    "variables(chains=2, hops=0)": followed,
    "multi_key": magic,
    "multi_key(questions=2, keys=5)": magic,
    "multi_value": magic,
    "multi_query": magic,
    "multi_query(queries=2, questions=5)": magic,
    "common_words": common,
    "common_words(common=2, often=9, seldom=1)": common,
    "frequent_words": frequent,
    "frequent_words(alpha=1.5)": frequent,
    "passage": continued,
    'passage(length=5, of="prose")': continued,
    "few_shot": labelled,
    "few_shot(questions=3)": labelled,
    "ledger": replayed,
    "ledger(steps=3, people=2)": replayed,
    "recite": recited,
    "recite(items=3)": recited,
}


@pytest.mark.parametrize("sentence", READERS)
@pytest.mark.parametrize("seed", range(3))
def test_reference_reader_finds_the_answer(sentence: str, seed: int, material: TaskSources) -> None:
    made = parse_task(sentence).make(seed, 700, material)
    text = text_of(made)
    for question in made.questions:
        assert READERS[sentence](question.question, text) == question.answer
        parts = [question.answer[start:stop].strip() for start, stop in question.items]
        if sentence.startswith(("ledger", "recite")):
            assert all(re.match(r"\d+: .+\.$|Answer: ", part) for part in parts)
            assert len(parts) == len(re.findall(r"(?:^|\. )(?:\d+|Answer): ", question.answer))
        elif parts:
            assert parts == question.answer.split(", ")


def test_question_counts_hand_values(material: TaskSources) -> None:
    def asked(sentence: str, tokens: int = 900) -> int:
        return len(parse_task(sentence).make(0, tokens, material).questions)

    assert asked("multi_key(questions=3, keys=9)") == 3
    assert asked("variables(chains=5)") == asked("multi_value(keys=5)") == 5
    assert asked("multi_query(questions=2)") == asked("lookup(questions=2)") == 2
    assert asked("needles(needles=4)") == 4
    assert asked("bookings(questions=3)") == asked("planted(facts=3)") == 3
    assert asked("ledger", 1800) > 2 * asked("ledger", 500)


def test_distractor_keys_fill_the_text(material: TaskSources) -> None:
    made = parse_task("multi_key").make(0, 700, material)
    lines = re.findall(MAGIC, made.messages[0].content)
    assert len(lines) == len({key for key, _ in lines}) > 40
    few = parse_task("multi_key(questions=2, keys=5)").make(0, 700, material)
    assert len(re.findall(MAGIC, few.messages[0].content)) == 5


@pytest.mark.parametrize("seed", range(3))
def test_code_continuation_is_in_the_library(seed: int, material: TaskSources) -> None:
    made = parse_task("code").make(seed, 700, material)
    (question,) = made.questions
    before = "\n".join(made.messages[0].content.splitlines()[-8:])
    library = (path.read_text("utf-8") for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    (source,) = (text for text in library if before in text)
    following = source.split(before + "\n", 1)[1].splitlines()[0]
    assert following.strip() == question.answer


def test_noise_text_repeats_its_sentences(material: TaskSources) -> None:
    text = parse_task("passkey").make(0, 300, material).messages[0].content
    rest = re.sub(r"The pass key is (\d+)\. Remember it\. \1 is the pass key\.", "", text)
    assert len(set(re.split(r"(?<=\.)\s+", rest.strip()))) == 5


def last_told(question: Question, conversation: Conversation) -> list[str]:
    """All values of a question's subject, in their order."""
    facts = facts_of(conversation.messages)[SINGLES[question.question]]
    return [value for _, value in facts]


@pytest.mark.parametrize("seed", range(2))
def test_updates_ask_for_changed_values(seed: int, material: TaskSources) -> None:
    made = parse_task('lifelog(questions=2, kinds="update")').make(seed, 2500, material)
    for question in made.questions:
        values = last_told(question, made)
        assert question.kind == "update"
        assert values[-1] == question.answer.lower() != values[0]


@pytest.mark.parametrize("source", ["locomo", "realtalk"])
def test_facts_are_planted_once(source: str, material: TaskSources) -> None:
    made = parse_task(f'planted(of="{source}", facts=5)').make(3, 600, material)
    text = text_of(made)
    for question in made.questions:
        assert last_told(question, made) == [question.answer.lower()]
        index = len("".join(m.content for m in made.messages)) * (question.depth or 0)
        before, total = 0, 0
        for message in made.messages:
            before = total if question.answer in message.content else before
            total += len(message.content)
        assert index == pytest.approx(before)
    words = re.findall(r"word(\d+)x(\d+)", text)
    assert words == sorted(words, key=lambda one: (int(one[0]), int(one[1]))) and len(words) > 20
    roles = {m.content[:6]: m.role for m in made.messages if "nothing more" in m.content}
    assert {m.role for m in made.messages} == {"system", "user", "assistant"} and roles


@pytest.mark.parametrize("share", ["bookings", "mixed"])
def test_booking_answers_are_in_one_dialogue(share: str, material: TaskSources) -> None:
    made = parse_task(share).make(0, 900, material)
    session, booked = 0, list[dict[str, str]]()
    for message in made.messages:
        if header := re.match(r"Session (\d+), ", message.content):
            session = int(header[1])
        if statement := re.fullmatch(r"A (train|boat): (.+)\.", message.content):
            slots = dict(part.split(" ", 1) for part in statement[2].split(", "))
            booked.append({**slots, "noun": statement[1], "session": f"session {session}"})
    asked = [q for q in made.questions if q.kind in ("booking", "bksession")]
    assert len(asked) == (20 if share == "bookings" else 12)
    for question in asked:
        (match,) = [found for form in FORMS if (found := re.fullmatch(form, question.question))]
        (hit,) = [
            slots
            for slots in booked
            if slots[match["s"]] == match["v"] and slots["noun"] == match["n"]
        ]
        assert hit[match.groupdict().get("w", "session")] == question.answer


@pytest.mark.parametrize(
    ("name", "inner"), [("turns", "lookup(questions=7)"), ("requests", "mixed")]
)
def test_sequences_share_what_another_task_makes(
    name: str, inner: str, material: TaskSources
) -> None:
    task = parse_task(f"{name}(of={inner!r})")
    made, alone = task.make(2, 900, material), parse_task(inner).make(2, 900, material)
    assert (made.messages, made.questions) == (alone.messages, alone.questions)
    lengths = [len(sequence) for sequence in task.question_sequences(made.questions)]
    assert lengths == ([7] if task.style is QuestionStyle.TURNS else [3] * 8)


def test_last_sequence_may_be_shorter() -> None:
    questions = tuple(Question(str(number)) for number in range(5))
    sequences = parse_task("requests(turns=2)").question_sequences(questions)
    assert [[q.question for q in one] for one in sequences] == [["0", "1"], ["2", "3"], ["4"]]


@pytest.mark.parametrize("name", ["turns", "requests"])
def test_sequences_do_not_hold_sequences(name: str) -> None:
    with pytest.raises(BadParameter, match=rf"{name}\.of must be .* whose style is turns"):
        parse_task(f'{name}(of="turns()")')


def test_task_does_not_depend_on_the_folder(material: TaskSources, tmp_path: Path) -> None:
    """The conversation does not depend on the corpus folder's path."""
    elsewhere = sources(tmp_path)
    for name in ("bookings", "locomo", "text"):
        task = parse_task(name)
        assert task.make(4, 500, material) == task.make(4, 500, elsewhere)
