"""``python -m vtensor``: the command ``vtensor``."""

from vtensor.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
