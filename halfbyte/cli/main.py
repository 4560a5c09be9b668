"""`halfbyte VERB ...`: one typer app, one file per verb, and one place where errors become sentences.

Only the verb that stands on the command line is imported; the others are listed from the table below. That keeps
`halfbyte --help` clear of torch and transformers, whose imports take seconds. A subclass of typer's group with a lazy
`get_command` was the alternative; it would lean on parts of typer that are not public.

What a user can mend (a wrong path, a wrong key, a full disk) arrives here as ValueError, OSError, RuntimeError or
ImportError, and leaves as one line on stderr and exit code 2. Everything else is our mistake and keeps its traceback.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from halfbyte.cli.quiet import quiet_imports

# Each verb lives in halfbyte/cli/<verb>.py, as a function of the same name.
VERBS = {
    "plan": "Say what a run needs before anything is loaded, and which settings fit.",
    "train": "Train a LoRA adapter on an NVFP4 base.",
    "report": "Write what a run recorded as one HTML file.",
    "generate": "Answer prompts with a model, or with two of them.",
    "chat": "Talk to a model, or to two of them at once.",
    "eval": "Held-out loss and perplexity, as training reports them; or lm-eval's tasks.",
    "quantize": "Turn a dense checkpoint or a GGUF file into an NVFP4 one.",
    "merge": "Write base and adapter as one model, in bf16 or in NVFP4.",
    "export": "Write an NVFP4 model in another format, for another serving engine.",
    "push": "Send an adapter or a model to the Hugging Face Hub.",
    "inspect": "Say what a model or an adapter is, and what is suspicious about it.",
    "verify": "Compare two NVFP4 models across formats.",
}
USER_ERRORS = (ValueError, OSError, RuntimeError, ImportError)
TRACEBACK = "--traceback"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; leaves through SystemExit with code 0, 1 (interrupted or our mistake) or 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    show_traceback = TRACEBACK in args
    args = [arg for arg in args if arg != TRACEBACK]
    quiet_imports()
    try:
        build_app(args)(args=args, prog_name="halfbyte")
    except USER_ERRORS as error:
        if show_traceback or isinstance(error, (NotImplementedError, RecursionError)):
            raise
        print(f"error: {one_sentence(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def build_app(args: Sequence[str]) -> typer.Typer:
    """The typer app for these arguments: verbs named in them are imported, the others only listed."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_options)
    for verb, summary in VERBS.items():
        if verb in args:
            app.command(verb)(load_verb(verb))
        else:
            app.command(verb, help=summary)(_listed)
    return app


def load_verb(verb: str) -> Callable[..., None]:
    """The function behind a verb. ImportError names the extra when a package of it is missing."""
    try:
        module = importlib.import_module(f"halfbyte.cli.{verb}")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"`halfbyte {verb}` needs the package {error.name!r}, which is not installed. "
            "Install what the command line needs with: pip install 'halfbyte[train]'"
        ) from error
    return getattr(module, verb)


def one_sentence(error: BaseException) -> str:
    """The message on one line; an OSError from the system keeps the file's name."""
    return " ".join(str(error).split()) or type(error).__name__


def _version(value: bool) -> None:
    if value:
        from halfbyte import __version__

        print(f"halfbyte {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Show where an error came from, instead of one sentence.")
    ] = False,
) -> None:
    """Train adapters on 4-bit (NVFP4) language models."""


def _listed() -> None:
    """Stands in for a verb that is not on the command line."""
