"""Every kind of source is read, and everything wrong with one is a sentence that names it."""

import pytest

from halfbyte.train import data, encode
from halfbyte.train.config import DatasetConfig, build_config
from tests.train import tiny
from tests.train.tiny import chat_rows, write_lines

ROWS = {
    "chat_template": chat_rows(6),
    "prompt_completion": [{"prompt": f"add {n}", "completion": f" {n}"} for n in range(6)],
    "alpaca": [{"instruction": f"add {n}", "input": "", "output": str(n)} for n in range(6)],
    "completion": [{"text": f"the sum of {n}"} for n in range(6)],
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def config(path, **changes):
    return build_config(
        {"base_model": "b", "output_dir": "o", "datasets": [{"path": str(path)}], "sequence_len": 128, **changes}
    )


@pytest.mark.parametrize("kind", ROWS)
def test_each_type_is_recognised_by_its_columns(kind, tmp_path, tokenizer) -> None:
    loaded = data.load_data(config(write_lines(tmp_path / "rows.jsonl", ROWS[kind])), tokenizer)
    assert len(loaded.train) == 6 and loaded.held_out is None
    assert set(loaded.train.column_names) == {"input_ids", "labels"}
    assert any(label != encode.IGNORED for label in loaded.train[0]["labels"])


def test_files_and_folders_give_the_same_data(tmp_path, tokenizer) -> None:
    """JSONL, Parquet, a folder of files, and what `save_to_disk` writes, plain and with splits."""
    import datasets

    rows = datasets.Dataset.from_list(ROWS["prompt_completion"])
    (tmp_path / "folder").mkdir()
    paths = {
        "jsonl": write_lines(tmp_path / "rows.jsonl", ROWS["prompt_completion"]),
        "folder": write_lines(tmp_path / "folder" / "train.jsonl", ROWS["prompt_completion"]).parent,
        "parquet": tmp_path / "rows.parquet",
        "saved": tmp_path / "saved",
        "splits": tmp_path / "splits",
    }
    rows.to_parquet(str(paths["parquet"]))
    rows.save_to_disk(str(paths["saved"]))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(paths["splits"]))
    found = {kind: data.load_data(config(path), tokenizer).fingerprint() for kind, path in paths.items()}
    assert len(set(found.values())) == 1, found
    with pytest.raises(ValueError, match="split 'test' is not among train"):
        data.read_source(DatasetConfig(path=str(paths["splits"]), split="test"))


def test_sources_of_different_types_are_joined(tmp_path, tokenizer) -> None:
    sources = [{"path": str(write_lines(tmp_path / f"{kind}.jsonl", rows))} for kind, rows in ROWS.items()]
    assert len(data.load_data(config("unused", datasets=sources), tokenizer).train) == 24


def test_split_depends_on_the_seed_alone(tmp_path, tokenizer) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS["completion"])
    first, again, other = (
        data.load_data(config(path, val_set_size=2, seed=seed), tokenizer).held_out["input_ids"] for seed in (1, 1, 2)
    )
    assert list(first) == list(again) != list(other)
    share = data.load_data(config(path, val_set_size=0.5), tokenizer)
    assert (len(share.train), len(share.held_out)) == (3, 3)
    with pytest.raises(ValueError, match="takes all of the 6 examples"):
        data.load_data(config(path, val_set_size=6), tokenizer)


def test_long_examples_are_cut_and_those_without_an_answer_left_out(tmp_path, tokenizer) -> None:
    rows = [{"prompt": "x" * 200, "completion": "y"}, {"prompt": "x", "completion": "y" * 200}]
    loaded = data.load_data(config(write_lines(tmp_path / "rows.jsonl", rows)), tokenizer)
    assert (len(loaded.train), loaded.num_cut, loaded.num_dropped) == (1, 2, 1)
    assert len(loaded.train[0]["input_ids"]) == 128
    assert "2 cut, 1 left out" in loaded.summary()
    with pytest.raises(ValueError, match="none of 1 examples has a token to train on within sequence_len 128"):
        data.load_data(config(write_lines(tmp_path / "long.jsonl", rows[:1])), tokenizer)


@pytest.mark.parametrize(
    ("rows", "source", "message"),
    [
        ([{"question": "a", "answer": "b"}], {}, "found columns question, answer; expected messages"),
        (
            [{"prompt": "a"}],
            {"type": "prompt_completion"},
            "no column 'completion', which type prompt_completion needs",
        ),
        ([{"text": "a"}], {"type": "completion", "field": "body"}, "no column 'body'"),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}],
            {},
            "example 2 .*completion is None",
        ),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], {}, "first message is the assistant's"),
        ([{"messages": []}], {}, "example 1 is not a list of messages"),
        ([{"messages": ["a"]}], {}, "example 1 is not a list of messages"),
        ([{"messages": [{"from": "user", "value": "a"}]}], {}, "message 0 has the keys from, value"),
    ],
)
def test_wrong_columns_and_rows(rows, source, message, tmp_path, tokenizer) -> None:
    path = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=message) as raised:
        data.load_data(config("unused", datasets=[{"path": str(path), **source}]), tokenizer)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "the file is empty"),
        ("blank.jsonl", "\n\n", "rows|examples|readable"),
        ("broken.jsonl", '{"text": ', "not readable as a data set"),
        ("broken.parquet", "no parquet", "not readable as a data set"),
        ("rows.csv", "a,b", r"expected a file ending in \.jsonl, \.json, \.parquet"),
    ],
)
def test_unreadable_files(name, content, message, tmp_path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        data.read_source(DatasetConfig(path=str(tmp_path / name)))


def test_empty_folder(tmp_path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="nothing: not readable"):
        data.read_source(DatasetConfig(path=str(tmp_path / "nothing")))


def test_missing_path_and_hub_id_offline() -> None:
    with pytest.raises(FileNotFoundError, match="no such data file or folder"):
        data.read_source(DatasetConfig(path="no/such/file.jsonl"))
    with pytest.raises(FileNotFoundError, match="someone/some-data: no such file here, and the Hub could not be asked"):
        data.read_source(DatasetConfig(path="someone/some-data"))
