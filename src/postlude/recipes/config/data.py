"""Settings of a dataset: its file and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from postlude.checks import Positive
from postlude.data.chat import Encoder, RowFormat
from postlude.data.chat_template import check_variables
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.datasets import Rows, dataset_files, read_rows
from postlude.data.row_formats import ALPACA, SHAREGPT, ExampleFormat, recognised_format
from postlude.options import Common, TrainedTurns
from postlude.recipes.config.schema import InputPath, Settings
from postlude.recipes.sequence_limit import SequenceLimit

Overlong = Literal["refuse", "drop", "cut"]


class DatasetPath(Settings):
    """The path of a dataset's rows."""

    path: Common[Annotated[Path, InputPath("path")]]
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
        return read_rows(self.path, config=self.config, split=self.split)


class ChatOptions(Settings):
    """How messages become text."""

    system: str | None = None
    """System message to put before messages that have none."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}. One that it does not read is refused."""


class TrainingDataset(DatasetPath, ChatOptions):
    """What every dataset to train on has."""

    text_field: ClassVar[str] = "path"
    """The field that text sets."""

    weight: Positive | None = None
    """Weight of this dataset in a list of them: its share of the rows is its weight over the sum of weights. None takes
    the number of its rows."""
    shuffle: bool = True
    """Visit the rows in another order every epoch; false takes the order of the files."""
    streaming: bool = False
    """Read and encode rows while training, instead of all before. Needs steps. The first rows are the held-out ones."""
    shuffle_buffer: PositiveInt = 10_000
    """Rows that are shuffled together with streaming: each so many successive rows of the files."""

    def _encoder(self, tokenizer: ChatTokenizer, max_length: int, **options: Any) -> Encoder:
        check_variables(tokenizer, self.template_variables)
        options |= {"options": self.template_variables, "system": self.system}
        return Encoder(tokenizer=tokenizer, max_length=max_length, **options)


class Examples(TrainingDataset):
    """Completions of a dataset.

    A dataset with a column of messages holds conversations, whose assistant turns are trained on. One with columns of
    prompt and completion holds one completion a row. One with a column of text is trained on as a whole.
    """

    format: ExampleFormat | None = None
    """Format of the rows: "messages", "sharegpt" (a column conversations), "completion", "alpaca" (columns instruction,
    input and output) or "text". None recognises it by the columns, and refuses those of several formats."""
    messages: Common[str] = "messages"
    """Column of whole conversations."""
    prompt: Common[str] = "prompt"
    """Column of the prompt: text or messages."""
    completion: Common[str] = "completion"
    """Column of the completion."""
    text: Common[str] = "text"
    """Column of text to train on as a whole."""
    tools: str = "tools"
    """Column of the tools that messages may call, as JSON schemas, for the chat template."""
    turns: TrainedTurns = "all"
    """Assistant turns to train on."""
    overlong: Overlong = "refuse"
    """What to do with rows longer than the budget or the context length: refuse to start, drop them, or cut them off.
    """
    sequences: ClassVar[int] = 1
    """Sequences of a row."""

    def encoder(self, tokenizer: ChatTokenizer, limit: SequenceLimit) -> Encoder:
        return self._encoder(tokenizer, limit.tokens(), truncate=self.overlong == "cut", turns=self.turns)

    def form(self, rows: Rows) -> tuple[RowFormat, tuple[str | None, ...]]:
        """Returns the format of the rows and their columns. Raises if they have the columns of no format."""
        columns = rows.columns
        formats: dict[ExampleFormat, tuple[str, ...]] = {
            "messages": (self.messages,),
            "completion": (self.prompt, self.completion),
            "text": (self.text,),
            "alpaca": ALPACA,
        }
        if self.messages not in SHAREGPT:
            formats["sharegpt"] = SHAREGPT
        chosen = self.format or recognised_format(rows.name, columns, formats)
        if chosen is None:
            listed = ", ".join(f'"{name}"' for name in columns) or "none"
            raise ValueError(
                f'dataset {rows.name} has no column "{self.messages}", "{self.prompt}" or "{self.text}"; it has: '
                f"{listed}. Name yours with data.messages, with data.prompt and "
                f"data.completion, or with data.text."
            )
        if chosen == "text":
            return "completion", (None, self.text)
        if chosen == "sharegpt":
            return "conversation", SHAREGPT
        if chosen == "alpaca":
            return "completion", ALPACA
        return "conversation" if chosen == "messages" else "completion", formats[chosen]


