"""Texts of data sets as typed records; tokens are made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Conversation", "Document", "Message", "Problem", "Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question on a document, with the data set's own answer."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """A long text and what is asked about it.

    Attributes:
        title: of the document.
        text: whole.
        questions: in the data set's order; empty where it only summarises.
        summary: the data set's own, empty where it has none.
    """

    title: str
    text: str
    questions: tuple[Question, ...] = ()
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        text: content; calls of tools as JSON behind it.
    """

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order.

    Attributes:
        name: within its data set.
        messages: as recorded.
    """

    name: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A programming task.

    Attributes:
        name: within its data set.
        prompt: what the model is given.
        solution: the data set's own.
    """

    name: str
    prompt: str
    solution: str
