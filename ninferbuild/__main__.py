"""``python -m ninferbuild``: the command line."""

from ninferbuild.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
