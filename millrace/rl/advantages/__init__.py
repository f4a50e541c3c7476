"""Advantages: how much better each token was than expected. Each estimator is one file.

An estimator returns `(advantages_bt, returns_bt)`. Both are 0 where the mask is false. A critic learns to predict
`returns_bt`.
"""
