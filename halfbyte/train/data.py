"""From the sources a config names to token ids and labels: read, recognise, encode, cut, split.

Everything here happens before any weight is loaded, so that a wrong column costs seconds. Encoding is ours (encode.py)
and not SFTTrainer's, because sources of different kinds can then be joined, and the loss mask holds for any chat
template; packing, padding and the loss stay SFTTrainer's, which takes data with `input_ids` and `labels` as they are.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.hub import HUB_ID
from halfbyte.train import encode
from halfbyte.train.config import DatasetConfig, DataType, TrainConfig

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")  # what datasets' save_to_disk leaves


@dataclass(frozen=True)
class Data:
    """Encoded data of a run: `train` and `held_out` are `datasets.Dataset` with input_ids and labels, lists of int.

    num_cut, num_dropped   examples cut at sequence_len, and left out for want of a token to train on.
    """

    train: Any
    held_out: Any | None
    num_cut: int
    num_dropped: int

    def summary(self) -> str:
        """One line for the user: examples, tokens, what was cut."""
        tokens = sum(len(ids) for ids, _, _ in token_batches(self.train))
        trained = sum(int((labels != encode.IGNORED).sum()) for _, labels, _ in token_batches(self.train))
        held_out = f", {len(self.held_out):,} held out" if self.held_out is not None else ""
        lost = f"; {self.num_cut:,} cut, {self.num_dropped:,} left out" if self.num_cut or self.num_dropped else ""
        return f"{len(self.train):,} examples{held_out}, {tokens:,} tokens, loss on {trained:,}{lost}"

    def longest(self) -> int:
        """Tokens of the longest training example."""
        return max(int(lengths.max()) for _, _, lengths in token_batches(self.train))

    def fingerprint(self) -> str:
        """SHA-256 over the training tokens, in order: a resumed run must see the same."""
        digest = hashlib.sha256()
        for ids, labels, lengths in token_batches(self.train):
            for values in (lengths, ids, labels):
                digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()


def token_batches(rows: Any, size: int = 1000) -> Iterator[tuple[Any, Any, Any]]:
    """(input_ids, labels, lengths) as flat numpy arrays, `size` examples at a time; lists of lists would be slow."""
    from pyarrow import compute

    for batch in rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(batch_size=size):
        ids, labels = batch["input_ids"], batch["labels"]
        yield tuple(
            array.to_numpy()
            for array in (compute.list_flatten(ids), compute.list_flatten(labels), compute.list_value_length(ids))
        )


def load_data(config: TrainConfig, tokenizer: Any) -> Data:
    """Read and encode everything a config names.

    raises   FileNotFoundError for a missing path; ValueError for an unreadable or empty source, a missing column, or
             when no example has a token to train on.
    """
    train, cut, dropped = _load_all(config.datasets, tokenizer, config.sequence_len)
    held_out = None
    if config.test_datasets:
        held_out, _, _ = _load_all(config.test_datasets, tokenizer, config.sequence_len)
    elif config.val_set_size:
        train, held_out = split(train, config.val_set_size, config.seed)
    return Data(train, held_out, cut, dropped)


def _load_all(sources: Sequence[DatasetConfig], tokenizer: Any, sequence_len: int) -> tuple[Any, int, int]:
    """(encoded data, number of examples cut, number left out) of all the sources, joined in their order."""
    from datasets import concatenate_datasets

    encoded = concatenate_datasets([encode_source(source, read_source(source), tokenizer) for source in sources])
    num_cut = sum(int((lengths > sequence_len).sum()) for _, _, lengths in token_batches(encoded))
    if num_cut:
        encoded = encoded.map(lambda row: {key: values[:sequence_len] for key, values in row.items()})
    # The first token is never predicted, so a label on it alone trains nothing.
    kept = encoded.filter(lambda row: any(label != encode.IGNORED for label in row["labels"][1:]))
    if not len(kept):
        names = ", ".join(source.path for source in sources)
        raise ValueError(
            f"{names}: none of {len(encoded)} examples has a token to train on within sequence_len {sequence_len}; "
            "raise sequence_len, or check that the answers are not empty"
        )
    return kept, num_cut, len(encoded) - len(kept)


def read_source(source: DatasetConfig) -> Any:
    """A source's rows as a `datasets.Dataset`.

    raises   FileNotFoundError, or ValueError for a file that is empty or not what its name says.
    """
    path = Path(source.path)
    if not path.exists():
        return _read_hub(source)
    if path.is_file() and path.suffix not in READERS:
        raise ValueError(f"{path}: expected a file ending in {', '.join(READERS)}, or a folder of such files")
    if path.is_file() and not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty; expected one example a line")
    try:
        rows = _read_local(path, source.split)
    except Exception as error:  # pyarrow, pandas and datasets each raise their own kinds here
        cause = error.__cause__ or error
        raise ValueError(
            f"{path}: not readable as a data set ({type(cause).__name__}: {cause}); mend it, write it as .jsonl, or "
            "check datasets.split"
        ) from error
    if not len(rows):
        raise ValueError(f"{path}: holds no examples; give a path that does")
    return rows


def _read_local(path: Path, split_name: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    if path.is_file():
        return load_dataset(READERS[path.suffix], data_files=str(path), split="train")
    if not any((path / name).exists() for name in SAVED):
        return load_dataset(str(path), split=split_name)
    saved = load_from_disk(str(path))
    if not isinstance(saved, DatasetDict):
        return saved
    if split_name not in saved:
        raise ValueError(f"split {split_name!r} is not among {', '.join(saved)}; set datasets.split")
    return saved[split_name]


def _read_hub(source: DatasetConfig) -> Any:
    if not HUB_ID.fullmatch(source.path):
        raise FileNotFoundError(f"{source.path}: no such data file or folder; check datasets.path")
    from datasets import load_dataset

    try:
        return load_dataset(source.path, split=source.split)
    except Exception as error:  # the client raises many kinds; all mean that the data is not here
        reason = str(error).strip().split("\n")[0][:200]
        raise FileNotFoundError(
            f"{source.path}: no such file here, and the Hub could not be asked for a data set of that name ({reason}); "
            "check the name, go online, or give a local path"
        ) from error


def recognise(source: DatasetConfig, columns: Sequence[str]) -> DataType:
    """The type of a source: as set, or read off its columns.

    raises   ValueError, naming the columns found and those expected.
    """
    needed = columns_of(source)
    if source.type is not None:
        missing = [name for name in needed[source.type] if name not in columns]
        if missing:
            raise ValueError(
                f"{source.path}: no column {', '.join(map(repr, missing))}, which type {source.type} needs; found "
                f"{', '.join(columns)}; set another type, or rename a column"
            )
        return source.type
    for kind, names in needed.items():
        if all(name in columns for name in names):
            return kind
    expected = "; ".join(f"{' + '.join(names)} ({kind})" for kind, names in needed.items())
    raise ValueError(
        f"{source.path}: found columns {', '.join(columns)}; expected {expected}; rename them, or set field or "
        "field_messages"
    )


def columns_of(source: DatasetConfig) -> dict[DataType, list[str]]:
    """The columns each type needs, in the order in which types are tried."""
    return {
        "chat_template": [source.field_messages],
        "prompt_completion": ["prompt", "completion"],
        "alpaca": ["instruction", "output"],
        "completion": [source.field],
    }


def encode_source(source: DatasetConfig, rows: Any, tokenizer: Any) -> Any:
    """Rows of one source as input_ids and labels; an error in a row says which row."""
    from jinja2 import TemplateError  # a template's own complaint, such as about the order of roles

    kind = recognise(source, rows.column_names)
    encode_row = ENCODERS[kind](source, tokenizer)

    def encode_numbered(row: dict[str, Any], number: int) -> encode.Encoded:
        try:
            return encode_row(row)
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            raise ValueError(f"{source.path}: example {number + 1} is not {EXPECTED[kind]}: {error}") from error

    return rows.map(encode_numbered, with_indices=True, remove_columns=rows.column_names)


def _encode_chat(source: DatasetConfig, tokenizer: Any) -> Callable[[dict[str, Any]], encode.Encoded]:
    encoder = encode.chat_encoder(tokenizer)
    return lambda row: encoder(checked_messages(row[source.field_messages]))


def _encode_pair(source: DatasetConfig, tokenizer: Any) -> Callable[[dict[str, Any]], encode.Encoded]:
    return lambda row: encode.encode_completion(tokenizer, text_of(row, "prompt"), text_of(row, "completion"))


def _encode_alpaca(source: DatasetConfig, tokenizer: Any) -> Callable[[dict[str, Any]], encode.Encoded]:
    return lambda row: encode.encode_completion(tokenizer, encode.alpaca_prompt(row), text_of(row, "output"))


def _encode_plain(source: DatasetConfig, tokenizer: Any) -> Callable[[dict[str, Any]], encode.Encoded]:
    return lambda row: encode.encode_text(tokenizer, text_of(row, source.field))


ENCODERS: dict[DataType, Callable[[DatasetConfig, Any], Callable[[dict[str, Any]], encode.Encoded]]] = {
    "chat_template": _encode_chat,
    "prompt_completion": _encode_pair,
    "alpaca": _encode_alpaca,
    "completion": _encode_plain,
}
EXPECTED: dict[DataType, str] = {
    "chat_template": "a list of messages with role and content, the assistant's after another's",
    "prompt_completion": "a prompt and a completion, both text",
    "alpaca": "an instruction and an output, both text",
    "completion": "text",
}


def checked_messages(messages: Any) -> encode.Messages:
    """Messages without the keys that a table filled with None. ValueError for what is no conversation."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"found {type(messages).__name__} {str(messages)[:40]!r}; mend or remove that example")
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for number, message in enumerate(kept):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"message {number} has the keys {', '.join(message) or 'none'}; mend or remove that example"
            )
    if kept[0]["role"] == "assistant":
        raise ValueError("the first message is the assistant's; put another's before it, or remove it")
    return kept


def text_of(row: dict[str, Any], column: str) -> str:
    """A column's text. ValueError for another type, such as an empty cell."""
    if not isinstance(row[column], str):
        raise ValueError(f"{column} is {type(row[column]).__name__}; mend or remove that example")
    return row[column]


def split(rows: Any, size: float, seed: int) -> tuple[Any, Any]:
    """(train, held out): the held-out examples are chosen by seed alone, and both keep their order.

    size     a share below 1, or a count.
    raises   ValueError when nothing is left to train on.
    """
    import torch

    count = int(size) if size >= 1 else max(1, round(len(rows) * size))
    if count >= len(rows):
        raise ValueError(f"val_set_size {size:g} takes all of the {len(rows)} examples; hold out fewer")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return rows.select(sorted(order[count:])), rows.select(sorted(order[:count]))
