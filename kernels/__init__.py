"""Kernels of the split backward: what I and W compute on a GPU, in Triton.

| file | computes | called in |
|---|---|---|
| `dgrad.py` | dX = dY W | I |
| `wgrad.py` | dW += dYᵀ X; one launch for W's that follow one another | W |
| `expert_wgrad.py` | the same for all experts of a mixture, rows sorted by expert | W |
| `bias_grad.py` | db += Σ dY | W |
| `norm_dgrad.py`, `norm_wgrad.py` | layer norm's and RMS norm's backward in two | I and W |
| `embedding_grad.py` | dW[token] += dY, without atomics | W |

Norms' are called where norms are deferred, which is off unless asked for (`Splitter(norms=True)`).

Each has the kernel, its launcher and a naive fp64 `reference`. `dispatch.py` picks Triton, cuBLAS
or torch, on every device, and `ops.py` makes torch operators of that, which the split calls on a
GPU; `tables.py` says with which tile sizes, `tune.py` measures them on a GPU, `compiled.py`
compiles all of it without one (COMPILED.md). Triton is optional (`[cuda]`): only the kernel files
import it. What they take in time on a GPU: not yet run.
"""
