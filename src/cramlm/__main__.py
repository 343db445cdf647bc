"""`python -m cramlm` is the command `cramlm`."""

from cramlm.cli import main

if __name__ == "__main__":
    main()
