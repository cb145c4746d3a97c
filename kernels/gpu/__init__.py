"""The Triton form of each operation: one file an operation, named like the file of its reference.

Nothing here is imported unless a CUDA device is there, Triton's interpreter is asked for
(TRITON_INTERPRET=1), or the kernels are compiled ahead of time. The folder is not called `triton`:
a script started inside kernels/ would import it in place of the package.
"""
