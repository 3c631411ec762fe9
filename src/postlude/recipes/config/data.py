"""Settings of a dataset: its file and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from postlude.data.chat import Encoder, RowFormat
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.datasets import Rows, dataset_files, read_rows
from postlude.recipes.config.schema import InputPath, Settings

Overlong = Literal["refuse", "drop", "cut"]


class DatasetPath(Settings):
    """Where the rows of a dataset are."""

    path: Annotated[Path, InputPath("path")]
    """A file (JSONL, JSON, CSV or parquet), a directory of files, or ORG/NAME or ORG/NAME@REVISION of a dataset on the
    Hugging Face Hub."""
    config: str | None = None
    """Configuration of a dataset on the Hub, or a subdirectory; none takes the default one."""
    split: str | None = None
    """Split of a dataset on the Hub, or of a directory; none takes "train" on the Hub and all files of a directory."""

    def files(self) -> list[Path]:
        """Returns the files in order, downloaded if the dataset is on the Hub."""
        return dataset_files(self.path, self.config, self.split)

    def read(self) -> Rows:
        """Returns every row."""
        return read_rows(self.path, config=self.config, split=self.split)


class Examples(DatasetPath):
    """Completions of a dataset.

    A dataset with a column of messages holds conversations, whose assistant turns are trained on. One with columns of
    prompt and completion holds one completion a row. One with a column of text is trained on as a whole.
    """

    messages: str = "messages"
    """Column of whole conversations."""
    prompt: str = "prompt"
    """Column of the prompt: text or messages."""
    completion: str = "completion"
    """Column of the completion."""
    text: str = "text"
    """Column of text to train on as a whole."""
    tools: str = "tools"
    """Column of the tools that messages may call, as JSON schemas, for the chat template."""
    turns: Literal["all", "last"] = "all"
    """Assistant turns to train on."""
    overlong: Overlong = "refuse"
    """What to do with rows longer than the budget: refuse to start, drop them, or cut them off."""

    def encoder(self, tokenizer: ChatTokenizer, budget: int) -> Encoder:
        """Returns the encoder of a row."""
        return Encoder(tokenizer=tokenizer, max_length=budget, truncate=self.overlong == "cut", turns=self.turns)

    def form(self, rows: Rows) -> tuple[RowFormat, tuple[str | None, ...]]:
        """Returns the format of the rows and their columns."""
        columns = rows.columns
        if self.messages in columns:
            return "conversation", (self.messages,)
        if self.text in columns and self.prompt not in columns:
            return "completion", (None, self.text)
        return "completion", (self.prompt, self.completion)


class LabelledExamples(Examples):
    """Completions of a file, each with a label that says whether it is desirable."""

    label: str = "label"
    """Column of the label: true or false, or 1 or 0."""


class Pairs(DatasetPath):
    """Pairs of completions of a dataset, one preferred."""

    prompt: str = "prompt"
    """Column of the prompt: text or messages. Not needed if completions are whole conversations."""
    chosen: str = "chosen"
    """Column of the preferred completion."""
    rejected: str = "rejected"
    """Column of the other completion."""
    margin: str | None = None
    """Column of the margin by which the preferred completion should lead, added to objective.margin; none reads none.
    """
    tools: str = "tools"
    """Column of the tools that messages may call, as JSON schemas, for the chat template."""
    overlong: Overlong = "refuse"
    """What to do with pairs that have a completion longer than half the budget: refuse to start, drop them, or cut them
    off."""

    def encoder(self, tokenizer: ChatTokenizer, budget: int) -> Encoder:
        """Returns the encoder of a completion, which takes half the budget."""
        return Encoder(tokenizer=tokenizer, max_length=budget // 2, truncate=self.overlong == "cut")

    def form(self, rows: Rows) -> tuple[RowFormat, tuple[str | None, ...]]:
        """Returns the format of the rows and their columns."""
        # Whether a prompt is needed depends on the row: completions may be whole conversations.
        return "preference", (self.prompt, self.chosen, self.rejected)
