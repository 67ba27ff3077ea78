"""``python -m dbqueue`` is the command ``dbqueue``."""

from dbqueue.cli import main

if __name__ == "__main__":
    main()
