"""The entry point of the command `spot`: imports the command line late, so that even an early ctrl-C ends in one line."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from spot_dlm.cli import main as run
    except KeyboardInterrupt:
        print("spot: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
