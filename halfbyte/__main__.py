"""`halfbyte ...` and `python -m halfbyte ...`: the command line, or a sentence where its packages are not installed."""

import sys


def main() -> None:
    """Run the command line. Plain `pip install halfbyte` brings the libraries alone, so its packages may be missing."""
    try:
        from halfbyte.cli.main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("halfbyte"):  # our mistake, not a missing package
            raise
        print(
            f"error: the command line needs the package {error.name!r}, which is not installed. "
            "Install what it needs with: pip install 'halfbyte[train]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
