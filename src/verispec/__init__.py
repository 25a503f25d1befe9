"""verispec: an LLM inference engine that is fast and bit-for-bit reproducible."""
