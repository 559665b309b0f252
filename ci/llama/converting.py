"""Run by a Python of its own: the exporter that comes with llama.cpp, told which tokenizer it has before it.

Usage: converting.py LLAMA_CPP OPTION... MODEL. The exporter recognises tokenizers by the tokens that they give for a
sample text, and knows published ones only. Nothing else of it is changed.
"""

from __future__ import annotations

from pathlib import Path
import sys

TOKENIZER = "qwen35"


def main(llama_cpp: Path, options: list[str]) -> None:
    sys.path[0] = str(llama_cpp)
    from conversion.base import TextModel
    import convert_hf_to_gguf

    TextModel.get_vocab_base_pre = lambda self, tokenizer: TOKENIZER
    sys.argv = [str(llama_cpp / "convert_hf_to_gguf.py"), *options]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
