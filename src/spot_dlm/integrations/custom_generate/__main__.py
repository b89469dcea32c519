"""`python -m spot_dlm.integrations.custom_generate --out FOLDER`: write the folder for transformers' `custom_generate`."""

import argparse
import sys
from pathlib import Path

from spot_dlm.integrations.custom_generate import write_folder


def main() -> int:
    """Write the folder; exit code 2 and one line where it cannot be."""
    parser = argparse.ArgumentParser(prog="python -m spot_dlm.integrations.custom_generate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder, or one written before")
    try:
        print(write_folder(parser.parse_args().out))
    except (ValueError, OSError) as error:
        print(f"spot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
