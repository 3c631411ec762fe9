"""Rows to learn from: which columns they have, how they become tokens, and which of them are kept.

All rows are encoded once before a run begins, so that one that cannot be is known at once and not after hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Protocol, TypeVar

from postlude.data.chat import EncodedSequence, Encoder, RowFormat
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.datasets import HeldOutRows, Rows, Sampler
from postlude.recipes.config.schema import InputPath, Settings
from postlude.rollout.tasks import task_digest

if TYPE_CHECKING:
    from postlude.recipes.data.encoded_rows import EncodedRows

Row = TypeVar("Row")
Row_co = TypeVar("Row_co", covariant=True)
Overlong = Literal["refuse", "drop", "cut"]


class Examples(Settings):
    """Answers to learn, from a file of JSONL, JSON, CSV or parquet.

    A dataset with the column of messages is one of conversations, whose assistant turns are learned. One with the
    columns of prompt and completion has one answer a row. One with the column of text is learned whole.
    """

    path: Annotated[Path, InputPath("path")]
    """The file, or a directory of them."""
    messages: str = "messages"
    """The column with whole conversations."""
    prompt: str = "prompt"
    """The column with the prompt: text or messages."""
    completion: str = "completion"
    """The column with the answer to it."""
    text: str = "text"
    """The column with text, all of it to be learned."""
    tools: str = "tools"
    """The column with the functions that messages may call, as JSON schemas, for the chat template to write."""
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns are learned."""
    overlong: Overlong = "refuse"
    """What becomes of rows with more tokens than the budget: they end the run before it begins, are left out, or are
    cut off."""

    def read(self, tokenizer: ChatTokenizer, budget: int, cache: Path | None = None) -> EncodedRows[EncodedSequence]:
        """The rows as tokens: those kept in `cache`, if they are the same."""
        from postlude.recipes.data.encoded_rows import EncodedRows

        encoder = Encoder(tokenizer=tokenizer, max_length=budget, truncate=self.overlong == "cut", turns=self.turns)
        return EncodedRows(self, encoder, cache)

    def form(self, rows: Rows) -> tuple[RowFormat, tuple[str | None, ...]]:
        """What rows are, and the columns that say it."""
        columns = rows.columns
        if self.messages in columns:
            return "conversation", (self.messages,)
        if self.text in columns and self.prompt not in columns:
            return "completion", (None, self.text)
        return "completion", (self.prompt, self.completion)


class Pairs(Settings):
    """Pairs of answers, one preferred, from a file of JSONL, JSON, CSV or parquet."""

    path: Annotated[Path, InputPath("path")]
    """The file, or a directory of them."""
    prompt: str = "prompt"
    """The column with the prompt: text or messages. Not needed where answers are whole conversations."""
    chosen: str = "chosen"
    """The column with the better answer."""
    rejected: str = "rejected"
    """The column with the worse one."""
    tools: str = "tools"
    """The column with the functions that messages may call, as JSON schemas, for the chat template to write."""
    overlong: Overlong = "refuse"
    """What becomes of pairs with an answer of more tokens than half the budget: they end the run before it begins, are
    left out, or are cut off."""

    def read(
        self, tokenizer: ChatTokenizer, budget: int, cache: Path | None = None
    ) -> EncodedRows[tuple[EncodedSequence, EncodedSequence]]:
        """The rows as tokens, what was chosen and what was rejected: those kept in `cache`, if they are the same."""
        from postlude.recipes.data.encoded_rows import EncodedRows

        return EncodedRows(
            self, Encoder(tokenizer=tokenizer, max_length=budget // 2, truncate=self.overlong == "cut"), cache
        )

    def form(self, rows: Rows) -> tuple[RowFormat, tuple[str | None, ...]]:
        """What rows are, and the columns that say it."""
        # Whether a prompt is needed is for each row to say: answers may be whole conversations.
        return "preference", (self.prompt, self.chosen, self.rejected)


class IndexedRows(Protocol[Row_co]):
    """Rows by their number."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int) -> Row_co:
        """One of them."""
        ...


def hold_out_rows(rows: IndexedRows[Any], count: int) -> HeldOutRows:
    """The last `count` rows with different prompts, and every row with one of their prompts.

    Where a conversation is one row a turn, the prompt of each is the conversation's.
    """
    fix = "Lower held_out.rows, give more prompts, or set held_out.rows to 0."
    content = getattr(rows, "content", None) or (lambda index: task_digest(rows[index]))  # encoded rows, or tasks
    return HeldOutRows(len(rows), content, count, what="rows", fix=fix)


class RowBatches(Generic[Row]):
    """The order of a run through rows: some held out, the others in shuffled epochs, `batch` of them a step."""

    def __init__(self, rows: IndexedRows[Row], *, batch: int, held_out: int, seed: int) -> None:
        self.rows, self.batch = rows, batch
        self.skip = hold_out_rows(rows, held_out) if held_out else None
        self.sampler = Sampler(len(rows), seed, skip=self.skip or ())

    def take(self) -> list[Row]:
        """The rows of the next step."""
        return [self.rows[index] for index in self.sampler.take(self.batch)]

    @property
    def held_out(self) -> Sequence[Row]:
        """The rows that are never trained on."""
        return [] if self.skip is None else [self.rows[index] for index in self.skip.indices]

    def steps(self, epochs: float) -> int:
        """How many steps it takes to see each row that is trained on `epochs` times."""
        skip = self.skip
        rows = len(self.rows) if skip is None else sum(index not in skip for index in range(len(self.rows)))
        return max(1, round(epochs * rows / self.batch))
