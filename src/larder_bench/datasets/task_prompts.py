"""Wording of tasks: prompts that a kind of model can follow, and the place of the question."""

from __future__ import annotations

from enum import Enum

from larder.core import PromptLayout

TRAINED_ON_DIALOGUES = frozenset({"seed", "smollm2-dialogue", "smollm2-dialogue-4k"})


class Wording(Enum):
    """Wording of a task's prompts.

    SEED: that of the dialogues which the bundled models were trained on. A text is acknowledged
        like any message, a question is a message of its own, and the answer is the bare value.
    INSTRUCT: the published benchmark's own, or plain instructions, in the model's chat template.
        Text and question share one message, the answer's beginning is given, and an answer is
        right if it contains the value.
    PLAIN: as INSTRUCT without chat template, for models that are not tuned to follow instructions.
    """

    SEED = "seed"
    INSTRUCT = "instruct"
    PLAIN = "plain"

    @staticmethod
    def of_model(name: str, has_chat_template: bool) -> Wording:
        """Wording that a model follows.

        Args:
            name: name of the model, as `--model` takes it.
        """
        if name in TRAINED_ON_DIALOGUES or name.startswith("random:"):
            return Wording.SEED
        return Wording.INSTRUCT if has_chat_template else Wording.PLAIN

    @property
    def layout(self) -> PromptLayout:
        """Layout of one long text and a question."""
        return _LAYOUTS[self]


class QuestionPlacement(Enum):
    """Place of the question of a measurement.

    AFTER: it comes after the context was read and compressed, which therefore does not know it
        (query-agnostic compression; EpiCache, KVzip).
    INSIDE: it ends the context and is read and compressed with it, so that a policy can score
        entries by it (SnapKV, H2O, D2O). Every question has a prefill of its own.
    """

    AFTER = "after"
    INSIDE = "inside"


_LAYOUTS = {
    Wording.SEED: PromptLayout.DOCUMENT,
    Wording.INSTRUCT: PromptLayout.SINGLE_TURN,
    Wording.PLAIN: PromptLayout.PLAIN,
}