class LabelledExamples(Examples):
    """Completions of a file, each with a label that says whether it is desirable."""

    label: Common[str] = "label"
    """Column of the label: true or false, or 1 or 0, as a value or, as in CSV, as text."""


class Pairs(TrainingDataset):
    """Pairs of completions of a dataset, one preferred."""

    prompt: Common[str] = "prompt"
    """Column of the prompt: text or messages. Not needed if completions are whole conversations."""
    chosen: Common[str] = "chosen"
    """Column of the preferred completion."""
    rejected: Common[str] = "rejected"
    """Column of the other completion."""
    margin: str | None = None
    """Column of the margin by which the preferred completion should lead, added to objective.margin; none reads none.
    """
    tools: str = "tools"
    """Column of the tools that messages may call, as JSON schemas, for the chat template."""
    overlong: Overlong = "refuse"
    """What to do with pairs that have a completion longer than half the budget, or than the context length: refuse to
    start, drop them, or cut them off."""
    sequences: ClassVar[int] = 2
    """Sequences of a row."""

    def encoder(self, tokenizer: ChatTokenizer, limit: SequenceLimit) -> Encoder:
        """Returns the encoder of a completion, which takes half the budget."""
        return self._encoder(tokenizer, limit.tokens(self.sequences), truncate=self.overlong == "cut")

    def form(self, rows: Rows) -> tuple[RowFormat, tuple[str | None, ...]]:
        # Whether a prompt is needed depends on the row: completions may be whole conversations.
        return "preference", (self.prompt, self.chosen, self.rejected)


class Mixture(Settings):
    """Several datasets, whose rows are mixed."""

    list_field: ClassVar[str] = "datasets"
    """The field that a list sets."""

    datasets: tuple[TrainingDataset, ...]
    """The datasets."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        known = [dataset.weight is not None for dataset in self.datasets]
        if any(known) and not all(known):
            raise ValueError(
                f"{self.datasets[known.index(False)].path} has no weight, but others have. Give all or none."
            )
        if not all(known) and any(dataset.streaming for dataset in self.datasets):
            raise ValueError("a dataset with streaming has an unknown number of rows. Give each dataset a weight.")
        return self


class ExampleMixture(Mixture):
    """Several datasets of completions."""

    datasets: Annotated[tuple[Examples, ...], Field(min_length=2)]
    """The datasets."""


class LabelledMixture(Mixture):
    """Several datasets of completions with labels."""

    datasets: Annotated[tuple[LabelledExamples, ...], Field(min_length=2)]
    """The datasets."""


class PairMixture(Mixture):
    """Several datasets of pairs."""

    datasets: Annotated[tuple[Pairs, ...], Field(min_length=2)]
    """The datasets."""

    @model_validator(mode="after")
    def _check_margins(self) -> Self:
        without = [dataset.path for dataset in self.datasets if dataset.margin is None]
        if without and len(without) < len(self.datasets):
            raise ValueError(f"{without[0]} has no margin, but others have. Name a column of margins for all or none.")
        return self


def datasets_of(data: Any) -> tuple[Any, ...]:
    """Returns the datasets of a section: one, several of a mixture, or none if it is no dataset."""
    if isinstance(data, Mixture):
        return data.datasets
    return (data,) if isinstance(data, TrainingDataset) else ()
