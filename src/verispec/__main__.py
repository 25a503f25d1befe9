"""`python -m verispec` is the command line."""

from verispec.cli.main import main

if __name__ == "__main__":
    main()
