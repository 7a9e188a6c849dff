"""`python -m larder` is `larder`."""

from larder.cli.main import main

if __name__ == "__main__":
    main()
