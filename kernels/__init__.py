"""Kernels of the split backward: what I and W compute on a GPU, in Triton.

| file | computes | called by zbpipe/ |
|---|---|---|
| `dgrad.py` | dX = dY W | in I |
| `wgrad.py` | dW += dYᵀ X, one microbatch or several of a ring | in W, one microbatch at a time |
| `expert_wgrad.py` | the same for all experts of a mixture, rows sorted by expert | in W |
| `bias_grad.py` | db += Σ dY, of one or several likewise | in W, one at a time |
| `norm_dgrad.py`, `norm_wgrad.py` | layer norm's and RMS norm's backward in two | no |
| `embedding_grad.py` | dW[token] += dY, without atomics | in W |

Nothing in zbpipe/ calls a ring of several microbatches yet (a grouped W): whoever wants it calls
`dispatch` or `ops`. Nor does anything there call the norm kernels: the rule of norms
(zbpipe/model/rules/norm.py) computes by torch, and is off unless it is asked for.

Each has the kernel, its launcher and a naive fp64 `reference`. `dispatch.py` picks Triton, cuBLAS
or torch, on every device, and `ops.py` makes torch operators of that; `tables.py` says with which
tile sizes, `tune.py` measures them on a GPU, `compiled.py` compiles all of it without one
(COMPILED.md). Triton is optional (`[cuda]`): only the kernel files import it. What they take in
time on a GPU: not yet run.
"""
