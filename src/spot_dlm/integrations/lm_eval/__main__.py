"""`python -m spot_dlm.integrations.lm_eval`: the harness's own command, with the model `spot` registered.

Bad input is one line and exit code 2; SPOT_DEBUG=1 shows the traceback.

Example: `python -m spot_dlm.integrations.lm_eval --model spot --tasks gsm8k --apply_chat_template`.
"""

import os
import sys


def main() -> None:
    """Register the model, run the harness's command and exit."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import spot_dlm.integrations.lm_eval.model  # noqa: F401
    except ModuleNotFoundError as error:
        _end(2, f"{error}; the harness is installed by: pip install 'spot-dlm[lm-eval]'")
    try:
        cli_evaluate()
    except KeyboardInterrupt:
        _end(130, "interrupted; with --use_cache FILE finished answers are kept, and the same command goes on from there")
    except (ValueError, KeyError, OSError) as error:
        if os.environ.get("SPOT_DEBUG", "") not in ("", "0"):
            raise
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        _end(2, " ".join(text.split()) or type(error).__name__)


def _end(code: int, text: str) -> None:
    print(f"spot: {text}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
