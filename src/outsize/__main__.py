"""``python -m outsize``."""

from outsize.cli import main

if __name__ == "__main__":
    main()
