"""Prompt sources: Parquet and JSONL in verl's columns, and procedural tasks. No torch.

`open_source` gives a `Source`: as many rows as `len` says, each a `PromptRow`, and an order for every pass. A file that
cannot be used is refused when it is opened (InvalidJob), one bad row when it is read (BadRow). `chat` renders a row
to tokens, `model_folder` looks whether a model can be used, `write` writes rows that `open_source` reads.
"""

from millrace.data.order import Order
from millrace.data.row import Message, PromptRow
from millrace.data.source import Source, open_source

__all__ = ["Message", "Order", "PromptRow", "Source", "open_source"]
