"""The algorithms: advantages, policy losses, KL, corrections and aggregation as pure functions on tensors.

Each algorithm is a function with the name that users write, in a file of that name or of its family:
`advantages/grpo.py`, `policy_losses/ppo.py`, `corrections/tis.py` with `tis_token` and others. The signature of the
function is its registration: a parameter annotated `Tensor` is an input that the caller computes; every other
parameter is an option of the job with its range (`registry/options.py`) and its default.

- `registry/catalogue.py` reads the signatures without importing torch; job specs are validated against it.
- `services/trainer/algorithms/` imports and calls the functions: built-in ones, and those from `file.py:function`.

Tensors are padded: `_bt` is [sequences, tokens], `_b` is [sequences], `_bk` is [sequences, rewards]. A mask is true
where the policy generated the token and the token counts; values at other places are never read, not even NaN. A
sequence without any token that counts is padding: it is in no mean, no group and no denominator. `tokens.unpack`
pads a packed batch. Nothing here communicates with another rank: what must be exact over micro-batches and
data-parallel ranks takes the counts of the whole batch (`BatchTotals`), and the results add up.
"""
