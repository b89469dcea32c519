"""lm-evaluation-harness: the model `spot`, which answers `generate_until` by speculative decoding (docs/evaluation.md).

The harness has no entry points for models: its command runs as `python -m spot_dlm.integrations.lm_eval`, with the harness's own options.
In Python, `model.SpotLM` is handed to `lm_eval.simple_evaluate`, or named "spot" once that module is imported.

Example: `lm_eval.simple_evaluate(SpotLM(drafter="auto"), tasks=["gsm8k"], apply_chat_template=True)`.
"""
