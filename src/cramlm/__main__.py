"""`python -m cramlm` is the command `cramlm`."""

from cramlm.cli.app import main

if __name__ == "__main__":
    main()
