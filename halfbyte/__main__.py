"""`python -m halfbyte` is the `halfbyte` command."""

from halfbyte.cli.main import main

if __name__ == "__main__":
    main()
