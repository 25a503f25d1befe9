"""The CUDA backend: kernels, their arithmetic, a numpy model of their bits, and passes as replays of captured graphs.

`docs/cuda-arithmetic.md` is the specification. `bits`, `bit_model` and `available` need numpy alone and run anywhere;
everything else imports torch or `cuda.bindings`, each only in the module that needs it.
"""
