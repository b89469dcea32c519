"""Chat templates of model families, for checkpoints whose tokenizer has none; where each comes from: docs/families.md.

Knows nothing of tokenizers. Example: `chatml("You are a helpful assistant.")` is Dream's.
"""


def chatml(system: str = "", opening: str = "") -> str:
    """Return ChatML with a system turn where the messages bring none, and `opening` at the beginning of the answer."""
    spoken = _text(f"<|im_start|>system\n{system}<|im_end|>\n")
    first = f"{{% if messages[0].role != 'system' %}}{spoken}{{% endif %}}" if system else ""
    turn = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    return _turns(first, turn, f"<|im_start|>assistant\n{opening}")


def _text(text: str) -> str:
    """Return what renders as a text, whose line breaks a template would drop at some places."""
    return "{{ '" + text.replace("\n", "\\n") + "' }}"


def _turns(first: str, turn: str, answer: str) -> str:
    return f"{first}{{% for message in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}{_text(answer)}{{% endif %}}"


LLADA = _turns(
    _text("<|startoftext|>"),
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)
LLADA2 = _turns(
    "{% if messages[0].role != 'system' %}{{ '<role>SYSTEM</role>detailed thinking off<|role_end|>' }}{% endif %}",
    "{{ '<role>' + {'user': 'HUMAN'}.get(message.role, message.role | upper) + '</role>' + message.content + '<|role_end|>' }}",
    "<role>ASSISTANT</role>",
)
BERT_CHAT = _turns(
    "",
    "{{ {'user': '[Question]\\n', 'system': '[SYS]\\n'}.get(message.role, '[Answer]\\n') + message.content | trim "
    "+ {'user': '\\n[/Question]\\n\\n', 'system': '\\n[/SYS]\\n\\n'}.get(message.role, '\\n[/Answer]\\n\\n') }}",
    "[Answer]\n",
)
DREAM = chatml("You are a helpful assistant.")
QWEN2_5 = chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
QWEN3 = chatml()
QWEN3_NOT_THINKING = chatml(opening="<think>\n\n</think>\n\n")
