"""``python -m ninferbuild``: the command line."""

from ninferbuild.cli import console

if __name__ == "__main__":
    console()
