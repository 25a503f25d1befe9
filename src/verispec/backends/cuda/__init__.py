"""The bottom of the CUDA backend: kernels, their arithmetic, and a numpy model of their bits.

`docs/cuda-arithmetic.md` is the specification. `bits` and `bit_model` need numpy alone and run anywhere; everything
else imports torch or `cuda.bindings`, each only in the module that needs it. Knows nothing of passes or requests.
"""
