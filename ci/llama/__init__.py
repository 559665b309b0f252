"""Files that llama.cpp writes, against this project's reader, decoders and artifacts; run by ``ci/real_gguf``."""
