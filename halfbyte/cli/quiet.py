"""What keeps the libraries' own notes off the screen, so that what halfbyte says can be read.

Called by the command line alone: a library that is imported sets nothing.
"""

import logging
import warnings

NOISY = ("torchao", "torch.utils._pytree", "DeepSpeed")  # they log while they are imported


def quiet_imports() -> None:
    """Silence what is logged during imports, deprecations, and PEFT's surprise at our key in adapter_config.json."""
    for name in NOISY:
        logging.getLogger(name).addFilter(_errors_only)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"Unexpected keyword arguments \['halfbyte'\]")


def quiet_libraries() -> None:
    """Silence notes and nested progress bars of transformers and datasets; imports both."""
    import datasets

    datasets.disable_progress_bars()
    quiet_transformers()


def quiet_transformers() -> None:
    """The same for transformers alone."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
