"""The codebooks are torchao's, bit for bit; the sha1 sums were taken from torchao 0.18's own tables."""

import hashlib

import pytest
import torch

from halfbyte.optim.formats import FORMATS, codebook, midpoints, top_code, zero_code

SHA1 = {
    ("8bit", True): "cb07ba0d1557267d68103e0f7bc95af7a44d75f8",
    ("8bit", False): "455646eccb91aa9c9e76eec41f55b43022a651ce",
    ("4bit", True): "2887aaa580371a9ae6711a799973777abab21e0a",
    ("4bit", False): "3da63f2b4bc5fe4c532b3a312353f4412ac26e7d",
}


@pytest.mark.parametrize("name, signed", SHA1)
def test_codebook_is_torchaos(name: str, signed: bool) -> None:
    assert hashlib.sha1(codebook(name, signed).numpy().tobytes()).hexdigest() == SHA1[name, signed]


@pytest.mark.parametrize("name, signed", SHA1)
def test_midpoints_are_between_codes(name: str, signed: bool) -> None:
    values, cuts = codebook(name, signed), midpoints(name, signed)
    assert (values[:-1] < cuts).all() and (cuts < values[1:]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_special_codes(name: str) -> None:
    values = codebook(name, True)
    assert values[zero_code(name, True)] == 0
    assert values[top_code(name)] == FORMATS[name].code_max
    unsigned = codebook(name, False)
    assert unsigned[zero_code(name, False)] == (1 / 16 if name == "4bit" else 0)


def test_bytes_per_parameter_are_torchaos() -> None:
    assert FORMATS["8bit"].bytes_per_param <= 2.04
    assert FORMATS["fp8"].bytes_per_param <= 2.04
    assert FORMATS["4bit"].bytes_per_param <= 1.07


@pytest.mark.parametrize("block_size", [0, -1, 1.5, True, "256"])
def test_block_size_is_checked(block_size: object) -> None:
    with pytest.raises(ValueError, match="block_size"):
        FORMATS["8bit"].with_block_size(block_size)


def test_default_dtype_and_device_do_not_disturb_the_tables() -> None:
    codebook.cache_clear()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            table = codebook("8bit", True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert hashlib.sha1(table.numpy().tobytes()).hexdigest() == SHA1["8bit", True]
