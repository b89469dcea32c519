"""The folder that transformers' `generate(custom_generate=...)` loads: custom_generate/generate.py and its requirements.txt.

`python -m spot_dlm.integrations.custom_generate --out FOLDER` writes it; pushed to the hub as it is, its id serves instead of the folder.

Example: `model.generate(ids, custom_generate=str(write_folder(Path("decoder"))), trust_remote_code=True)`.
"""

from importlib import resources
from pathlib import Path

from spot_dlm.artifacts import replace_file

FILES = ("generate.py", "requirements.txt")
_README = """---
library_name: transformers
tags:
- custom_generate
- diffusion-language-model
- speculative-decoding
---

# Lossless speculative decoding of diffusion language models, by spot-dlm

```python
model.generate(**inputs, custom_generate="OWNER/NAME", trust_remote_code=True, family="sdar", drafter="chain", max_new_tokens=128)
```

Arguments of `generate` that a diffusion language model cannot honour are errors. docs/huggingface.md of spot-dlm lists all of them.
"""


def write_folder(out: Path) -> Path:
    """Write the folder, and return it.

    Raises:
        ValueError: if it exists and holds something else.
    """
    if out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - {"custom_generate", "README.md"}):
        raise ValueError(f"--out {out}: exists and holds other files; give another name")
    inner = out / "custom_generate"
    inner.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        text = (resources.files(__package__) / "repository" / name).read_text("utf-8")
        replace_file(inner / name, lambda partial, text=text: partial.write_text(text, "utf-8"))  # type: ignore[misc]
    replace_file(out / "README.md", lambda partial: partial.write_text(_README, "utf-8"))
    return out
